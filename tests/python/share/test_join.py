"""Ranks that run out of data before the others."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import tradewind as tw
from share.gradient_cases import Paths
from share.ranks import Ranks


def joins(rank: int, divide_by_all: bool, interval: int) -> None:
    num_own = (2, 5)
    model = Paths()
    shared, ones = tw.GradientSharing(model), torch.ones(1, 4)
    used = [(0, 1), (0,)]
    kept = None
    with shared.join(divide_by_initial_world_size=divide_by_all):
        for step in range(num_own[rank]):
            syncs = step % interval == 0
            with nullcontext() if syncs else shared.no_sync():
                shared(ones, used[rank]).backward()
            if not syncs:
                model.zero_grad()
                continue
            present = [r for r in (0, 1) if step < num_own[r]]
            alone = Paths()
            (sum(alone(ones, used[r]) for r in present)).backward()
            count = 2 if divide_by_all else len(present)
            # Two terms, in another order: one rounding apart.
            torch.testing.assert_close(model.grad(0), alone.grad(0) / count, rtol=1e-6, atol=0)
            if step < num_own[rank] - 1:
                model.zero_grad()
            else:
                kept = model.grad(0).clone()
            with torch.no_grad():  # an evaluation between steps
                shared(ones, used[rank])
    if kept is not None:
        # Rounds that it attended after its last step are not its own.
        assert torch.equal(model.grad(0), kept)


@pytest.mark.parametrize("divide_by_all", [True, False])
@pytest.mark.parametrize("interval", [1, 2])
def test_join_lets_ranks_run_out_of_data(ranks: Ranks, divide_by_all: bool, interval: int) -> None:
    ranks.run(joins, divide_by_all, interval)


def joins_one_after_the_other(rank: int) -> None:
    shared = tw.GradientSharing(nn.Linear(5, 5, bias=False))
    for _ in range(2):
        with shared.join():
            for step in range(3 if rank == 0 else 5):
                shared(torch.ones(1, 5)).sum().backward()
                expected = 1.0 if step < 3 else 0.5
                assert torch.equal(shared.module.weight.grad, torch.full((5, 5), expected))
                shared.zero_grad()


def test_join_twice(ranks: Ranks) -> None:
    ranks.run(joins_one_after_the_other)


def joins_until_the_first_ends(rank: int) -> int:
    shared = tw.GradientSharing(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    num_steps = 0
    with pytest.raises(RuntimeError, match="exhausted"):  # noqa: SIM117
        with shared.join(throw_on_early_termination=True):
            for _ in range(3 if rank == 0 else 6):
                shared(torch.randn(4, 2)).sum().backward()
                num_steps += 1
    return num_steps


def test_join_can_end_with_the_first_rank_without_data(ranks: Ranks) -> None:
    assert ranks.run(joins_until_the_first_ends) == [3, 3]
