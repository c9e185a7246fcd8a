"""Who writes what and where it stands: every byte once, borders that direct I/O likes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tradewind.checkpoint.plan import (
    PAGE_ALIGNED_BYTES,
    Part,
    ShardPlan,
    in_rounds,
    plan_shard,
    share_out,
)

PAGE = 4096


def whole(name: str, index: int, count: int, element_bytes: int = 4) -> Part:
    return Part(name, index, element_bytes, count, 0, count)


@given(
    counts=st.lists(st.integers(0, 5_000_000), max_size=12),
    element_bytes=st.sampled_from([1, 2, 4, 8]),
    world_size=st.integers(1, 7),
)
def test_ranks_share_every_element_once(
    counts: list[int], element_bytes: int, world_size: int
) -> None:
    parts = [whole(f"t{i}", i, count, element_bytes) for i, count in enumerate(counts)]
    shares = share_out(parts, world_size)
    assert len(shares) == world_size
    for part in parts:
        runs = sorted(
            (cut.start, cut.count) for share in shares for cut in share if cut.name == part.name
        )
        assert runs, part
        at = 0
        for start, count in runs:
            assert start == at
            at += count
        assert at == part.count
    total = sum(part.size_bytes for part in parts)
    largest = max(sum(cut.size_bytes for cut in share) for share in shares)
    assert largest <= total / world_size + 2 * (1 << 20)


@given(
    counts=st.lists(st.integers(0, 40_000), max_size=10),
    limit=st.integers(1 << 13, 1 << 17),
    element_bytes=st.sampled_from([1, 4, 8]),
)
def test_rounds_fit_and_have_every_element_once(
    counts: list[int], limit: int, element_bytes: int
) -> None:
    parts = [whole(f"t{i}", i, count, element_bytes) for i, count in enumerate(counts)]
    rounds = in_rounds(parts, limit)
    for some in rounds:
        assert plan_shard([(part, None) for part in some], []).copies_bytes <= limit
    for part in parts:
        cuts = [cut for some in rounds for cut in some if cut.name == part.name]
        assert [cut.start for cut in cuts] == [cut.skip for cut in cuts]
        at = 0
        for cut in cuts:
            assert cut.start == at
            at += cut.count
        assert at == part.count


def check_layout(plan: ShardPlan, memory: dict[str, tuple[int, int]]) -> None:
    """Bytes of the file are covered exactly by parts and pads; regions lie on pages."""
    spans = [(p.offset_bytes, p.part.size_bytes) for p in plan.placed if p.same_as is None]
    spans = sorted([span for span in spans if span[1]] + plan.pads)
    at = 0
    for offset, size in spans:
        assert offset == at
        at += size
    assert at == plan.data_bytes and plan.data_bytes % PAGE == 0
    for region in plan.regions:
        assert region.offset_bytes % PAGE == 0
    for placed in plan.placed:
        address, size = memory.get(placed.part.name, (None, 0))
        for region in plan.regions:
            if (
                address is not None
                and region.address <= address < region.address + region.size_bytes
            ):
                assert placed.offset_bytes - region.offset_bytes == address - region.address


def test_an_arena_is_one_region_with_its_gaps_as_pads() -> None:
    arena = 10 * PAGE
    parts = [
        (whole("a", 0, 100), arena),
        (whole("b", 1, 50), arena + 448),
        (whole("c", 2, 9), None),
    ]
    plan = plan_shard(parts, [(arena, 4 * PAGE)])
    assert [(r.offset_bytes, r.address, r.size_bytes) for r in plan.regions] == [(0, arena, 648)]
    assert [part.name for part, _ in plan.copies] == ["c"]
    assert plan.in_place_bytes == 600 and plan.copied_bytes == 36
    assert plan.copies_offset_bytes == PAGE
    check_layout(plan, {"a": (arena, 400), "b": (arena + 448, 200)})


def test_memory_far_apart_becomes_regions_that_begin_at_pages() -> None:
    arena = 16 * PAGE
    far = arena + 3 * PAGE + 128
    parts = [(whole("a", 0, 10), arena), (whole("b", 1, 10), far)]
    plan = plan_shard(parts, [(arena, 8 * PAGE)])
    assert [r.address for r in plan.regions] == [arena, far - 128]
    check_layout(plan, {"a": (arena, 40), "b": (far, 40)})


def test_tied_memory_is_written_once_and_overlapping_memory_is_copied() -> None:
    arena = 4 * PAGE
    parts = [
        (whole("a", 0, 100), arena),
        (whole("tied", 1, 100), arena),
        (whole("view", 2, 10), arena + 40),
    ]
    plan = plan_shard(parts, [(arena, PAGE)])
    same = {placed.part.name: placed.same_as for placed in plan.placed}
    assert same["a"] is None and same["tied"] is not None and same["tied"].name == "a"
    assert [part.name for part, _ in plan.copies] == ["view"]
    check_layout(plan, {"a": (arena, 400)})


def test_memory_outside_or_beyond_the_arena_is_copied() -> None:
    arena = 4 * PAGE
    parts = [(whole("before", 0, 4), arena - 8), (whole("beyond", 1, 2000), arena + 8)]
    plan = plan_shard(parts, [(arena, PAGE)])
    assert not plan.regions and len(plan.copies) == 2


@given(sizes=st.lists(st.integers(0, 3 * PAGE_ALIGNED_BYTES), max_size=10))
def test_large_copies_begin_at_pages(sizes: list[int]) -> None:
    plan = plan_shard([(whole(f"t{i}", i, n, 1), None) for i, n in enumerate(sizes)], [])
    for placed in plan.placed:
        unit = PAGE if placed.part.size_bytes >= PAGE_ALIGNED_BYTES else 64
        assert placed.offset_bytes % unit == 0
    check_layout(plan, {})


@pytest.mark.parametrize("world_size", [2, 3])
def test_nothing_is_shared_out_as_nothing(world_size: int) -> None:
    assert share_out([], world_size) == [[] for _ in range(world_size)]
