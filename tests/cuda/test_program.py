"""A tiny program on the card: lowered there, loaded, and decoded with and without CUDA graphs."""

import gc
import json
import shutil
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest
import torch
from card import GPU

if not GPU:
    pytest.skip("needs a GPU", allow_module_level=True)

from eyas.lowering.lower import Request, lower
from eyas.runtime.artifact import DATA, MANIFEST, PROGRAM, Artifact, ArtifactError
from eyas.runtime.container_files import ContainerError, DataFile, ProgramFile
from eyas.runtime.cuda_decoding import SEED, Rounds
from eyas.runtime.cuda_program import Workspace
from eyas.runtime.decoding import positions, tokens
from eyas.runtime.payload import decode
from eyas.runtime.session import open_decoder
from eyas.tools.oracle import OracleDecoder

LENGTH, WINDOW = 64, 8
PROMPT_LENGTHS = (1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW - 1, 2 * WINDOW, 2 * WINDOW + 1, 40, LENGTH - 1)


class Quiet:
    """Progress that nobody looks at."""

    def stage(self, name):
        return nullcontext()

    def note(self, text):
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("program")
    request = Request("tiny_gemma3_wide", root / "tiny", draft="untrained", device="cuda", max_seq_len=LENGTH)
    return lower(request, Quiet()).path


@pytest.fixture(scope="module")
def program(folder):
    return Artifact.open(folder).load()


def prompt(length):
    return [2, *((7919 * i + 13) % 128 for i in range(length - 1))]


def text(decoder, ids, **options):
    return [t for block in decoder.generate(ids, LENGTH, (), **options) for t in block]


@pytest.mark.parametrize("length", PROMPT_LENGTHS)
def test_texts_are_the_same_with_graphs_without_and_for_every_chain(program, length):
    ids = prompt(length)
    want = text(open_decoder(program, "greedy", graphs=False), ids)
    assert len(want) == LENGTH - length and text(open_decoder(program, "greedy"), ids) == want
    decoder, eager, oracle = open_decoder(program, "speculative"), open_decoder(program, "speculative", False), None
    for chain in range(1, decoder.max_chain + 1):
        assert text(decoder, ids, chain=chain) == want, chain
    for chain in (1, 4):
        assert text(eager, ids, chain=chain) == want
        oracle = OracleDecoder(program)
        oracle.text = [*ids, *want]
        assert text(oracle, ids, chain=chain) == want
        assert length > 32 or oracle.statistics.tau > 1.2, "a window that rejected drafts have wrapped"


@pytest.mark.parametrize("length", (WINDOW, 2 * WINDOW + 3, 40))
def test_a_prompt_seeds_the_draft_alike_with_graphs_and_without(program, length):
    """Calls for a prompt have their tensors where the graphs have theirs; what is handed on must outlive the next."""
    seeds = []
    for graphs in (True, False):
        decoder = open_decoder(program, "speculative", graphs)
        for _ in range(2):  # the second finds the graphs captured
            next(decoder.generate(prompt(length), LENGTH, (), 3))
            seeds.append((int(decoder.rounds.first), decoder.rounds.g.clone()))
    assert all(first == seeds[0][0] and torch.equal(g, seeds[0][1]) for first, g in seeds)


class Recorder:
    """A draft that leaves what it is given in a cache, by torch's operators."""

    max_rows = 3
    spec = SimpleNamespace(inputs=(None, SimpleNamespace(sizes=(1, 1, 16))))

    def __init__(self, device):
        self.cache = torch.zeros(LENGTH, 17, device=device)

    def run(self, tokens, feature, positions):
        given = torch.cat([tokens[0][:, None].float(), feature[0].float()], 1)
        self.cache.index_copy_(0, positions, given)
        return 2 * tokens, 2 * feature


@pytest.mark.parametrize("graphs", (True, False))
def test_a_chunk_of_several_calls_seeds_the_draft(graphs, device="cuda"):
    """Six calls and one of fewer rows. What the first reads is there for the last: nothing of the chunk lies where a
    graph has its tensors.
    """
    draft, chunk = Recorder(device), SimpleNamespace(max_rows=20)
    stream = torch.cuda.Stream() if device == "cuda" else None
    program = SimpleNamespace(
        constants={"get_max_chain_len": 2}, stream=stream, workspace=Workspace(stream) if graphs else None,
        method=lambda name: {"prefill": chunk, "target_verify": None, "draft_decode": draft}[name],
    )  # fmt: skip
    rounds = Rounds(program, graphs, device)
    if device == "cuda":
        torch.cuda.synchronize()
    with rounds.workspace():
        rounds._calls(SEED)
    if graphs:
        rounds._graph(SEED)
    feature = torch.arange(320).reshape(1, 20, 16).bfloat16() / 7
    following = [(7 * i + 3) % 97 for i in range(20)]
    for start in (30, 5):
        with rounds.workspace():
            draft.cache.zero_()
            rounds.seed(following, feature.to(device), start)
        rounds.wait()
    expected = torch.zeros(LENGTH, 17)
    expected[5:25] = torch.cat([torch.tensor(following)[:, None].float(), feature[0].float()], 1)
    assert torch.equal(draft.cache.cpu(), expected)
    assert int(rounds.first) == 2 * following[-1] and torch.equal(rounds.g.cpu(), 2 * feature[:, -1:])


def test_all_decoders_of_a_program_share_one_pool_of_memory(folder):
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    program = Artifact.open(folder).load()
    decoders = [open_decoder(program, kind) for kind in ("greedy", "speculative", "speculative")]
    text(decoders[0], prompt(40))
    taken = torch.cuda.memory_reserved()
    for decoder in decoders[1:]:
        for chain in range(1, decoder.max_chain + 1):
            text(decoder, prompt(40), chain=chain)
    assert before < torch.cuda.memory_reserved() <= taken + (2 << 20)
    assert program.workspace.pool in {segment["segment_pool_id"] for segment in torch.cuda.memory_snapshot()}
    del program, decoders, decoder
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before


def test_rows_have_the_bits_that_they_have_alone(program):
    verify, ids = program.method("target_verify"), prompt(30)

    def rows(step):
        program.reset()
        parts = [
            verify(tokens(ids[i : i + step]), positions(i, len(ids[i : i + step]))) for i in range(0, len(ids), step)
        ]
        return [torch.cat([part[k].value for part in parts], 1) for k in range(2)]

    alone = rows(1)
    for step in range(2, 9):
        assert all(torch.equal(a, b) for a, b in zip(alone, rows(step))), step


def test_executorchs_own_readers_take_it(folder):
    """Verified by its runtime; delegate calls alone, no operator besides; the data and the payloads' keys agree."""
    from executorch.exir._serialize._cord import Cord
    from executorch.exir._serialize._program import deserialize_pte_binary
    from executorch.extension.flat_tensor.serialize.serialize import FlatTensorConfig, FlatTensorSerializer
    from executorch.runtime import Runtime, Verification

    loaded = Runtime.get().load_program(folder / PROGRAM, verification=Verification.InternalConsistency)
    read = deserialize_pte_binary((folder / PROGRAM).read_bytes())
    data = FlatTensorSerializer(FlatTensorConfig()).deserialize(Cord((folder / DATA).read_bytes())).named_data
    ours = ProgramFile(folder / PROGRAM)
    plans = {plan.name: plan for plan in read.program.execution_plan}
    assert loaded.method_names == set(plans) and {"prefill", "target_verify", "draft_decode"} <= set(plans)
    width = loaded.metadata("draft_decode").input_tensor_meta(1).sizes()[2]
    shapes = {"prefill": [(1, 1), (1, 8, width)]}
    used = set()
    for name, method in ours.methods.items():
        plan, meta = plans[name], loaded.metadata(name)
        calls = [type(step.instr_args).__name__ for chain in plan.chains for step in chain.instructions]
        assert (
            not plan.operators and set(calls) == {"DelegateCall"} and {d.id for d in plan.delegates} == {"CudaBackend"}
        )
        outputs = [tuple(meta.output_tensor_meta(i).sizes()) for i in range(meta.num_outputs())]
        assert outputs == shapes.get(name, [(1, 8), (1, 8, width)])
        for call in method.calls:
            code, constants = decode(call.payload)
            assert call.payload.startswith(b"ETCUDAFQN3") and code in read.named_data.pte_data
            used |= {constant.storage_key for constant in constants}
    assert used and used <= set(data) == set(DataFile(folder / DATA).entries)


def test_a_generation_that_another_one_has_ended(program):
    """One program has one state; the pool is reset under a round that was started ahead."""
    first = open_decoder(program, "speculative").generate(prompt(9), LENGTH, (), 3)
    next(first), next(first)
    want = text(open_decoder(program, "greedy", graphs=False), prompt(20))
    assert text(open_decoder(program, "speculative"), prompt(20), chain=3) == want
    with pytest.raises(RuntimeError, match="another generation has started on this program"):
        list(first)


def test_two_programs_have_states_of_their_own(folder, program):
    other = Artifact.open(folder).load()
    want = text(open_decoder(program, "speculative"), prompt(9), chain=3)
    first = open_decoder(program, "speculative").generate(prompt(9), LENGTH, (), 3)
    second = open_decoder(other, "speculative").generate(prompt(20), LENGTH, (), 3)
    got, turns = [], [first, second]
    while first in turns:
        for turn in list(turns):
            block = next(turn, None)
            if block is None:
                turns.remove(turn)
            elif turn is first:
                got += block
    assert got == want


def test_another_card_and_a_file_cut_short(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    manifest = json.loads((copy / MANIFEST).read_text())
    manifest["device"]["capability"] = "8.0"
    (copy / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match=r"is a program for cuda, and it was lowered for capability 8\.0"):
        Artifact.open(copy)
    shutil.copy(folder / MANIFEST, copy / MANIFEST)
    data = (copy / "model.ptd").read_bytes()
    (copy / "model.ptd").write_bytes(data[:-4096])
    with pytest.raises(ArtifactError, match=r"model\.ptd has"):
        Artifact.open(copy)


def test_a_card_without_room(folder):
    torch.cuda.empty_cache()
    before, taken = torch.cuda.memory_reserved(), []
    torch.cuda.set_per_process_memory_fraction(1e-9)
    try:
        for size in (2**power for power in range(24, 8, -1)):  # what the allocator holds already
            with suppress(torch.cuda.OutOfMemoryError):
                while True:
                    taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        with pytest.raises(ContainerError, match="the card has no room for"):
            Artifact.open(folder).load()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    taken.clear()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before
