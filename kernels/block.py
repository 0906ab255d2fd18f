"""``eyas::block``: a call of a part of a method that is the same at several places but for its constants.

Lowering compiles the part once and calls it wherever a node names it; here, the node runs the part's graph.
"""

from collections.abc import Sequence

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter

GRAPHS: dict[str, GraphModule] = {}  # key -> graph; its inputs are the constants read, those written, the inputs

LIBRARY = torch.library.Library("eyas", "FRAGMENT")
LIBRARY.define("block(str key, Tensor[] constants, Tensor(a!)[] written, Tensor[] inputs) -> Tensor[]")


class Shapes:
    """Shapes of a graph's results in terms of the dynamic sizes of its inputs, from the fake tensors of both."""

    def __init__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]):
        self.inputs = [([expression(d) for d in value.shape], value.dtype) for value in inputs]
        self.outputs = [([expression(d) for d in value.shape], value.dtype) for value in outputs]
        places = [(shape[d], i, d) for i, (shape, _) in enumerate(self.inputs) for d in range(len(shape))]
        self.places = {size: (i, d) for size, i, d in reversed(places) if isinstance(size, sympy.Symbol)}

    def check(self, inputs: Sequence[Tensor]) -> None:
        """Raises ``ValueError`` for inputs of other types than the graph's."""
        for value, (shape, dtype) in zip(inputs, self.inputs, strict=True):
            places = [self.places.get(want) for want in shape]
            sizes = [want if at is None else inputs[at[0]].shape[at[1]] for want, at in zip(shape, places)]
            known = [(a, b) for a, b in zip(value.shape, sizes) if not isinstance(b, sympy.Expr)]
            if value.dtype != dtype or value.ndim != len(shape) or any(a != b for a, b in known):
                raise ValueError(f"expected a {dtype} of shape {shape}, got {value.dtype} {list(value.shape)}")

    def like(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """New tensors of the results' shapes."""
        sizes = {symbol: inputs[i].shape[d] for symbol, (i, d) in self.places.items()}

        def size(want: int | sympy.Expr) -> int | torch.SymInt:
            if isinstance(want, int) or want in sizes:
                return sizes.get(want, want)
            symbols = sorted(want.free_symbols, key=str)
            return sympy.lambdify(symbols, want)(*(sizes[symbol] for symbol in symbols))

        return [torch.empty([size(d) for d in shape], dtype=dtype) for shape, dtype in self.outputs]


def expression(size: int | torch.SymInt) -> int | sympy.Expr:
    """A size as a number, or as what it is in terms of dynamic sizes."""
    return size if isinstance(size, int) else size.node.expr


def block(key: str, constants: Sequence[Tensor], written: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """What the block ``key`` makes of its inputs; it updates the ``written`` constants in place.

    Shapes and dtypes are the block's own. Raises ``RuntimeError`` for a key that ``GRAPHS`` does not hold.
    """
    return list(Interpreter(graph_of(key), garbage_collect_values=False).run(*constants, *written, *inputs))


def fake_block(key: str, constants: Sequence[Tensor], written: Sequence[Tensor], inputs: Sequence[Tensor]):
    graph = graph_of(key).graph
    output = next(node for node in graph.nodes if node.op == "output")
    placeholders = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
    shapes = Shapes(placeholders, [node.meta["val"] for node in output.args[0]])
    shapes.check([*constants, *written, *inputs])
    return shapes.like([*constants, *written, *inputs])


def graph_of(key: str) -> GraphModule:
    if key not in GRAPHS:
        raise RuntimeError(f"block {key!r} is not known in this process; run the pass outline_blocks here")
    return GRAPHS[key]


LIBRARY.impl("block", block, "CompositeExplicitAutograd")
torch.library.register_fake("eyas::block", fake_block, lib=LIBRARY)
