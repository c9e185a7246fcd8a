"""Tensors of a commit, brought through a buffer of bounded size: large ones in several spans, small
ones many at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from tradewind.checkpoint.dtypes import DTYPE_OF
from tradewind.checkpoint.restoring import CommitReader
from tradewind.checkpoint.targets import Fill

BUFFER_BYTES = 64 << 20
_ALIGNMENT_BYTES = 16


class Span(NamedTuple):
    """Elements [start, start + num_elements) of a tensor, in row-major order."""

    name: str
    start: int
    num_elements: int


def grouped(
    reader: CommitReader, names: Iterable[str], buffer_bytes: int = BUFFER_BYTES
) -> Iterator[list[Span]]:
    """All elements of the tensors `names`, in order, in groups that a buffer of that size holds.
    Tensors without elements are in none."""
    group: list[Span] = []
    used = 0
    for name in names:
        entry = reader.manifest.tensors[name]
        element_bytes = DTYPE_OF[entry.dtype].itemsize
        start, end = 0, math.prod(entry.shape)
        while start < end:
            fits = (buffer_bytes - used) // element_bytes
            if fits < min(end - start, buffer_bytes // element_bytes) and group:
                yield group
                group, used = [], 0
                continue
            count = min(end - start, fits)
            group.append(Span(name, start, count))
            used += _aligned(count * element_bytes)
            start += count
    if group:
        yield group


class Window:
    """Reads groups of spans into one piece of memory, which the next group overwrites. It grows
    where a group takes more: that of another commit may have wider elements."""

    def __init__(self, reader: CommitReader, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._reader = reader
        self._buffer = torch.empty(buffer_bytes, dtype=torch.uint8)

    def read(self, group: Sequence[Span]) -> list[torch.Tensor]:
        """A flat tensor for each span, of the dtype that is stored.

        Raises DamagedCheckpointError that names file and block, OSError."""
        dtypes = [DTYPE_OF[self._reader.manifest.tensors[span.name].dtype] for span in group]
        sizes = [
            span.num_elements * dtype.itemsize for span, dtype in zip(group, dtypes, strict=True)
        ]
        begins = [0, *accumulate(map(_aligned, sizes))]
        if begins[-1] > self._buffer.numel():
            self._buffer = torch.empty(begins[-1], dtype=torch.uint8)
        views = [
            self._buffer[begin : begin + size].view(dtype)
            for begin, size, dtype in zip(begins, sizes, dtypes, strict=False)
        ]
        fills = [Fill(span.name, span.start, view) for span, view in zip(group, views, strict=True)]
        self._reader.read(fills)
        return views


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
