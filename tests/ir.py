"""What the tests of passes share: small exported programs, their text under FileCheck, and their results.

A test module of a pass lists what the pass must do in ``POSITIVE``: functions that take the pass, fail unless it did
its work, and so fail when ``test_pipeline`` hands them one that does nothing.
"""

import copy
import functools
import io
from collections.abc import Callable, Iterable, Sequence

import torch
from filecheck.finput import FInput
from filecheck.matcher import Matcher
from filecheck.options import Options
from filecheck.parser import Parser, pattern_for_opts
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from eyas.passes.base import Pass
from eyas.passes.pipeline import PassRecord, run_pipeline
from eyas.passes.printer import Symbols, print_program, value_type
from eyas.passes.program import Program, mutated_buffers

ROWS, MAX_ROWS = 5, 16  # an argument's dimensions of ROWS are dynamic, over 1..MAX_ROWS


class Positive(list):
    """The positive cases of a pass; a decorator that adds one."""

    def __call__(self, case: Callable[[Pass], None]) -> Callable[[Pass], None]:
        self.append(case)
        return case


def export(module: nn.Module, *args: Tensor) -> ExportedProgram:
    """``module`` on ``args``; all their dimensions of ``ROWS`` are one dynamic dimension."""
    rows = Dim("rows", min=1, max=MAX_ROWS)
    shapes = tuple({i: rows for i, size in enumerate(arg.shape) if size == ROWS} for arg in args)
    return torch.export.export(module, args, dynamic_shapes=(shapes,) if is_variadic(module) else shapes, strict=False)


def is_variadic(module: nn.Module) -> bool:
    return isinstance(module, Function)


class Function(nn.Module):
    """A function as a module, with ``tensors`` as its buffers: ``function(module, *args)``."""

    def __init__(self, function: Callable, **tensors: Tensor | nn.Module):
        super().__init__()
        self.function = function
        for name, value in tensors.items():
            if isinstance(value, nn.Module):
                self.add_module(name, value)
            else:
                self.register_buffer(name, value)

    def forward(self, *args):
        return self.function(self, *args)


def program_of(function: Callable, *args: Tensor, **tensors: Tensor | nn.Module) -> Program:
    """A program of one method, ``function(module, *args)`` with ``tensors`` as the module's buffers."""
    return Program.of(export(Function(function, **tensors), *args))


def node_of(program: Program, operator: str, method: str = "forward") -> Node:
    """The first node of an operator, such as ``aten.chunk.default``."""
    return next(node for node in program.methods[method].graph.nodes if str(node.target) == operator)


def apply(one: Pass, program: Program) -> PassRecord:
    """Runs a pass as the pipeline does. It must count 0 exactly where it changed nothing, leave types that are true,
    and find nothing to do in a second run.
    """
    before = print_program(program)
    (record,) = run_pipeline(program, [one])
    after = print_program(program)
    assert (record.rewrites == 0) == (before == after), f"{record.rewrites} rewrites\n{before}\n{after}"
    for ep in program.methods.values():
        check_types(ep)
    (again,) = run_pipeline(program, [one])
    assert again.rewrites == 0 and print_program(program) == after
    assert [refusal.reason for refusal in again.refusals] == [refusal.reason for refusal in record.refusals]
    return record


def unchanged(one: Pass, program: Program, reason: str | None = None) -> None:
    """The pass leaves the program as it is, and gives ``reason`` for exactly one node, or for none."""
    before = print_program(program)
    record = apply(one, program)
    assert record.rewrites == 0 and print_program(program) == before
    if reason is None:
        assert not record.refusals
    else:
        (refusal,) = record.refusals
        assert reason in refusal.reason, refusal.reason


def check_types(ep: ExportedProgram) -> None:
    """Every operator, run again on the recorded types of its arguments, gives the type that is recorded for it; ours
    the strides as well (a pass need not tell the nodes after it).
    """
    for node in ep.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        recorded = node.meta["val"]
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with fake_mode(ep), torch.no_grad():
            made = node.target(*args, **kwargs)
        ours = node.target.namespace == "eyas"
        got, want = type_text(made, strides=ours), type_text(recorded, strides=ours)
        assert got == want, f"{node.format_node()} makes {got}, recorded is {want}"


def fake_mode(ep: ExportedProgram) -> torch._subclasses.FakeTensorMode:
    return next(n.meta["val"].fake_mode for n in ep.graph.nodes if isinstance(n.meta.get("val"), Tensor))


def type_text(value: object, strides: bool) -> str:
    shown = [str(leaf.stride()) for leaf in tree_leaves(value) if isinstance(leaf, Tensor)] if strides else []
    return " ".join([value_type(value, Symbols()), *shown])


def results(program: Program, *inputs: Sequence[Tensor], method: str = "forward") -> list[Tensor]:
    """Outputs for each of ``inputs``, and the buffers that the method writes as each call leaves them. The program's
    own state stays as it is.
    """
    found = []
    for args in inputs:
        ep = copy.deepcopy(program.methods[method])
        module = ep.module()
        found += [leaf.detach() for leaf in tree_leaves(module(*args)) if isinstance(leaf, Tensor)]
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        found += [state[name].detach() for name in sorted(mutated_buffers(ep))]
    return found


def assert_equal(got: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), (a, b)


def assert_derived(program: Program, before: dict[str, Tensor], suffix: str) -> None:
    """Every packed constant can be made again, to the bit, from the constants of the program as it was."""
    packed = {name: value for name, value in program.constants().items() if name not in before}
    assert packed and packed.keys() == program.derived.keys()
    for name, value in packed.items():
        assert name.endswith(suffix) and not value.requires_grad
        assert_equal([program.derived[name].compute(before)], [value])


def assert_close(got: Iterable[Tensor], expected: Iterable[Tensor], tolerance: float) -> None:
    """``tolerance``: of numbers up to 1; larger ones may differ by as much of themselves."""
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def check(subject: Program | str, checks: str) -> None:
    """FileCheck: the printed program must pass the ``CHECK`` lines."""
    text = subject if isinstance(subject, str) else print_program(subject)
    options = Options(match_filename="checks")
    parser = Parser(options, io.StringIO(checks), *pattern_for_opts(options))
    matcher = Matcher(options, FInput("program", text), parser)
    matcher.stderr = io.StringIO()
    assert matcher.run() == 0, f"{matcher.stderr.getvalue()}\n{text}"


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def transformer() -> Program:
    """A fresh copy of a one-layer Phi-3 of transformers: a chunk, rotary tables, tied tables, and a four-dimensional
    mask. Inputs: ids ``[1, rows]``, positions ``[rows]``, mask bool ``[rows, rows]``.
    """
    return Program.of(copy.deepcopy(_transformer()))


@functools.cache
def _transformer() -> ExportedProgram:
    from transformers import Phi3Config, Phi3ForCausalLM

    config = Phi3Config(
        vocab_size=48, hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    model = Phi3ForCausalLM(config).eval()

    def forward(module, ids, positions, mask):
        return module.model(ids, position_ids=positions[None], attention_mask=mask[None, None]).logits

    return export(Function(forward, model=model), *transformer_inputs(ROWS))


def transformer_inputs(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.randint(0, 48, (1, rows), generator=torch.Generator().manual_seed(rows))
    return ids, torch.arange(rows), torch.ones(rows, rows, dtype=torch.bool).tril()
