"""What a compiler of programs makes of the Triton operators, for Hopper and without a GPU: kernel launches with dynamic
grids, and nothing that they read is taken for something that they write.
"""

import pytest
import torch
import triton
from torch._functorch.aot_autograd import aot_export_module
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from triton.backends.compiler import GPUTarget

from eyas.kernels import fragment_bf16_linear, fragment_int8_linear, fragment_linear, mma_linear, splitk_sdpa  # noqa: F401
from eyas.kernels.fragment_bf16_linear import pack_bf16_fragments
from eyas.kernels.fragment_int8_linear import pack_int8_fragments
from eyas.kernels.fragment_linear import pack_fragments, pack_scales

eyas = torch.ops.eyas
ROWS = torch.export.Dim("rows", min=1, max=16)


class Hopper:
    """The driver of a card that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(triton.runtime.driver, "_active", Hopper())


class Call(torch.nn.Module):
    """An operator over inputs, and constants that come after the first of them."""

    def __init__(self, operator, *tail, **constants):
        super().__init__()
        self.operator, self.tail, self.names = operator, tail, tuple(constants)
        for name, value in constants.items():
            self.register_buffer(name, value)

    def forward(self, x, *others):
        return (self.operator(x, *others, *(getattr(self, name) for name in self.names), *self.tail),)


def launches(module, inputs, dynamic, n_copies=0) -> list[dict]:
    """The kernel launches that a module becomes: their grids and arguments."""
    with torch.no_grad():
        ep = torch.export.export(module, inputs, dynamic_shapes=(dynamic[0], dynamic[1:]) if dynamic[1:] else dynamic)
    values = {node.name: node.meta["val"] for node in ep.graph.nodes if node.op == "placeholder"}
    graph, _ = aot_export_module(ep.module(), [values[n] for n in ep.graph_signature.user_inputs], trace_joint=False)
    kernels = torch.ops.higher_order.triton_kernel_wrapper_functional
    found = [node.kwargs for node in graph.graph.nodes if node.target is kernels]
    others = {n.target for n in graph.graph.nodes if n.op == "call_function" and n.target is not kernels}
    made = {torch.ops.aten.new_empty.default, torch.ops.aten.empty.memory_format}
    views = {torch.ops.aten.view.default, torch.ops.aten.transpose.int, torch.ops.aten.sym_size.int}
    views |= {torch.ops.aten.sym_stride.int, torch.ops.aten.slice.Tensor}
    products = {torch.ops.aten.mm.default, torch.ops.aten.permute.default}
    sums = {torch.ops.aten.select.int, torch.ops.aten.add.Tensor, torch.ops.aten._to_copy.default}  # of splits
    sums.add(torch.ops.aten._assert_tensor_metadata.default)
    copy = torch.ops.aten.constant_pad_nd.default  # a clone would be dropped where it differs in its place alone
    plain = {t for t in others if isinstance(t, torch._ops.OpOverload)}
    if n_copies:  # of what is not dense
        views |= {torch.ops.aten.clone.default, torch.ops.aten._unsafe_view.default}
    assert plain - {copy} <= made | views | products | sums
    assert sum(node.target is copy for node in graph.graph.nodes) == n_copies
    return found


def int4_constants(n=4096, k=640, group=32):
    words = pack_fragments(torch.zeros(n, k // 2, dtype=torch.uint8), k, group)
    scales = pack_scales(torch.ones(n, k // group, dtype=torch.bfloat16), k, group)
    return {"words": words, "scales": scales, "offsets": scales}


def test_int4():
    constants = int4_constants()
    x = torch.zeros(5, 640, dtype=torch.bfloat16)
    (product,) = launches(Call(eyas.fragment_int4_linear, 32, 4096, 8, **constants), (x,), ({0: ROWS},))
    assert product["tensors_to_clone"] == ["out_ptr"]
    assert product["grid"][0] == (32, 10, 1) and product["kwargs"]["ROWS"] == 8
    (numbers,) = launches(Call(eyas.fragment_int4_matmul, 32, 4096, **constants), (x,), ({0: ROWS},))
    assert numbers["tensors_to_clone"] == ["out_ptr"] and numbers["grid"][0] == (64, 5, 1)


def test_int4_of_a_large_weight():
    """Its assembly goes into a program as it is, and nothing that it reads is copied."""
    x = torch.zeros(5, 1792, dtype=torch.bfloat16)
    module = Call(eyas.fragment_int4_linear, 32, 16384, 8, **int4_constants(16384, 1792))
    (product,) = launches(module, (x,), ({0: ROWS},))
    assert product["tensors_to_clone"] == ["out_ptr"] and product["grid"][0] == (16, 7, 1)
    fixed = kernel_side_table.get_constant_args(product["constant_args_idx"]) | product["kwargs"]
    assert fixed["ROWS"] == 8 and fixed["ASSEMBLY"] == mma_linear.assembly(8, 32, "bf16", "bf16", 2)


def test_int8():
    constants = {"words": pack_int8_fragments(torch.zeros(4096, 640, dtype=torch.int8)), "scales": torch.ones(4096)}
    x = torch.zeros(5, 640, dtype=torch.bfloat16)
    (product,) = launches(Call(eyas.fragment_int8_linear, 4096, **constants), (x,), ({0: ROWS},))
    assert product["tensors_to_clone"] == ["out_ptr"]
    (numbers,) = launches(Call(eyas.fragment_int8_matmul, 4096, **constants), (x,), ({0: ROWS},))
    assert numbers["tensors_to_clone"] == ["out_ptr"] and numbers["grid"][0] == (64, 3, 1)
    gather = Call(eyas.fragment_int8_embedding, 640, torch.bfloat16, **constants)
    (rows,) = launches(gather, (torch.arange(5),), ({0: ROWS},))
    assert rows["tensors_to_clone"] == ["out_ptr"] and not isinstance(rows["grid"][0][0], int)


def test_bf16():
    constants = {"words": pack_bf16_fragments(torch.zeros(4096, 640, dtype=torch.bfloat16))}
    x = torch.zeros(5, 640, dtype=torch.bfloat16)
    (product,) = launches(Call(eyas.fragment_bf16_linear, 4096, 8, **constants), (x,), ({0: ROWS},))
    assert product["tensors_to_clone"] == ["out_ptr"] and product["kwargs"]["ROWS"] == 8
    (numbers,) = launches(Call(eyas.fragment_bf16_matmul, 4096, **constants), (x,), ({0: ROWS},))
    assert numbers["tensors_to_clone"] == ["out_ptr"] and numbers["grid"][0] == (64, 3, 1)
    gather = Call(eyas.fragment_bf16_embedding, 640, **constants)
    (rows,) = launches(gather, (torch.arange(5),), ({0: ROWS},))
    assert rows["tensors_to_clone"] == ["out_ptr"] and not isinstance(rows["grid"][0][0], int)


@pytest.mark.parametrize("rows_first", [True, False])
@pytest.mark.parametrize(("width", "window"), [(256, 0), (256, 512), (512, 0), (512, 512)])
def test_attention(width, window, rows_first):
    q = torch.zeros(1, 5, 4, width, dtype=torch.bfloat16).transpose(1, 2)
    q = q if rows_first else q.contiguous()
    k, v = torch.zeros(2, 1, 1, 1024, width, dtype=torch.bfloat16).unbind()
    module = Call(eyas.splitk_sdpa, 0.1, window, 16)
    splits, merge = launches(module, (q, k, v, torch.arange(5)), ({2: ROWS}, {}, {}, {0: ROWS}))
    assert splits["tensors_to_clone"] == ["sums_ptr", "state_ptr"] and merge["tensors_to_clone"] == ["out_ptr"]
    by_wgmma = "WINDOW" not in splits["kwargs"]
    assert by_wgmma == (width == 512 and not window)
    assert splits["kwargs"].get("WINDOW", 0) == window == merge["kwargs"]["WINDOW"]
    assert not isinstance(splits["grid"][0][0], int) and not isinstance(merge["grid"][0][0], int)


@pytest.mark.parametrize(("gap", "offset", "n_copies"), [(0, 0, 0), (8, 8, 0), (3, 0, 1), (8, 4, 1)])
def test_a_query_of_which_16_bytes_cannot_be_copied_is_moved(gap, offset, n_copies):
    """By the width that copies so; ``offset`` is where it lies in the input, ``gap`` what lies between its rows."""

    class Narrowed(Call):
        def forward(self, x, *others):
            q = x[:, :, offset : offset + 4 * 512].unflatten(2, (4, 512)).transpose(1, 2)
            return super().forward(q, *others)

    x = torch.zeros(1, 5, 8 + 4 * 512 + gap, dtype=torch.bfloat16)
    k, v = torch.zeros(2, 1, 1, 1024, 512, dtype=torch.bfloat16).unbind()
    module = Narrowed(eyas.splitk_sdpa, 0.1, 0, 16)
    splits, _ = launches(module, (x, k, v, torch.arange(5)), ({1: ROWS}, {}, {}, {0: ROWS}), n_copies)
    q = splits["kwargs"]["q_ptr"].meta["val"]
    assert all(number % 8 == 0 for number in (q.storage_offset(), q.stride(1), q.stride(2)))
