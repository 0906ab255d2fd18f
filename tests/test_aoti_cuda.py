"""What can be said of a block for a card before it is compiled, without a card."""

import re
from importlib import import_module

import pytest
import torch
from ir import ROWS, Function, export, randn

from eyas.kernels import CPU_OPERATORS, CUDA_OPERATORS, TRITON_FILES, register_triton_operators
from eyas.kernels.fragment_int8_linear import pack_int8_fragments
from eyas.lowering.aoti_cuda import CUDA_OPTIONS, refuse_without_body
from eyas.lowering.compile_pool import compiler_for
from eyas.lowering.environment import gpu

eyas = torch.ops.eyas
register_triton_operators()


def test_every_operator_without_a_kernel_is_named():
    """At once, each with its source line; those with kernels and torch's own are not."""

    def forward(m, x):
        y = eyas.int8_linear(x, m.w, m.s).bfloat16()
        return eyas.fragment_int8_linear(y, m.words, m.s, 8) + eyas.materialize(y.float().cumsum(0))

    words = pack_int8_fragments(torch.zeros(8, 8, dtype=torch.int8))
    tensors = {"w": torch.zeros(8, 8, dtype=torch.int8), "s": torch.ones(8), "words": words}
    ep = export(Function(forward, **tensors), randn(ROWS, 8))
    with pytest.raises(RuntimeError) as error:
        refuse_without_body(ep)
    assert re.match(
        r"operators eyas\.int8_linear\.default \(.*test_aoti_cuda\.py:\d+.*\), eyas\.materialize\.default \(.*\) have "
        r"no kernel for cuda, so a program with them could not run; allowed: torch's own and eyas\.fragment_int4",
        str(error.value),
    )
    own = export(
        Function(lambda m, x: eyas.fragment_int8_linear(x, m.words, m.s, 8), **tensors), randn(ROWS, 8).bfloat16()
    )
    assert refuse_without_body(own) is None


def test_the_operators_of_cuda_are_those_with_triton_kernels():
    modules = [import_module(f"eyas.kernels.{name}") for name in TRITON_FILES]
    made = [v for module in modules for v in vars(module).values() if isinstance(v, torch.library.CustomOpDef)]
    names = {one._name.removeprefix("eyas::") for one in made}
    assert names == set(CUDA_OPERATORS) and not names & set(CPU_OPERATORS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_a_machine_without_a_card():
    with pytest.raises(ValueError, match="no CUDA device was found; a program is compiled and checked on the card"):
        gpu()


def test_the_compiler_knows_its_options():
    import torch._inductor.config as config

    assert set(CUDA_OPTIONS) <= set(config.get_config_copy())


def test_each_host_has_its_compiler():
    assert [compiler_for(host).__name__.rpartition(".")[2] for host in ("eyas", "torch", "cuda")] == [
        "aoti_cpu", "aoti_cpu", "aoti_cuda",
    ]  # fmt: skip
