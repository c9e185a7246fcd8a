"""How a state becomes a commit. `prepare` runs in the thread that saves and is all that training
waits for; `commit` runs in the checkpointer's own thread."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from tradewind._core import native
from tradewind.checkpoint import manifest as manifests
from tradewind.checkpoint.dtypes import NAME_OF
from tradewind.checkpoint.errors import CheckpointError
from tradewind.checkpoint.local_directory import LocalDirectory
from tradewind.checkpoint.manifest import Manifest, Piece, ShardFile, TensorEntry
from tradewind.checkpoint.names import CommitName, shard_name
from tradewind.checkpoint.parts import PartialTensor
from tradewind.checkpoint.plan import Part, ShardPlan, plan_shard, share_out
from tradewind.checkpoint.ranks import Ranks
from tradewind.checkpoint.safetensors_header import compose, sharding_info
from tradewind.checkpoint.save import Save
from tradewind.checkpoint.staging import Staging
from tradewind.checkpoint.tree import Flat, flatten

Ranges = Sequence[tuple[int, int]]


@dataclass
class Prepared:
    """A state that nothing changes any more until it is written. Holds its tensors."""

    save: Save
    flat: Flat
    tensors: list[torch.Tensor]  # what parts refer to by index
    dtypes: list[str]
    shapes: dict[str, tuple[int, ...]]
    plan: ShardPlan
    closing: native.GateClosing | None
    facts: dict[str, Any]
    parent: str | None


class Saver:
    """Saves of one rank into one directory, one at a time."""

    def __init__(
        self,
        directory: LocalDirectory,
        ranks: Ranks,
        env: native.Env,
        *,
        block_bytes: int,
        num_threads: int,
        deadline: timedelta,
    ) -> None:
        self._directory = directory
        self._ranks = ranks
        self._env = env
        self._block_bytes = block_bytes
        self._writer = native.ShardWriter(num_threads)
        self._staging = Staging()
        self._deadline_s = deadline.total_seconds()
        self._num_saves = 0

    # --- in the thread that saves ---------------------------------------------------------------

    def prepare(
        self, state: Any, save: Save, in_place: Ranges, facts: dict[str, Any], parent: str | None
    ) -> Prepared:
        """Take hold of `state`: memory within `in_place` is gated, the rest copied."""
        flat = flatten(state, self._ranks.rank)
        tensors: list[torch.Tensor] = []
        names: list[str] = []
        shapes: dict[str, tuple[int, ...]] = {}

        def add(name: str, tensor: torch.Tensor, start: int, num_elements: int) -> Part:
            tensors.append(tensor)
            names.append(name)
            index = len(tensors) - 1
            return Part(name, index, tensor.element_size(), num_elements, start, tensor.numel())

        alike: list[Part] = []
        own: list[Part] = []
        for name, value in flat.tensors.items():
            shapes[name] = tuple(value.shape)
            if isinstance(value, PartialTensor):
                total = value.numel()
                own += [add(name, part, start, total) for start, part in value.parts]
            else:
                alike.append(add(name, value, 0, value.numel()))
        for name, value in flat.own_tensors.items():
            shapes[name] = tuple(value.shape)
            own.append(add(name, value, 0, value.numel()))
        mine = share_out(alike, self._ranks.size)[self._ranks.rank] + own
        addressed = [(part, _address(tensors[part.index], part)) for part in mine]
        plan = plan_shard(addressed, in_place)
        closing = None
        if plan.regions:
            closing = native.close_gate([(r.address, r.size_bytes) for r in plan.regions])
            save._closing = closing
        try:
            sources = [_elements(tensors[part.index], part) for part, _ in plan.copies]
            places = [place for _, place in plan.copies]
            save._copies = self._staging.copy(sources, places, plan.copies_bytes)
            copied = {part.index for part, _ in plan.copies}
            save.watch([(names[p.index], tensors[p.index]) for p in mine if p.index not in copied])
        except BaseException:
            if closing is not None:
                closing.open()
            raise
        save.in_place_bytes, save.copied_bytes = plan.in_place_bytes, plan.copied_bytes
        dtypes = [NAME_OF[tensor.dtype] for tensor in tensors]
        return Prepared(save, flat, tensors, dtypes, shapes, plan, closing, facts, parent)

    # --- in the checkpointer's thread -----------------------------------------------------------

    def commit(self, prepared: Prepared) -> CommitName:
        """Write, vote, publish. Raises what prevented it; nothing is published then."""
        number, ranks = self._num_saves, self._ranks
        self._num_saves += 1
        try:
            prepared.save._copies.synchronize()
            begun = ranks.together(f"{number}/begin", lambda: self._begin(prepared.save.step))[0]
            name = CommitName(**begun)
            try:
                written = ranks.together(
                    f"{number}/written", lambda: self._write_shard(name, prepared)
                )
                ranks.together(
                    f"{number}/published", lambda: self._publish(name, prepared, written)
                )
            except BaseException:
                if ranks.is_first:
                    self._directory.abandon(name)
                raise
        finally:
            if prepared.closing is not None:
                prepared.closing.open()
        return name

    def _begin(self, step: int) -> dict[str, Any] | None:
        if not self._ranks.is_first:
            return None
        name = self._directory.begin(step)
        return {"attempt": name.attempt, "step": name.step, "id": name.id}

    def _write_shard(self, name: CommitName, prepared: Prepared) -> dict[str, Any]:
        """This rank's shard, and what the manifest says of it."""
        rank, size = self._ranks.rank, self._ranks.size
        file = shard_name(rank, size)
        header, offsets = self._header(prepared)
        plan = prepared.plan
        regions = [(len(header) + r.offset_bytes, r.address, r.size_bytes) for r in plan.regions]
        if plan.copies_bytes:
            offset = len(header) + plan.copies_offset_bytes
            regions.append((offset, self._staging.address, plan.copies_bytes))
        total = len(header) + plan.data_bytes
        if self._env.status(self._directory.path_of(name)) is None:
            raise CheckpointError(
                f"rank {rank} does not see {self._directory.path_of(name)!r}, which rank 0 made; "
                "give all ranks one shared directory, or an object store"
            )
        recycles = self._directory.take_spare(name, file, total)
        write = self._writer.start(
            self._env,
            self._directory.path_of(name, file),
            header,
            regions,
            self._block_bytes,
            recycles,
            prepared.closing,
        )
        prepared.save.cancel_by(write.cancel)
        if not write.wait(self._deadline_s):
            write.cancel()
            raise CheckpointError(
                f"{self._directory.path_of(name, file)}: {total} bytes were not written within "
                f"{self._deadline_s:g} s; is the disk stuck, or the deadline too short?"
            )
        prepared.save.check_untouched()
        result = write.result()
        return {
            "file": {
                "name": file,
                "size_bytes": result.size_bytes,
                "crc32c": result.crc32c,
                "block_bytes": self._block_bytes,
                "block_crc32c": result.block_crc32c.hex(),
            },
            "pieces": offsets,
            "tensors": {
                name: [NAME_OF[value.dtype], list(value.shape)]
                for name, value in (
                    *prepared.flat.tensors.items(),
                    *prepared.flat.own_tensors.items(),
                )
            },
            "own_tree": prepared.flat.own_tree,
        }

    def _header(self, prepared: Prepared) -> tuple[bytes, list[list[Any]]]:
        """The shard's header, and for each part [name, key, offset in the file, start, count]."""
        entries: list[tuple[str, str, tuple[int, ...], int, int]] = []
        starts: dict[str, list[int]] = {}
        keys: dict[tuple[str, int], str] = {}
        for placed in prepared.plan.placed:
            part = placed.part
            if placed.same_as is not None:
                continue
            key = part.name if part.name not in starts else f"{part.name}@{part.start}"
            keys[part.name, part.start] = key
            shape = prepared.shapes[part.name] if part.is_whole else (part.count,)
            starts[key] = [0] * len(shape) if part.is_whole else [part.start]
            begin = placed.offset_bytes
            dtype = prepared.dtypes[part.index]
            entries.append((key, dtype, shape, begin, begin + part.size_bytes))
        for number, (begin, size) in enumerate(prepared.plan.pads):
            key = f"__pad__{number}"
            starts[key] = [0]
            entries.append((key, "U8", (size,), begin, begin + size))
        entries.sort(key=lambda entry: (entry[3], entry[4]))
        header = compose(entries, {"format": "pt", **sharding_info(starts)})
        pieces: list[list[Any]] = []
        for placed in prepared.plan.placed:
            part = placed.part
            first = placed.same_as or part
            offset = len(header) + placed.offset_bytes
            pieces.append(
                [part.name, keys[first.name, first.start], offset, part.start, part.count]
            )
        return header, pieces

    def _publish(
        self, name: CommitName, prepared: Prepared, written: Sequence[dict[str, Any]]
    ) -> None:
        if not self._ranks.is_first:
            return
        entries: dict[str, TensorEntry] = {}
        for rank, told in enumerate(written):
            for tensor, (dtype, shape) in told["tensors"].items():
                entry = TensorEntry(dtype, tuple(shape), [])
                known = entries.setdefault(tensor, entry)
                if (known.dtype, known.shape) != (entry.dtype, entry.shape):
                    raise CheckpointError(
                        f"tensor {tensor!r}: rank {rank} has {dtype} {tuple(shape)}, another rank "
                        f"{known.dtype} {known.shape}; what differs between ranks belongs in "
                        "PerRank(...)"
                    )
            for tensor, key, offset, start, count in told["pieces"]:
                entries[tensor].pieces.append(Piece(rank, key, offset, start, count))
        for entry in entries.values():
            entry.pieces.sort(key=lambda piece: (piece.start, piece.count))
        files = [_shard_file(told["file"]) for told in written]
        manifest = Manifest(
            step=name.step,
            attempt=name.attempt,
            id=name.id,
            parent=prepared.parent,
            created_s=time.time(),
            world_size=self._ranks.size,
            files=files,
            tensors=entries,
            tree=prepared.flat.tree,
            per_rank=_own_trees(written),
            facts={**_versions(), **prepared.facts},
        )
        self._directory.publish(name, manifests.encode(manifest))

    def close(self) -> None:
        """Let go of threads and memory. No save may be under way."""
        self._writer.close()
        self._staging.release()


def _shard_file(told: dict[str, Any]) -> ShardFile:
    return ShardFile(**{**told, "block_crc32c": bytes.fromhex(told["block_crc32c"])})


def _own_trees(written: Sequence[dict[str, Any]]) -> list[Any]:
    trees = [told["own_tree"] for told in written]
    return trees if any(tree is not None for tree in trees) else []


def _address(tensor: torch.Tensor, part: Part) -> int | None:
    """Of the part's first element, where its elements lie in row-major order on the CPU."""
    plain = tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_neg()
    if not plain or tensor.is_conj():
        return None
    return tensor.data_ptr() + _within(tensor, part) * part.element_bytes


def _elements(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    if part.count == tensor.numel():
        return tensor
    start = _within(tensor, part)
    return tensor.detach().reshape(-1)[start : start + part.count]


def _within(tensor: torch.Tensor, part: Part) -> int:
    """Where in `tensor` the part begins: a partial tensor's memory begins with the part itself."""
    return part.start if tensor.numel() == part.num_elements else 0


@cache
def _versions() -> dict[str, Any]:
    try:
        own = version("tradewind")
    except PackageNotFoundError:
        own = "0.0.0+source"
    return {
        "versions": {
            "tradewind": own,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
    }
