"""Values that say how ranks hold them: parts of one logical tensor, and what each has alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tradewind.checkpoint.dtypes import dtype_name


class PartialTensor:
    """This rank's elements of one logical tensor that ranks hold together.

    `shape`, `dtype`: of the logical tensor. `parts`: (start, flat tensor) of contiguous runs of
    its elements in row-major order, `start` in elements; ascending, without overlap. Memory is
    shared, not copied. What no rank holds makes the save fail.

    Raises TypeError or ValueError where parts are no such runs.
    """

    __slots__ = ("dtype", "parts", "shape")

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, parts: Iterable[tuple[int, Tensor]]
    ) -> None:
        self.shape = tuple(int(size) for size in shape)
        self.dtype = dtype
        self.parts = [(int(start), part.detach()) for start, part in parts]
        dtype_name(dtype)
        if any(size < 0 for size in self.shape):
            raise ValueError(f"PartialTensor: shape: expected sizes from 0, got {self.shape}")
        end = 0
        for start, part in self.parts:
            if part.dim() != 1 or not part.is_contiguous() or part.dtype != dtype:
                raise TypeError(
                    f"PartialTensor: part at {start}: expected a flat contiguous tensor of "
                    f"{dtype}, got shape {list(part.shape)} of {part.dtype}"
                )
            if start < end or start + part.numel() > self.numel():
                raise ValueError(
                    f"PartialTensor: part at {start} of {part.numel()} elements: expected parts "
                    f"that ascend without overlap within {self.numel()} elements"
                )
            end = start + part.numel()

    def numel(self) -> int:
        """Elements of the logical tensor."""
        return math.prod(self.shape)

    def __repr__(self) -> str:
        runs = ", ".join(f"{start}+{part.numel()}" for start, part in self.parts)
        return f"PartialTensor(shape={list(self.shape)}, dtype={self.dtype}, parts=[{runs}])"


@dataclass
class PerRank:
    """A value of each rank's own in a state that is otherwise alike on all ranks.

    Read back, `value` is what the rank of the same number saved; where there was none, because
    the checkpoint is of fewer ranks, it is None and `is_known` False.
    """

    value: object
    is_known: bool = True
