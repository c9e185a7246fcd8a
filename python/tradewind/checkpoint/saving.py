"""How a state becomes a commit. `prepare` runs in the thread that saves and is all that training
waits for; `commit` runs in the checkpointer's own thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from tradewind._core import native
from tradewind.checkpoint import manifest as manifests
from tradewind.checkpoint.assembling import assemble, compose_shard, file_facts, rank_facts
from tradewind.checkpoint.dtypes import NAME_OF
from tradewind.checkpoint.errors import CheckpointError
from tradewind.checkpoint.local_directory import LocalDirectory
from tradewind.checkpoint.manifest import ShardFile
from tradewind.checkpoint.names import CommitName, shard_name
from tradewind.checkpoint.parts import PartialTensor
from tradewind.checkpoint.plan import Part, ShardPlan, in_rounds, plan_shard, share_out
from tradewind.checkpoint.ranks import Ranks
from tradewind.checkpoint.save import Save
from tradewind.checkpoint.staging import DeviceCopies, Staging
from tradewind.checkpoint.tree import Flat, flatten

_CANCEL_S = 10.0  # for calls under way to return

Ranges = Sequence[tuple[int, int]]


@dataclass
class Prepared:
    """A state that nothing changes any more until it is written. Holds its tensors.

    `plans`: one for each file of this rank. The copies of the first are made; where there are
    more, host memory is short, and `save()` waits until those of the last are. `published`: the
    files and the manifest of the commit, on rank 0 once it is made.
    """

    save: Save
    flat: Flat
    tensors: list[torch.Tensor]  # what parts refer to by index
    dtypes: list[str]
    shapes: dict[str, tuple[int, ...]]
    plans: list[ShardPlan]
    closing: native.GateClosing | None
    facts: dict[str, Any]
    parent: str | None
    published: tuple[Sequence[ShardFile], bytes] | None = None


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
        host_memory: int | None = None,
    ) -> None:
        self._directory = directory
        self._ranks = ranks
        self._env = env
        self._block_bytes = block_bytes
        self._writer = native.ShardWriter(num_threads)
        self._staging = Staging()
        self._host_memory = host_memory
        self._deadline_s = deadline.total_seconds()
        self._num_saves = 0
        self._stuck: list[Prepared] = []

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
        plans = self._plans(mine, tensors, in_place)
        regions = plans[0].regions
        closing = None
        if regions:
            closing = native.close_gate([(r.address, r.size_bytes) for r in regions])
        dtypes = [NAME_OF[tensor.dtype] for tensor in tensors]
        prepared = Prepared(save, flat, tensors, dtypes, shapes, plans, closing, facts, parent)
        try:
            save.holds(closing, self._stage(prepared, plans[0]))
            copied = {part.index for plan in plans for part, _ in plan.copies}
            save.watch([(names[p.index], tensors[p.index]) for p in mine if p.index not in copied])
        except BaseException:
            if closing is not None:
                closing.open()
            raise
        save.in_place_bytes = plans[0].in_place_bytes
        save.copied_bytes = sum(plan.copied_bytes for plan in plans)
        return prepared

    def _plans(
        self, mine: Sequence[Part], tensors: Sequence[torch.Tensor], in_place: Ranges
    ) -> list[ShardPlan]:
        """One file as a rule; more, where what is copied exceeds the memory for copies."""
        addressed = [(part, _address(tensors[part.index], part)) for part in mine]
        plan = plan_shard(addressed, in_place)
        limit = self._host_memory
        if limit is None or plan.copies_bytes <= limit:
            return [plan]
        copied = [part for part, _ in plan.copies]
        left = {(part.name, part.start) for part in copied}
        staying = [each for each in addressed if (each[0].name, each[0].start) not in left]
        rounds: list[list[tuple[Part, int | None]]] = [
            [(part, None) for part in some] for some in in_rounds(copied, limit)
        ]
        first = plan_shard([*staying, *rounds[0]], in_place)
        return [first, *(plan_shard(some, ()) for some in rounds[1:])]

    def _stage(self, prepared: Prepared, plan: ShardPlan) -> DeviceCopies:
        sources = [_elements(prepared.tensors[part.index], part) for part, _ in plan.copies]
        return self._staging.copy(sources, [place for _, place in plan.copies], plan.copies_bytes)

    # --- in the checkpointer's thread -----------------------------------------------------------

    def commit(self, prepared: Prepared) -> CommitName:
        """Write, vote, publish. Raises what prevented it; nothing is published then."""
        number, ranks = self._num_saves, self._ranks
        self._num_saves += 1
        try:
            begun = ranks.together(f"{number}/begin", lambda: self._begin(prepared.save.step))[0]
            name = CommitName(**begun)
            try:
                written = ranks.together(f"{number}/written", lambda: self._write(name, prepared))
                ranks.together(
                    f"{number}/published", lambda: self._publish(name, prepared, written)
                )
            except BaseException:
                if ranks.is_first:
                    self._directory.abandon(name)
                    self._directory.check_owner()
                raise
        finally:
            if prepared.closing is not None:
                prepared.closing.open()
            prepared.save.staged()
        return name

    def _begin(self, step: int) -> dict[str, Any] | None:
        if not self._ranks.is_first:
            return None
        name = self._directory.begin(step)
        return {"attempt": name.attempt, "step": name.step, "id": name.id}

    def _write(self, name: CommitName, prepared: Prepared) -> dict[str, Any]:
        """This rank's files, and what the manifest says of them."""
        folder = self._directory.path_of(name)
        if self._env.status(folder) is None:
            raise CheckpointError(
                f"rank {self._ranks.rank} does not see {folder!r}, which rank 0 made; give all "
                "ranks one shared directory, or an object store"
            )
        files: list[dict[str, Any]] = []
        pieces: list[tuple[Any, ...]] = []
        for number, plan in enumerate(prepared.plans):
            copies = prepared.save.copies if number == 0 else self._stage(prepared, plan)
            copies.synchronize()
            if number == len(prepared.plans) - 1:
                prepared.save.staged()
            file = shard_name(self._ranks.rank, self._ranks.size, number)
            composed = compose_shard(plan, prepared.shapes, prepared.dtypes)
            result = self._write_file(name, file, composed.header, plan, prepared)
            files.append(file_facts(file, self._block_bytes, result))
            pieces += [(number, *piece) for piece in composed.pieces]
        prepared.save.check_untouched()
        return rank_facts(prepared.flat, files, pieces)

    def _write_file(
        self,
        name: CommitName,
        file: str,
        header: bytes,
        plan: ShardPlan,
        prepared: Prepared,
    ) -> native.ShardResult:
        closing = prepared.closing if plan is prepared.plans[0] else None
        save = prepared.save
        regions = [(len(header) + r.offset_bytes, r.address, r.size_bytes) for r in plan.regions]
        if plan.copies_bytes:
            offset = len(header) + plan.copies_offset_bytes
            regions.append((offset, self._staging.address, plan.copies_bytes))
        total = len(header) + plan.data_bytes
        path = self._directory.path_of(name, file)
        recycles = self._directory.take_spare(name, file, total)
        write = self._writer.start(
            self._env, path, header, regions, self._block_bytes, recycles, closing
        )
        save.cancel_by(write.cancel)
        if not write.wait(self._deadline_s):
            write.cancel()
            if not write.wait(_CANCEL_S):
                self._stuck.append(prepared)  # whose memory a call to the disk still reads
            raise CheckpointError(
                f"{path}: {total} bytes were not written within {self._deadline_s:g} s; is the "
                "disk stuck, or the deadline too short?"
            )
        save.check_failed()
        return write.result()

    def _publish(
        self, name: CommitName, prepared: Prepared, written: Sequence[dict[str, Any]]
    ) -> None:
        if self._ranks.is_first:
            manifest = assemble(
                name, prepared.flat, written, parent=prepared.parent, facts=prepared.facts
            )
            encoded = manifests.encode(manifest)
            self._directory.publish(name, encoded)
            prepared.published = manifest.files, encoded

    def close(self) -> None:
        """Let go of threads and memory. No save may be under way."""
        self._writer.close()
        self._staging.release()


def arenas_of(state: Any) -> list[tuple[int, int]]:
    """The memory of optimizers in a state that only their own steps write."""
    if isinstance(state, Mapping):
        return [each for value in state.values() for each in arenas_of(value)]
    if isinstance(state, (list, tuple)):
        return [each for value in state for each in arenas_of(value)]
    ranges = getattr(state, "arena_ranges", None)
    return list(ranges()) if callable(ranges) else []


def _address(tensor: torch.Tensor, part: Part) -> int | None:
    """Of the part's first element, where its elements lie in row-major order on the CPU."""
    plain = tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_neg()
    if not plain or tensor.is_conj():
        return None
    return tensor.data_ptr() + part.skip * part.element_bytes


def _elements(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    if part.count == tensor.numel():
        return tensor
    return tensor.detach().reshape(-1)[part.skip : part.skip + part.count]
