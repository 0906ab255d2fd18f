"""Runs methods on random inputs, before and after passes, and finds the pass that changed what they compute."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_leaves

from eyas.passes.base import Pass
from eyas.passes.pipeline import PassRecord, run_pipeline
from eyas.passes.program import Program, constant_specs, constant_value, given, mutated_buffers
from eyas.passes.ranges import bounds

aten, eyas = torch.ops.aten, torch.ops.eyas

# operator -> (argument that holds ids, argument whose dimension bounds them, that dimension); None: see ``bound_of``
LOOKUPS = {
    aten.embedding.default: (1, 0, 0),
    eyas.int8_embedding.default: (0, 1, 0),
    aten.index_copy_.default: (2, 0, None),
    aten.index_copy.default: (2, 0, None),
    aten.index_select.default: (2, 0, None),
}
EXACT = 0.0
TOLERANCE = 1e-4  # of the largest value: float32 sums in another order


@dataclass(frozen=True)
class Sample:
    """What a method gave for one call: its results, and its written buffers by name."""

    results: list[Tensor]
    state: dict[str, Tensor]


@dataclass(frozen=True)
class Difference:
    """How far two samples of a method are apart: ``error`` is the largest difference over the largest value, and
    ``where`` the result or buffer that has it.
    """

    method: str
    rows: int
    where: str
    error: float


def copy_program(program: Program) -> Program:
    """A program whose graphs and signatures may be rewritten apart from ``program``'s, over the same constants."""
    methods = {name: copy_method(ep) for name, ep in program.methods.items()}
    sharing = dict(program.sharing) if program.sharing is not None else None
    return Program(
        methods, dict(program.constant_methods), program.device, sharing, dict(program.derived), dict(program.blocks)
    )


def copy_method(ep: ExportedProgram) -> ExportedProgram:
    graph = torch.fx.Graph()
    nodes: dict[Node, Node] = {}
    output = graph.graph_copy(ep.graph, nodes, return_output_node=True)
    if output is not None:
        value, old = output
        graph.output(value).meta = dict(old.meta)
    for old, new in nodes.items():
        new.meta, new.name = dict(old.meta), old.name
    graph._codegen = copy.copy(ep.graph._codegen)
    made = copy.copy(ep)
    made._graph_module = GraphModule(ep.graph_module, graph)
    made._graph_module.meta = dict(ep.graph_module.meta)
    made._graph_signature = copy.deepcopy(ep.graph_signature)
    made._module_call_graph = copy.deepcopy(ep.module_call_graph)
    made._range_constraints = dict(ep.range_constraints)
    made._state_dict, made._constants = dict(ep.state_dict), dict(ep.constants)
    return made


def random_inputs(ep: ExportedProgram, rows: int, seed: int = 0) -> list[Tensor]:
    """Inputs for a call of ``rows`` rows: ids in the range of the tables that they index, positions in a row from a
    random one on, numbers from a normal distribution.
    """
    generator = torch.Generator().manual_seed(seed)
    nodes = {node.name: node for node in ep.graph.nodes if node.op == "placeholder"}
    inputs = []
    for name in ep.graph_signature.user_inputs:
        value = nodes[name].meta["val"]
        shape = [size if isinstance(size, int) else rows for size in value.shape]
        if value.dtype.is_floating_point:
            inputs.append(torch.randn(shape, generator=generator).to(value.dtype))
            continue
        limit = bound_of(nodes[name])
        if value.ndim == 1 and value.dtype == torch.int64:
            start = int(torch.randint(0, max(1, limit - rows + 1), (), generator=generator))
            inputs.append(torch.arange(start, start + rows) if rows <= limit else torch.arange(rows) % limit)
        else:
            high = 2 if value.dtype == torch.bool else limit
            inputs.append(torch.randint(0, high, shape, generator=generator).to(value.dtype))
    return inputs


def bound_of(node: Node) -> int:
    """One past the largest id that every table indexed with an input has; 2 where it indexes none."""
    found, seen, todo = [], {node}, [node]
    while todo:
        at = todo.pop()
        for user in at.users:
            rule = LOOKUPS.get(user.target)
            if rule is not None and given(user, rule[0]) is at:
                table = given(user, rule[1]).meta["val"]
                found.append(table.shape[given(user, 1) if rule[2] is None else rule[2]])
            elif rule is None and user not in seen and keeps_values(user, at):
                todo.append(user)
                seen.add(user)
    sizes = [size for size in found if isinstance(size, int)]
    return min(sizes, default=2)


def keeps_values(user: Node, source: Node) -> bool:
    """Whether a node hands integers on as they are."""
    kept = (aten.view, aten.reshape, aten.squeeze, aten.unsqueeze, aten.clone, aten.to, aten.slice, aten.alias)
    return getattr(user.target, "overloadpacket", None) in kept and user.args[0] is source


def row_counts(ep: ExportedProgram) -> list[int]:
    """Numbers of rows to try: the least, one in between and the largest of the method's range (at most 32)."""
    symbols = [size for node in ep.graph.nodes if node.op == "placeholder"
               for size in getattr(node.meta.get("val"), "shape", ()) if not isinstance(size, int)]  # fmt: skip
    if not symbols:
        return [1]
    low, high = bounds(ep, symbols[:1])
    high = min(high or 32, 32)
    return sorted({max(low, 1), (max(low, 1) + high) // 2, high})


class FreeingInterpreter(Interpreter):
    """Runs a graph node by node, each value freed after its last use."""

    def __init__(self, ep: ExportedProgram):
        super().__init__(ep.graph_module, garbage_collect_values=True)


@torch.no_grad()
def sample(ep: ExportedProgram, inputs: Sequence[Tensor]) -> Sample:
    """One call on copies of the written buffers, whose first values are those of the program with noise in place of
    zeros, so that what is read before it is written shows.
    """
    written = mutated_buffers(ep)
    values, state = {}, {}
    for name, spec in constant_specs(ep):
        value = constant_value(ep, spec)
        if name in written:
            value = state[name] = noise(name, value)
        values[spec.arg.name] = value
    values |= dict(zip(ep.graph_signature.user_inputs, (value.clone() for value in inputs)))
    arguments = [values[node.name] for node in ep.graph.nodes if node.op == "placeholder"]
    found = [leaf for leaf in tree_leaves(FreeingInterpreter(ep).run(*arguments)) if isinstance(leaf, Tensor)]
    signature = ep.graph_signature
    new = {**signature.buffers_to_mutate, **signature.parameters_to_mutate}
    for spec, value in zip(signature.output_specs, found):
        if spec.arg.name in new:
            state[new[spec.arg.name]] = value
    results = [value for spec, value in zip(signature.output_specs, found) if spec.arg.name not in new]
    return Sample([value.clone() for value in results], state)


def noise(name: str, value: Tensor) -> Tensor:
    """A buffer's first value, the same for one name in every program."""
    if not value.dtype.is_floating_point:
        return value.clone()
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(value.shape, generator=generator).to(value.dtype)


def differences(
    before: Program, after: Program, seed: int = 0, rows: Mapping[str, Iterable[int]] | None = None
) -> list[Difference]:
    """For each method and number of rows, the result or buffer that lies furthest apart."""
    found = []
    for method, ep in before.methods.items():
        for m in (rows or {}).get(method) or row_counts(ep):
            inputs = random_inputs(ep, m, seed)
            found.append(compare(method, m, sample(ep, inputs), sample(after.methods[method], inputs)))
    return found


def compare(method: str, rows: int, a: Sample, b: Sample) -> Difference:
    pairs = [(f"result {i}", x, y) for i, (x, y) in enumerate(zip(a.results, b.results, strict=True))]
    pairs += [(f"buffer {name}", a.state[name], b.state[name]) for name in sorted(a.state)]
    where, error = max(((name, distance(x, y)) for name, x, y in pairs), key=lambda pair: pair[1], default=("", 0.0))
    return Difference(method, rows, where if error else "nowhere", error)


def distance(a: Tensor, b: Tensor) -> float:
    """Largest difference over the largest value; for integers the share of elements that differ; infinite for other
    shapes, dtypes, infinities or where one is not a number.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if torch.equal(a, b) or not a.numel():
        return 0.0
    if not a.dtype.is_floating_point:
        return float((a != b).double().mean())
    a, b = a.double(), b.double()
    finite = a.isfinite()
    if not torch.equal(finite, b.isfinite()) or not torch.allclose(a[~finite], b[~finite], equal_nan=True):
        return float("inf")
    return float((a[finite] - b[finite]).abs().max() / a[finite].abs().max().clamp_min(1e-30))


@dataclass
class NumericCheck:
    """An observer that compares the program before and after each pass; ``found``: (pass, its differences)."""

    seed: int = 0
    found: list[tuple[str, list[Difference]]] = field(default_factory=list)
    previous: Program | None = None

    def before_pass(self, number: int, one: Pass, program: Program) -> None:
        self.previous = copy_program(program)

    def after_pass(self, number: int, one: Pass, program: Program, record: PassRecord) -> None:
        apart = differences(self.previous, program, self.seed) if record.rewrites else []
        self.found.append((str(one), apart))
        self.previous = None
        allowed = EXACT if one.exact else TOLERANCE
        worst = max(apart, key=lambda d: d.error, default=None)
        if worst is not None and worst.error > allowed:
            raise NumericError(
                f"pass {one} (number {number}) changes what method {worst.method!r} computes: with {worst.rows} rows "
                f"{worst.where} is off by {worst.error:.2g} of its largest value; allowed: {allowed:g}"
            )


class NumericError(RuntimeError):
    """A pass that changed the numbers by more than it may."""


@dataclass(frozen=True)
class Culprit:
    """The first pass after which a program computes something else than at the start."""

    number: int
    spec: str
    difference: Difference


def bisect(program: Program, passes: Sequence[Pass], tolerance: float = TOLERANCE, seed: int = 0) -> Culprit | None:
    """Finds the first pass after which the program differs from itself before all passes by more than ``tolerance`` of
    the largest value; None where it never does. Runs the passes once, on a copy, and the methods about log2 times.
    """
    stages = Stages()
    run_pipeline(copy_program(program), passes, verified=False, observers=[stages])

    def off(count: int) -> Difference | None:
        worst = max(differences(program, stages.programs[count - 1], seed), key=lambda d: d.error)
        return worst if worst.error > tolerance else None

    low, high = 0, len(stages.programs)  # good after ``low`` passes; bad, if at all, after ``high``
    worst = off(high) if high else None
    if worst is None:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        found = off(middle)
        low, high, worst = (middle, high, worst) if found is None else (low, middle, found)
    return Culprit(high, str(passes[high - 1]), worst)


@dataclass
class Stages:
    """An observer that keeps the program after each pass."""

    programs: list[Program] = field(default_factory=list)

    def before_pass(self, number: int, one: Pass, program: Program) -> None: ...

    def after_pass(self, number: int, one: Pass, program: Program, record: PassRecord) -> None:
        self.programs.append(copy_program(program))
