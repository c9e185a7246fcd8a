"""What a last save can still reach: bytes <= rate x (deadline - now - commit)."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from tradewind.checkpoint.last_save import LastSave, Tier, plan_last_save

GB = 10**9


def test_both_tiers_where_there_is_time() -> None:
    plan = plan_last_save(GB, 1e9, 0.5, 100.0, 90.0, remote=Tier(0.5e9, 1.0), safety=1.0)
    assert plan == LastSave("local and remote", plan.reason, 4.5, 10.0)
    assert "1000.0 MB take about 4.5 s, 10.0 s are left" in plan.reason


def test_the_upload_is_left_out_where_only_it_is_late() -> None:
    plan = plan_last_save(GB, 1e9, 0.5, 94.0, 90.0, remote=Tier(0.5e9, 1.0), safety=1.0)
    assert (plan.reach, plan.needed_s) == ("local", 1.5)
    assert "3.0 s to upload" in plan.reason and "local disk alone" in plan.reason


def test_nothing_is_begun_that_cannot_be_done() -> None:
    plan = plan_last_save(10 * GB, 1e9, 0.5, 94.0, 90.0)
    assert plan.reach == "skip" and plan.needed_s == 0.0
    assert "take about 13.1 s, 4.0 s are left: no last save can be done in time" in plan.reason


def test_a_deadline_that_has_passed_skips_whatever_it_costs() -> None:
    for rate in (1e9, None):
        plan = plan_last_save(0, rate, 0.0, 89.0, 90.0, remote=Tier(None))
        assert plan.reach == "skip" and plan.left_s == 0.0


def test_what_was_never_measured_is_tried() -> None:
    assert plan_last_save(100 * GB, None, 0.0, 91.0, 90.0).reach == "local"
    assert plan_last_save(100 * GB, None, 2.0, 91.0, 90.0).reach == "skip"  # the commit was


def test_without_a_deadline_all_is_done() -> None:
    plan = plan_last_save(100 * GB, 1e6, 1.0, None, 90.0, remote=Tier(1e6))
    assert plan.reach == "local and remote" and math.isinf(plan.left_s)
    assert "no deadline is known" in plan.reason


def test_a_remote_tier_alone() -> None:
    remote = Tier(1e9, 1.0)
    common: dict[str, Any] = {"remote": remote, "saves_locally": False, "safety": 1.0}
    assert plan_last_save(GB, None, 0.0, 92.0, 90.0, **common).reach == "remote"
    plan = plan_last_save(GB, None, 0.0, 91.9, 90.0, **common)
    assert plan.reach == "skip" and "take about 2.0 s" in plan.reason


def test_the_budget_is_the_formulas() -> None:
    """Over a grid: what is planned fits, and what is not planned would not have."""
    sizes, rates, commits, lefts = (0, 10**6, GB), (1e6, 1e9), (0.0, 1.5), (0.0, 0.9, 2.0, 3.0, 5e3)
    for size, rate, commit, left in itertools.product(sizes, rates, commits, lefts):
        plan = plan_last_save(size, rate, commit, 50.0 + left, 50.0, safety=1.0)
        fits = left > 0 and size <= rate * (left - commit)
        assert (plan.reach == "local") == fits, (size, rate, commit, left)
        assert plan.needed_s <= plan.left_s


def test_estimates_are_taken_longer_than_they_are() -> None:
    assert plan_last_save(GB, 1e9, 0.0, 91.2, 90.0).reach == "skip"
    assert plan_last_save(GB, 1e9, 0.0, 91.25, 90.0).reach == "local"


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: plan_last_save(-1, 1.0, 0.0, 1.0, 0.0), "num_bytes of 0 or more"),
        (lambda: plan_last_save(1, 0.0, 0.0, 1.0, 0.0), "rate: expected bytes per second above 0"),
        (lambda: plan_last_save(1, math.nan, 0.0, 1.0, 0.0), "rate: expected"),
        (lambda: plan_last_save(1, 1.0, -1.0, 1.0, 0.0), "commit_s: expected seconds of 0 or more"),
        (lambda: plan_last_save(1, 1.0, 0.0, 1.0, 0.0, safety=0.5), "safety of 1 or more"),
        (lambda: plan_last_save(1, 1.0, 0.0, 1.0, 0.0, saves_locally=False), "a tier to save to"),
    ],
)
def test_bad_values_are_named(call: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    assert message in str(caught.value)
