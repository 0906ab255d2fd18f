"""A method whose graph calls blocks, as the chain of native calls that it is lowered to."""

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.fx import Node

from eyas.lowering.aoti_cpu import CompiledBlock, payload_constant
from eyas.passes.program import Program, constant_nodes
from eyas.runtime.payload import Constant

BLOCK = torch.ops.eyas.block.default


@dataclass(frozen=True)
class Step:
    """One call of a block. ``inputs``: numbers of the values it takes; ``constants``: of its native code."""

    block: str
    inputs: tuple[int, ...]
    n_results: int
    constants: tuple[Constant, ...]


@dataclass(frozen=True)
class Chain:
    """Values are numbered: a method's inputs, then what each step gives, in order.

    ``values``: a fake tensor for each of them; ``outputs``: the numbers of the method's results.
    """

    n_inputs: int
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    values: tuple[torch.Tensor, ...]

    def calls(self) -> Iterator[tuple[Step, list[torch.Tensor], list[torch.Tensor]]]:
        """Each step, with the values that it takes and gives."""
        at = self.n_inputs
        for step in self.steps:
            yield step, [self.values[v] for v in step.inputs], list(self.values[at : at + step.n_results])
            at += step.n_results


def chain_of(method: str, program: Program, compiled: Mapping[str, CompiledBlock], device: str = "cpu") -> Chain:
    """The chain of a method on ``device``. Raises ``RuntimeError`` for a node that is no call of a block."""
    ep = program.methods[method]
    names = {node: name for name, node in constant_nodes(ep).items()}
    inputs = [n for n in ep.graph.nodes if n.op == "placeholder" and n not in names]
    number = {node: i for i, node in enumerate(inputs)}
    values = [node.meta["val"] for node in inputs]
    steps, first = [], {}
    for node in ep.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.target is operator.getitem and node.args[0] in first:
            number[node] = first[node.args[0]] + node.args[1]
        elif node.target is BLOCK:
            key, constants, written, given = node.args
            local = local_names(len(constants), len(written))
            needed = set(compiled[key].constants)
            steps.append(
                Step(
                    key,
                    tuple(number[value] for value in given),
                    len(node.meta["val"]),
                    tuple(
                        payload_constant(device, own, names[c], c.meta["val"])
                        for own, c in zip(local, [*constants, *written])
                        if own in needed
                    ),
                )
            )
            first[node] = len(values)
            values += node.meta["val"]
        else:
            raise RuntimeError(f"%{node.name} of method {method!r} is no call of a block; run the pass outline_blocks")
    output = next(node for node in ep.graph.nodes if node.op == "output")
    return Chain(len(inputs), tuple(steps), tuple(number[n] for n in results(output)), tuple(values))


def local_names(n_constants: int, n_written: int) -> list[str]:
    """What a block calls its constants, in the order of its inputs."""
    return [f"constant_{i}" for i in range(n_constants)] + [f"written_{i}" for i in range(n_written)]


def results(output: Node) -> list[Node]:
    """The results of a method, in order, one that stands twice twice."""
    found: list[Node] = []
    torch.fx.node.map_arg(output.args[0], found.append)
    return found
