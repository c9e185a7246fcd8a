"""When a save is due, against numbers from the papers and against brute force."""

from __future__ import annotations

import json
import math
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from tradewind.checkpoint.interval import Every, Interval, daly, parse_every, prior_mtbf, young

HOUR = 3600.0


@pytest.mark.parametrize(
    "value, expected",
    [
        ("auto", Every("auto")),
        (" AUTO ", Every("auto")),
        (1, Every("steps", steps=1)),
        ("500 steps", Every("steps", steps=500)),
        ("1 step", Every("steps", steps=1)),
        (timedelta(minutes=10), Every("time", seconds=600.0)),
        ("10min", Every("time", seconds=600.0)),
        ("90 s", Every("time", seconds=90.0)),
        ("1h 30min", Every("time", seconds=5400.0)),
        ("0.5 hours", Every("time", seconds=1800.0)),
        (Every("steps", steps=3), Every("steps", steps=3)),
    ],
)
def test_every(value: Any, expected: Every) -> None:
    assert parse_every(value) == expected
    assert parse_every(str(expected)) == expected  # what a message shows can be given


@pytest.mark.parametrize(
    "value",
    [
        *(0, -1, True, 1.5, None, "", "soon", "10", "10 parsecs", "-3min", "0 steps", "1.5 steps"),
        *("10min later", "1e3 s", "5 steps 3 min", timedelta(0), timedelta(days=-1), [10], "nan s"),
        *(timedelta(days=9999), "99999999999h"),
    ],
)
def test_what_is_no_every_is_named(value: Any) -> None:
    with pytest.raises(ValueError) as caught:
        parse_every(value)
    assert str(caught.value).startswith("every: expected") and repr(value) in str(caught.value)


def best_interval(cost_s: float, mtbf_s: float) -> float:
    """Where Daly's complete model of the wall time for work, M (e^((t + C) / M) - 1) / t without
    restarts, has its minimum: the root of (1 - t / M) e^(t / M) = e^(-C / M), by bisection."""
    low, high = 0.0, mtbf_s
    for _ in range(100):
        t = (low + high) / 2
        if (1 - t / mtbf_s) * math.exp(t / mtbf_s) > math.exp(-cost_s / mtbf_s):
            low = t
        else:
            high = t
    return low


@pytest.mark.parametrize("mtbf_s", (600.0, 2 * HOUR, 100 * HOUR))
@pytest.mark.parametrize("cost_s", (0.02, 1.0, 30.0, 300.0))
def test_daly_minimises_what_failures_and_saves_cost(cost_s: float, mtbf_s: float) -> None:
    best = best_interval(cost_s, mtbf_s)
    ratio = cost_s / (2 * mtbf_s)
    # The series ends before (C / 2M)^(3/2), whose factor is 1/20 or so; 1e-9 is the bisection's.
    assert daly(cost_s, mtbf_s) == pytest.approx(best, rel=ratio**1.5 / 10 + 1e-9)
    assert abs(young(cost_s, mtbf_s) - best) > abs(daly(cost_s, mtbf_s) - best)


def test_daly_at_its_end() -> None:
    assert young(50.0, 100.0) == 100.0
    assert daly(200.0, 100.0) == daly(500.0, 100.0) == 100.0


# --- steps and times ------------------------------------------------------------------------------


def test_steps_are_multiples_whatever_they_began_at() -> None:
    interval = Interval(4)
    interval.begin(10, now_s=0.0)
    due = []
    for step in range(11, 30):
        if interval.is_due(step, 0.0):
            due.append(step)
            interval.begin(step, 0.0)
    assert due == [12, 16, 20, 24, 28]


def test_a_step_that_was_missed_is_made_up_for_once() -> None:
    interval = Interval(4)
    interval.begin(0, 0.0)
    assert interval.is_due(4, 0.0) and interval.is_due(5, 0.0)  # nobody saved at 4
    interval.begin(5, 0.0)
    assert not interval.is_due(5, 0.0) and not interval.is_due(7, 0.0)
    assert interval.is_due(8, 0.0)


def test_steps_that_nobody_began_count_from_the_first() -> None:
    interval = Interval(4)
    assert not interval.is_due(3, 0.0)
    assert interval.is_due(4, 0.0)


def test_times_count_from_the_last_saves_beginning() -> None:
    interval = Interval("1min")
    interval.begin(0, now_s=1000.0)
    assert not interval.is_due(7, 1059.9)
    assert interval.is_due(8, 1060.0)
    interval.begin(8, 1060.0)
    interval.saved(8, 1090.0, stall_s=0.1, durable_s=30.0)  # durable half a minute later
    assert not interval.is_due(9, 1119.0)
    assert interval.is_due(10, 1120.0)


def test_a_save_that_nobody_began_counts_from_where_it_must_have_begun() -> None:
    interval = Interval("1min")
    interval.begin(0, now_s=0.0)
    interval.saved(5, 100.0, stall_s=0.0, durable_s=30.0)
    assert not interval.is_due(6, 129.0) and interval.is_due(6, 130.0)


def test_one_step_is_saved_once() -> None:
    interval = Interval("1s")
    interval.begin(5, now_s=0.0)
    assert not interval.is_due(5, 100.0)


def test_a_clock_that_goes_back_begins_anew() -> None:
    interval = Interval("1min")
    interval.begin(0, now_s=1e6)
    assert not interval.is_due(1, 50.0)
    assert not interval.is_due(2, 109.0)
    assert interval.is_due(3, 110.0)


def test_a_failed_save_is_tried_again_an_interval_later() -> None:
    interval = Interval("1min")
    interval.begin(0, 0.0)
    interval.failed(3, 70.0)
    assert not interval.is_due(4, 129.0) and interval.is_due(5, 130.0)
    steps = Interval(10)
    steps.begin(10, 0.0)
    steps.failed(10, 1.0)
    assert not steps.is_due(11, 1e6) and steps.is_due(20, 1e6)
    assert steps.describe()["num_failed_saves"] == 1


# --- auto -----------------------------------------------------------------------------------------


def measured(interval: Interval, *costs: float, durable_s: float = 1.0) -> Interval:
    for step, cost in enumerate(costs, 1):
        interval.begin(step, float(step))
        interval.saved(step, step + durable_s, cost, durable_s)
    return interval


def test_the_first_save_comes_soon_as_nothing_is_known() -> None:
    interval = Interval("auto", min_s=30.0)
    interval.begin(0, 0.0)
    assert not interval.is_due(1, 29.9) and interval.is_due(1, 30.0)
    assert interval.describe()["held_by"] == "nothing measured yet"


def test_auto_is_dalys_of_the_median_cost() -> None:
    interval = measured(Interval("auto", timedelta(hours=2)), 9.0, 1.0, 1.2, 0.8, 1.1)
    assert interval.interval_s == pytest.approx(daly(1.1, 2 * HOUR))
    assert interval.describe()["held_by"] is None


def test_slowed_compute_counts_as_cost() -> None:
    interval = Interval("auto", timedelta(hours=2))
    interval.saved(1, 10.0, stall_s=0.5, durable_s=1.0, slowed_s=1.5)
    assert interval.interval_s == pytest.approx(daly(2.0, 2 * HOUR))


def test_old_costs_are_forgotten() -> None:
    interval = measured(Interval("auto", timedelta(hours=2)), *[50.0] * 20, *[1.0] * 9)
    assert interval.interval_s == pytest.approx(daly(1.0, 2 * HOUR))


@pytest.mark.parametrize(
    "costs, durable_s, expected, held_by",
    [
        ([0.001], 1.0, 30.0, "min"),
        ([100.0], 1.0, 1800.0, "max"),
        ([1.0], 400.0, 400.0, "time to durable"),
        ([1.0], 4000.0, 4000.0, "max"),  # one after the other, though it is more than wanted
    ],
)
def test_auto_is_clamped(
    costs: list[float], durable_s: float, expected: float, held_by: str
) -> None:
    mtbf = timedelta(hours=100) if costs[0] == 100.0 else timedelta(hours=2)
    interval = measured(Interval("auto", mtbf), *costs, durable_s=durable_s)
    assert interval.interval_s == expected
    assert interval.describe()["held_by"] == held_by


def test_uptime_without_failures_makes_saves_rarer_and_failures_more_frequent() -> None:
    interval = Interval("auto", timedelta(hours=2))
    interval.observe_uptime(2 * HOUR)
    interval.observe_uptime(1 * HOUR)  # a clock that went back
    assert interval.mtbf_s == 4 * HOUR
    interval.observe_failure()
    assert interval.mtbf_s == 2 * HOUR
    for _ in range(6):
        interval.observe_failure()
    assert interval.mtbf_s == 0.5 * HOUR


def test_the_estimate_finds_the_true_rate() -> None:
    """Poisson failures each 30 minutes under a prior of 100 hours: within 3 sigma of 1/sqrt(n)."""
    drawn = np.random.default_rng(0).exponential(1800.0, size=400)
    interval = Interval("auto", timedelta(hours=100))
    for index in range(len(drawn)):
        interval.observe_uptime(float(drawn[: index + 1].sum()))
        interval.observe_failure()
    assert interval.mtbf_s == pytest.approx(1800.0, rel=3 / math.sqrt(400) + 200 / 401)
    assert interval.mtbf_s == pytest.approx((100 * HOUR + drawn.sum()) / 401)


def test_notices_that_lead_to_a_save_make_failures_cheap() -> None:
    interval = Interval("auto", timedelta(hours=2), notice_probability=0.75)
    measured(interval, 1.0)
    assert interval.interval_s == pytest.approx(daly(1.0, 8 * HOUR))
    interval.observe_uptime(4 * HOUR)
    interval.observe_failure(after_notice=True)
    interval.observe_failure()
    assert interval.notice_probability == pytest.approx((0.75 + 1) / 3)
    assert interval.interval_s == pytest.approx(daly(1.0, 2 * HOUR / (1 - 1.75 / 3)))


def test_what_was_learned_outlives_the_attempt() -> None:
    first = Interval("auto", timedelta(hours=2))
    measured(first, 2.0, 3.0, 4.0)
    first.observe_uptime(HOUR)
    first.observe_failure()
    first.saved(9, 99.0, 3.0, 1.0, on_notice=True)
    kept = json.loads(json.dumps(first.state_dict()))

    ended_by_failure = Interval("auto", timedelta(hours=2))
    ended_by_failure.load_state_dict(kept)
    ended_by_failure.observe_uptime(HOUR)
    known = ended_by_failure.describe()
    assert known["num_failures"] == 2 and known["uptime_s"] == 2 * HOUR
    assert known["notice_probability"] == pytest.approx(1 / 3)
    assert known["cost_s"] == 3.0
    assert ended_by_failure.mtbf_s == pytest.approx(4 * HOUR / 3)

    ended_well = Interval("auto", timedelta(hours=2))
    ended_well.load_state_dict(kept, num_failures=0)
    assert ended_well.describe()["num_failures"] == 1
    third = Interval("auto", timedelta(hours=2))
    third.load_state_dict(json.loads(json.dumps(ended_by_failure.state_dict())), num_failures=3)
    assert third.describe()["num_failures"] == 5 and third.describe()["uptime_s"] == 2 * HOUR


def test_priors() -> None:
    assert prior_mtbf("spot") == timedelta(hours=2)
    assert prior_mtbf("on-demand", 8) == timedelta(hours=12.5)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: Interval(0), "every: expected"),
        (lambda: Interval("auto", timedelta(0)), "prior_mtbf: expected a timedelta above 0"),
        (lambda: Interval("auto", 7200), "prior_mtbf: expected a timedelta above 0, got 7200"),
        (lambda: Interval("auto", notice_probability=1.0), "from 0 to below 1, got 1.0"),
        (lambda: Interval("auto", min_s=60, max_s=30), "expected 0 < min_s <= max_s"),
        (lambda: Interval("auto").saved(1, 1.0, math.nan, 1.0), "stall_s: expected a finite"),
        (lambda: prior_mtbf("cheap"), "spot, on-demand and at least 1 machine, got 'cheap'"),
        (lambda: prior_mtbf("spot", 0), "got 'spot' and 0"),
    ],
)
def test_bad_values_are_named(call: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    assert message in str(caught.value)


def test_times_that_went_back_count_as_nothing() -> None:
    interval = measured(Interval("auto", timedelta(hours=2)), -5.0, durable_s=-1.0)
    assert interval.describe()["cost_s"] == 0.0 and interval.interval_s == 30.0


def test_what_is_described_is_json() -> None:
    for every in ("auto", 5, "1h"):
        known = json.loads(json.dumps(Interval(every).describe(), allow_nan=False))
        assert known["every"] == str(parse_every(every))
    assert Interval(5).describe()["interval_s"] is None
    assert Interval("1h").describe()["interval_s"] == HOUR
