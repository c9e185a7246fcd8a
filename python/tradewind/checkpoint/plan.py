"""Who writes what, and where it stands in a shard: pure functions of names, dtypes, shapes and
addresses, the same on every rank.

Tensors that are alike on all ranks are cut into one part a rank of nearly the same size; those that
belong to one rank are written by it. In a shard, memory that is written in place comes first, as it
lies in its arena; then the copies, back to back in the staging buffer."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from tradewind.checkpoint.staging import PAGE_BYTES, Copied, round_up

# A tensor larger than this begins at a page of its own, so that a reader can take its pages from
# the disk straight to where they belong.
PAGE_ALIGNED_BYTES = 64 * 1024
_SLOT_BYTES = 64  # of smaller ones: a cache line, as the arenas have it
# Cuts of tensors that are shared out fall on such borders: pages of any dtype.
_CUT_BYTES = 1 << 20


@dataclass(frozen=True)
class Part:
    """Elements [start, start + count) of one logical tensor, in row-major order, as one rank has
    them in memory: from element `skip` of tensor number `index` of those that are saved."""

    name: str
    index: int
    element_bytes: int
    num_elements: int  # of the whole tensor
    start: int
    count: int
    skip: int = 0

    def cut(self, begin: int, count: int) -> Part:
        """`count` of its elements, from its `begin`-th."""
        return replace(self, start=self.start + begin, count=count, skip=self.skip + begin)

    @property
    def size_bytes(self) -> int:
        return self.count * self.element_bytes

    @property
    def is_whole(self) -> bool:
        return self.count == self.num_elements


def share_out(parts: Sequence[Part], world_size: int) -> list[list[Part]]:
    """Cut whole tensors that every rank has into one list a rank, of nearly equal bytes."""
    if world_size == 1:
        return [list(parts)]
    total = sum(part.size_bytes for part in parts)
    shares: list[list[Part]] = [[] for _ in range(world_size)]
    done = 0
    for part in parts:
        begin, end = 0, part.count
        while True:
            rank = min(done * world_size // max(total, 1), world_size - 1)
            left = -(-total * (rank + 1) // world_size) - done  # what this rank still takes
            unit = max(_CUT_BYTES // part.element_bytes, 1)
            take = round_up(max(left, 1), _CUT_BYTES) // _CUT_BYTES * unit
            stop = end if rank == world_size - 1 or end - begin <= take else begin + take
            shares[rank].append(part.cut(begin, stop - begin))
            done += (stop - begin) * part.element_bytes
            begin = stop
            if begin >= end:
                break
    return shares


def in_rounds(parts: Sequence[Part], limit_bytes: int) -> list[list[Part]]:
    """Cut parts into lists, each of which takes at most `limit_bytes` of a staging buffer."""
    rounds: list[list[Part]] = [[]]
    at = 0
    for part in parts:
        begin = 0
        while True:
            at = round_up(at, PAGE_BYTES)
            room = (limit_bytes - at) // part.element_bytes
            left = part.count - begin
            if room < left and room * part.element_bytes < min(PAGE_BYTES, limit_bytes // 2):
                rounds.append([])
                at = 0
                continue
            take = min(left, room)
            rounds[-1].append(part.cut(begin, take))
            at += take * part.element_bytes
            begin += take
            if begin >= part.count:
                break
    return rounds


@dataclass(frozen=True)
class Placed:
    """A part and where its bytes begin, counted from the first byte behind the header. `same_as`:
    the part that lies there already, where two names have one memory (tied weights)."""

    part: Part
    offset_bytes: int
    same_as: Part | None = None


@dataclass(frozen=True)
class Region:
    """Memory that is written as it lies: `offset_bytes` is a multiple of a page."""

    offset_bytes: int
    address: int
    size_bytes: int


@dataclass
class ShardPlan:
    """The bytes of one shard. `pads` are (offset, size) of those that belong to no tensor."""

    placed: list[Placed] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)  # in place
    copies: list[tuple[Part, Copied]] = field(default_factory=list)
    copies_offset_bytes: int = 0
    copies_bytes: int = 0
    data_bytes: int = 0
    pads: list[tuple[int, int]] = field(default_factory=list)

    @property
    def in_place_bytes(self) -> int:
        written = sum(p.part.size_bytes for p in self.placed if p.same_as is None)
        return written - self.copied_bytes

    @property
    def copied_bytes(self) -> int:
        return sum(part.size_bytes for part, _ in self.copies)


def plan_shard(
    parts: Sequence[tuple[Part, int | None]], in_place: Iterable[tuple[int, int]]
) -> ShardPlan:
    """Lay out one shard. `parts` come with the address of their first element, or None for what is
    to be copied; `in_place` are the (address, bytes) of memory that may be written as it lies."""
    plan = ShardPlan()
    arenas = sorted(in_place)
    begins = [begin for begin, _ in arenas]
    staying: list[tuple[int, int, Part]] = []
    copied: list[Part] = []
    for part, address in parts:
        arena = bisect_right(begins, address) - 1 if address is not None else -1
        if arena >= 0 and part.count:
            assert address is not None
            begin, size = arenas[arena]
            if address + part.size_bytes <= begin + size:
                staying.append((address, arena, part))
                continue
        copied.append(part)
    _place_staying(plan, staying, arenas, copied)
    _place_copies(plan, copied)
    plan.placed.sort(key=lambda placed: (placed.offset_bytes, placed.part.size_bytes))
    _find_pads(plan)
    return plan


def _place_staying(
    plan: ShardPlan,
    staying: list[tuple[int, int, Part]],
    arenas: list[tuple[int, int]],
    copied: list[Part],
) -> None:
    staying.sort(key=lambda item: (item[0], item[2].size_bytes, item[2].name))
    begin = end = region_arena = -1
    offset = 0
    first_at: dict[tuple[int, int], Placed] = {}

    def close() -> None:
        nonlocal offset
        if begin >= 0:
            plan.regions.append(Region(offset, begin, end - begin))
            offset += round_up(end - begin)

    for address, arena, part in staying:
        first = first_at.get((address, part.size_bytes))
        if first is not None:
            plan.placed.append(Placed(part, first.offset_bytes, same_as=first.part))
            continue
        if arena == region_arena and address < end:  # a view of what is written already
            copied.append(part)
            continue
        if begin < 0 or arena != region_arena or address >= end + PAGE_BYTES:
            close()
            # From the start of its page, where the arena has it: pages of the file are then pages
            # of memory.
            page = address - address % PAGE_BYTES
            begin, region_arena = (page if page >= arenas[arena][0] else address), arena
            end = begin
        placed = Placed(part, offset + address - begin)
        plan.placed.append(placed)
        first_at[address, part.size_bytes] = placed
        end = address + part.size_bytes
    close()
    plan.data_bytes = offset


def _place_copies(plan: ShardPlan, copied: list[Part]) -> None:
    plan.copies_offset_bytes = plan.data_bytes
    at = 0
    for part in copied:
        unit = PAGE_BYTES if part.size_bytes >= PAGE_ALIGNED_BYTES else _SLOT_BYTES
        at = round_up(at, unit)
        plan.copies.append((part, Copied(at, part.size_bytes)))
        plan.placed.append(Placed(part, plan.copies_offset_bytes + at))
        at += part.size_bytes
    plan.copies_bytes = at
    plan.data_bytes += round_up(at)


def _find_pads(plan: ShardPlan) -> None:
    at = 0
    for placed in plan.placed:
        if placed.offset_bytes > at:
            plan.pads.append((at, placed.offset_bytes - at))
        at = max(at, placed.offset_bytes + placed.part.size_bytes)
    if plan.data_bytes > at:
        plan.pads.append((at, plan.data_bytes - at))
