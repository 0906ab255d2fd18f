"""What operators make of the types of their arguments, looked at once for each: a decoder's layers are all alike."""

from collections.abc import Callable, Mapping

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from eyas.kernels.block import expression


class Types:
    """Results of operators on fake tensors, of one method: its dynamic sizes are those of one tracer."""

    def __init__(self):
        self._known: dict[tuple, object] = {}

    def result(self, target: Callable, args: tuple, kwargs: Mapping[str, object], mode: object) -> object:
        """What ``target`` makes of ``args``, nodes or values, under a fake ``mode``. Raises what the operator does."""
        args, kwargs = torch.fx.node.map_arg((args, dict(kwargs)), lambda node: node.meta["val"])
        key = (target, key_of(args), key_of(tuple(sorted(kwargs.items()))))
        if key not in self._known:
            with mode, torch.no_grad(), enable_python_dispatcher():  # some composites ask more than symbols can tell
                self._known[key] = target(*args, **kwargs)
        return self._known[key]

    def emitter(self, graph: torch.fx.Graph, like: Node) -> Callable[..., Node]:
        """What adds calls of operators, with positional arguments, to a graph at its insertion point: for nodes that
        take the place of ``like``, with all that it carries but its type.
        """
        mode = like.meta["val"].fake_mode

        def emit(target: Callable, *args: object) -> Node:
            made = graph.call_function(target, args)
            made.meta = {name: value for name, value in like.meta.items() if name != "val"}
            made.meta["val"] = self.result(target, args, {}, mode)
            return made

        return emit


def key_of(value: object) -> object:
    """Something hashable that is equal for values of equal type: of a tensor its dtype, device, sizes and strides."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device, tuple(map(expression, value.shape)), tuple(map(expression, value.stride()))
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *map(key_of, value))
    return type(value), str(value)


def fake_mode(node: Node) -> object | None:
    """The mode of the fake tensors that a node takes or makes; None where there are none."""
    values = [source.meta.get("val") for source in node.all_input_nodes] + [node.meta.get("val")]
    leaves = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch._subclasses.FakeTensor))
    return next((leaf.fake_mode for leaf in leaves), None)
