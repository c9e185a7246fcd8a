"""Bytes of memory that a step moves and keeps: counted, not assumed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Counting(TorchDispatchMode):
    """Adds up what each operation reads (its tensors) and writes (its results and what it changes):
    the least an operation can move, were nothing of the one before still in cache."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        schema = func._schema
        name = schema.name.removeprefix("aten::")
        if torch.Tag.inplace_view in func.tags or func.is_view:
            return result
        inputs = [*zip(schema.arguments, args, strict=False)]
        inputs += [(a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs]
        for argument, value in inputs:
            num_bytes = sum(x.nbytes for x in tree_leaves(value) if isinstance(x, torch.Tensor))
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            # The fused kernels may write gradients by their schema, but do so only to unscale them.
            is_written = is_written and not (name.startswith("_fused") and argument.name == "grads")
            is_read = not (is_written and name in _OVERWRITING)
            self.num_bytes += num_bytes * (is_read + is_written)
        if not any(argument.alias_info for argument in schema.arguments):
            self.num_bytes += sum(x.nbytes for x in tree_leaves(result) if torch.is_tensor(x))
        return result


_OVERWRITING = ("copy_", "_foreach_copy_", "zero_", "_foreach_zero_", "fill_")


def bytes_moved(run: Callable[[], object]) -> int:
    """What torch's operations in `run` read and write."""
    with _Counting() as counting:
        run()
    return counting.num_bytes


def bytes_stored(parameters: Iterable[torch.Tensor], optimizer: torch.optim.Optimizer) -> int:
    """What parameters and state hold, step counters apart."""
    tensors = list(parameters)
    for parameter in list(tensors):
        entry = optimizer.state[parameter]
        tensors += [x for name, x in entry.items() if name != "step" and torch.is_tensor(x)]
    return sum(x.nbytes for x in tensors)
