"""How a commit becomes a state again: which bytes of which files go where, read in parallel and
verified block by block, straight into the memory they belong to where it lies as the file does."""

from __future__ import annotations

import contextlib
import dataclasses
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tradewind._core import native
from tradewind.checkpoint.dtypes import DTYPE_OF
from tradewind.checkpoint.errors import DamagedCheckpointError
from tradewind.checkpoint.manifest import Manifest
from tradewind.checkpoint.parts import PartialTensor
from tradewind.checkpoint.rebuilding import rebuild
from tradewind.checkpoint.targets import Fill, Stored


class CommitReader:
    """Reads one commit whose manifest was decoded. `folder`: its path on this machine; `in_memory`:
    paths by name of files that are somewhere else as well, where they are read first."""

    def __init__(
        self,
        env: native.Env,
        folder: str,
        manifest: Manifest,
        *,
        in_memory: Mapping[str, str] | None = None,
        num_threads: int = 16,
    ) -> None:
        self._env = env
        self._folder = folder
        self._in_memory = in_memory or {}
        self._num_threads = num_threads
        self.manifest = manifest

    def saved(self, rank: int) -> Any:
        """The state as it was saved, with Stored in place of tensors, as `rank` sees it."""
        manifest = self.manifest
        stored = {
            name: Stored(name, DTYPE_OF[entry.dtype], entry.shape)
            for name, entry in manifest.tensors.items()
        }
        own = manifest.per_rank[rank] if rank < len(manifest.per_rank) else None
        return rebuild(manifest.tree, stored, own, where=self._folder, array=_as_array)

    def read(self, fills: Sequence[Fill], *, verify_all: bool = False) -> None:
        """Fill every target, or raise DamagedCheckpointError or OSError with some filled."""
        ranges: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        converted: list[tuple[torch.Tensor, torch.Tensor]] = []
        for fill in fills:
            memory = self._memory(fill)
            if memory is not fill.target:
                converted.append((fill.target, memory))
            for file, offset, size, address in self._ranges(fill, memory):
                ranges[file].append((offset, size, address))
        files = range(len(self.manifest.files)) if verify_all else sorted(ranges)
        for file in files:
            self._read_file(file, ranges[file], verify_all=verify_all)
        with torch.no_grad():
            for target, memory in converted:
                target.copy_(memory)
        for fill in fills:
            _count_as_written(fill.target)

    def verify(self) -> None:
        """Read everything and check every block. Raises DamagedCheckpointError or OSError."""
        self.read([], verify_all=True)

    def damages(self) -> list[str]:
        """What is wrong with each of its files, one line a file; empty where all of it is whole."""
        found: list[str] = []
        for index in range(len(self.manifest.files)):
            try:
                self._read_file(index, [], verify_all=True)
            except (DamagedCheckpointError, OSError) as error:
                found.append(str(error))
        return found

    def _read_file(
        self, index: int, targets: list[tuple[int, int, int]], *, verify_all: bool
    ) -> None:
        file = self.manifest.files[index]

        def read(path: str) -> None:
            native.read_shard(
                self._env,
                path,
                file.size_bytes,
                file.block_bytes,
                file.block_crc32c,
                targets,
                self._num_threads,
                verify_all,
            )

        if file.name in self._in_memory:
            with contextlib.suppress(DamagedCheckpointError, OSError):
                read(self._in_memory[file.name])
                return
        read(f"{self._folder}/{file.name}")

    def _memory(self, fill: Fill) -> torch.Tensor:
        """Where the bytes of the fill go: its target, or memory of the stored dtype."""
        target = fill.target
        dtype = DTYPE_OF[self.manifest.tensors[fill.name].dtype]
        plain = target.device.type == "cpu" and target.is_contiguous() and target.dtype == dtype
        if plain and not target.is_conj() and not target.is_neg():
            return target
        return torch.empty(target.shape, dtype=dtype)

    def _ranges(self, fill: Fill, memory: torch.Tensor) -> list[tuple[int, int, int, int]]:
        """(file, offset, bytes, address) that together are the fill's elements."""
        size = memory.element_size()
        base = memory.data_ptr()
        pieces = self.manifest.tensors[fill.name].pieces
        begin, end = fill.start, fill.start + memory.numel()
        first = max(bisect_right(pieces, begin, key=lambda piece: piece.start) - 1, 0)
        found = []
        for piece in pieces[first:]:
            low, high = max(piece.start, begin), min(piece.start + piece.count, end)
            if piece.start >= end:
                break
            if low < high:
                offset = piece.offset_bytes + (low - piece.start) * size
                address = base + (low - begin) * size
                found.append((piece.file, offset, (high - low) * size, address))
        return found


def _as_array(stored: Stored) -> Stored:
    return dataclasses.replace(stored, is_array=True)


def give_fresh(wanted: Sequence[Stored]) -> tuple[list[Fill], Callable[[Stored], Any]]:
    """Fills of fresh CPU memory for these tensors, and what gives the value of each once it is
    read."""
    memory = {each.name: torch.empty(each.shape, dtype=each.dtype) for each in wanted}
    fills = [Fill(name, 0, tensor) for name, tensor in memory.items()]
    return fills, lambda stored: stored.value(memory[stored.name])


def fills_of(name: str, target: torch.Tensor | PartialTensor) -> list[Fill]:
    """Fills of memory that fits the stored tensor `name` as it is."""
    if isinstance(target, PartialTensor):
        return [Fill(name, start, part) for start, part in target.parts]
    return [Fill(name, 0, target)]


def _count_as_written(target: torch.Tensor) -> None:
    """As torch's in-place operations do, so that autograd and whoever compares versions see it."""
    if target.device.type == "cpu" and not target.is_inference():
        torch.autograd.graph.increment_version(target)
