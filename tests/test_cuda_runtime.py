"""What the runtime for cuda does beside the card: chains of calls, the pool of buffers, what a card must be."""

import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from eyas.lowering.data_file import write_data_file
from eyas.runtime import cuda_native
from eyas.runtime.container_files import ContainerError
from eyas.runtime.cuda_native import CudaChain, CudaTensor, check_card
from eyas.runtime.cuda_program import CudaBufferPool, CudaMethod, Upload
from eyas.runtime.native import Call
from eyas.runtime.payload import Constant, storage_key

H200 = {"name": "NVIDIA H200", "capability": "9.0", "shared_memory": 232448}


def test_a_tensor_is_seen_as_the_host_sees_one():
    value = torch.arange(12).view(1, 3, 4)
    tensor = CudaTensor(value)
    assert (tensor.dtype, tensor.shape) == ("int64", (1, 3, 4)) and np.array_equal(tensor.array, value.numpy())
    assert np.array_equal(tensor.part(np.s_[:, -1:]).array, value[:, -1:].numpy())
    bits = CudaTensor(torch.tensor([1.0, -2.0]).bfloat16())
    assert bits.dtype == "bfloat16" and bits.array.tolist() == [0x3F80, 0xC000] and bits.array.dtype == np.uint16


class Adds:
    """A block of two results: the sum of its inputs, and the first of them. ``made``: all that it gave."""

    n_outputs = 2

    def __init__(self):
        self.made, self.alive = [], []

    def run(self, inputs):
        self.alive.append([ref() is not None for ref in self.made])
        results = [sum(inputs), inputs[0].clone()]
        self.made += map(weakref.ref, results)
        return results


def test_a_chain_hands_on_values_by_number():
    block = Adds()
    # values: 0 and 1 are inputs, 2 and 3 of the first call, 4 and 5 of the second
    chain = CudaChain(2, [Call(block, (0, 1)), Call(block, (2, 1, 2))], [4, 3, 4])
    one, two = torch.tensor(1), torch.tensor(10)
    assert [int(v) for v in chain.run([one, two])] == [32, 1, 32] and chain.n_calls == 2


def test_a_chain_lets_go_of_what_nobody_reads():
    """So that its memory serves the calls after: what has been read for the last time, and what never is."""
    block = Adds()
    calls = [Call(block, (0,)), Call(block, (1,)), Call(block, (3,)), Call(block, (5, 3))]
    (result,) = CudaChain(1, calls, [7]).run([torch.tensor(1)])
    assert int(result) == 2
    assert block.alive == [[], [True, False], [False, False, True, False], [False, False, True, False, True, False]]


def constant(name, value):
    return Constant(
        name, storage_key("cuda", name), value.nbytes, {torch.float32: 6, torch.bfloat16: 15}[value.dtype], 1, 0,
        tuple(value.shape), tuple(value.stride()),
    )  # fmt: skip


@pytest.fixture
def pool(tmp_path, monkeypatch):
    """(pool, its values by name), on the host: there the card's memory is the host's, and has been used before."""

    def used(size, dtype, device=None, pin_memory=False):
        return torch.full((size,), 77, dtype=dtype)

    monkeypatch.setattr(torch, "empty", used)
    monkeypatch.setattr(torch.cuda, "Event", Crossing)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(Upload, "PIECE", 32)
    values = {"weight": torch.randn(3, 5), "cache": torch.zeros(4, 2).bfloat16(), "state": torch.randn(7)}
    keys = [(storage_key("cuda", name), value.nbytes) for name, value in values.items()]
    write_data_file(tmp_path / "model.ptd", keys, iter(values.values()))
    return CudaBufferPool(tmp_path / "model.ptd", [storage_key("cuda", name) for name in ("cache", "state")]), values


class Crossing:
    """An event that must not be waited for before it was recorded anew."""

    def __init__(self):
        self.calls = []

    def record(self):
        self.calls.append("record")

    def synchronize(self):
        assert self.calls[-1:] != ["synchronize"], "a piece is filled twice before it has crossed"
        self.calls.append("synchronize")


def test_each_entry_is_on_the_card_once(pool):
    buffers, values = pool
    weight, cache, state = (buffers.tensor(constant(name, value)) for name, value in values.items())
    for tensor, value in zip((weight, cache, state), values.values(), strict=True):
        assert torch.equal(tensor, value) and tensor.dtype == value.dtype
        assert tensor.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr(), "one allocation"
    assert buffers.tensor(constant("weight", values["weight"])) is weight
    assert buffers.nbytes == 60 + 16 + 28 and buffers.mutable_nbytes == 16 + 28
    assert set(buffers.arrays()) == set(values)
    for tensor in (weight, cache, state):
        tensor += 1
    buffers.reset()
    assert not cache.any() and torch.equal(state, values["state"])
    assert torch.equal(weight, values["weight"] + 1), "what no method writes stays"


def test_entries_of_another_size_or_name(pool, tmp_path):
    buffers, values = pool
    wrong = constant("weight", torch.zeros(3, 4))
    with pytest.raises(ContainerError, match="weight has 60 bytes, its method expects 48"):
        buffers.tensor(wrong)
    with pytest.raises(ContainerError, match="has no entry 'cuda_fqn_weight:cuda:other'"):
        buffers.tensor(constant("other", values["weight"]))
    buffers.tensor(constant("weight", values["weight"]))
    with pytest.raises(ContainerError, match="two calls mean different tensors by 'weight'"):
        buffers.tensor(constant("weight", values["weight"].view(5, 3)))
    with pytest.raises(ContainerError, match=r"lacks the buffers .*:draft that the manifest lists"):
        CudaBufferPool(tmp_path / "model.ptd", [storage_key("cuda", "draft")])


def test_a_card_that_is_full(pool, tmp_path, monkeypatch):
    def full(*size, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", full)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10, 1000))
    with pytest.raises(ContainerError, match=r"no room .* weights and caches: they take 8220 bytes, 10 of 1000 are"):
        CudaBufferPool(tmp_path / "model.ptd", [])


def test_what_a_card_must_be(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check_card(H200) == "no CUDA device was found here"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for major, shared, reason in (
        (9, 232448, None),
        (8, 232448, "it was lowered for capability 9.0 (NVIDIA H200), this card has 8.0"),
        (9, 101376, "it may need 232448 bytes of shared memory, this card gives a program 101376"),
    ):
        card = SimpleNamespace(major=major, minor=0, shared_memory_per_block_optin=shared)
        monkeypatch.setattr(cuda_native.torch.cuda, "get_device_properties", lambda device, card=card: card)
        assert check_card(H200) == reason


def test_inputs_of_the_host_and_of_the_card(monkeypatch):
    """A method takes both; parts of a tensor that native code could not read at once are copied."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    method = CudaMethod.__new__(CudaMethod)
    assert method._own(np.array([[1, 2]])).value.tolist() == [[1, 2]]
    bits = method._own(np.array([[0x3F80]], np.uint16)).value
    assert bits.dtype == torch.bfloat16 and bits.item() == 1.0
    whole = torch.arange(8)
    part = method._own(CudaTensor(whole[1:3])).value
    assert part.data_ptr() % 16 == 0 and part.tolist() == [1, 2]
    assert method._own(CudaTensor(whole)).value.data_ptr() == whole.data_ptr()
