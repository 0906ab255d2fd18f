"""``eyas::block``: a call of a part of a method that is the same at several places but for its constants.

Lowering compiles the part once and calls it wherever a node names it; here, the node runs the part's graph.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter

GRAPHS: dict[str, GraphModule] = {}  # key -> graph; its inputs are the constants read, those written, the inputs

LIBRARY = torch.library.Library("eyas", "FRAGMENT")
LIBRARY.define("block(str key, Tensor[] constants, Tensor(a!)[] written, Tensor[] inputs) -> Tensor[]")


def block(key: str, constants: Sequence[Tensor], written: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """What the block ``key`` makes of its inputs; it updates the ``written`` constants in place.

    Shapes and dtypes are the block's own. Raises ``RuntimeError`` for a key that ``GRAPHS`` does not hold.
    """
    if key not in GRAPHS:
        raise RuntimeError(f"block {key!r} is not known in this process; run the pass outline_blocks here")
    return list(Interpreter(GRAPHS[key], garbage_collect_values=False).run(*constants, *written, *inputs))


LIBRARY.impl("block", block, "CompositeExplicitAutograd")
torch.library.register_fake("eyas::block", block, lib=LIBRARY)
