"""When to save: each so many steps, each so much time, or as often as pays (`every="auto"`).

Pure arithmetic over times that the caller gives, in seconds of one monotonic clock: no thread, no
clock of its own. Of several ranks, one asks and tells the others.
"""

from __future__ import annotations

import math
import re
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import Any, Literal

_UNITS_S = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hr", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)", re.ASCII)
_LONGEST_S = 10 * 365 * 86400.0

# Mean time between failures of one machine before anything was seen of it, in hours. Assumptions on
# the careful side, and worth one observed failure only: whoever knows better gives prior_mtbf.
# Spot: GPU instances in demand are taken back within hours; AWS publishes monthly rates only ("over
# 20%" is its worst band), Google ended its preemptible ones after 24 h at the latest. On demand:
# Llama 3's run of 405B parameters saw 419 unexpected interruptions in 54 days on 2,048 machines
# (arXiv 2407.21783, section 3.3.4), one in 6,300 h of a machine; users' own errors, drivers and
# maintenance of less watched machines make it more often.
_PRIOR_HOURS = {"spot": 2.0, "on-demand": 100.0}

_NUM_REMEMBERED = 9  # saves whose median counts


@dataclass(frozen=True)
class Every:
    """What `every=` means. `steps` with kind "steps", `seconds` with kind "time"."""

    kind: Literal["auto", "steps", "time"]
    steps: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.kind == "steps":
            return f"{self.steps} step{'s' if self.steps != 1 else ''}"
        return f"{self.seconds:g} s" if self.kind == "time" else "auto"


def parse_every(value: Any) -> Every:
    """What a user gives as `every=`: "auto", a number of steps (also "500 steps"), a timedelta, or
    text such as "10min", "90 s" or "1h 30min".

    Raises ValueError naming what was given for anything else.
    """
    if isinstance(value, Every):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return Every("steps", steps=value)
    if isinstance(value, timedelta) and 0 < value.total_seconds() <= _LONGEST_S:
        return Every("time", seconds=value.total_seconds())
    if isinstance(value, str):
        text = value.strip().lower()
        if text == "auto":
            return Every("auto")
        found = _parse_amounts(text)
        if found is not None:
            return found
    raise ValueError(
        'every: expected "auto", a number of steps of at least 1, or a time such as "10min" or '
        f"timedelta(minutes=10), got {value!r}"
    )


def _parse_amounts(text: str) -> Every | None:
    amounts = _AMOUNT.findall(text)
    if not amounts or _AMOUNT.sub("", text).strip():
        return None
    if len(amounts) == 1 and amounts[0][1] in ("step", "steps"):
        number = amounts[0][0]
        return Every("steps", steps=int(number)) if number.isdigit() and int(number) else None
    if any(unit not in _UNITS_S for _, unit in amounts):
        return None
    seconds = sum(float(number) * _UNITS_S[unit] for number, unit in amounts)
    return Every("time", seconds=seconds) if 0 < seconds <= _LONGEST_S else None


def prior_mtbf(kind: str, num_machines: int = 1) -> timedelta:
    """The mean time between failures to begin with, of "spot" or "on-demand" machines of which
    each one's failure ends the run. Raises ValueError for another kind or no machine."""
    if kind not in _PRIOR_HOURS or num_machines < 1:
        raise ValueError(
            f"prior_mtbf: expected one of {', '.join(_PRIOR_HOURS)} and at least 1 machine, got "
            f"{kind!r} and {num_machines}"
        )
    return timedelta(hours=_PRIOR_HOURS[kind] / num_machines)


def young(cost_s: float, mtbf_s: float) -> float:
    """Seconds of training between two saves that cost `cost_s` each, where failures come each
    `mtbf_s`: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM
    17(9), 1974."""
    return math.sqrt(2.0 * cost_s * mtbf_s)


def daly(cost_s: float, mtbf_s: float) -> float:
    """The same with the next orders: J. T. Daly, "A higher order estimate of the optimum checkpoint
    interval for restart dumps", FGCS 22(3), 2006, equation 37."""
    if cost_s >= 2.0 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2.0 * mtbf_s)
    return young(cost_s, mtbf_s) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - cost_s


class Interval:
    """Says when a save is due.

    With "auto" the time between saves is `daly(C, M')`, not less than the median time to durable,
    clamped to [min_s, max_s]. C is the median of what the last saves cost the training. M is the
    mean time between failures: failures are a Poisson process whose rate has a Gamma prior worth
    one failure in `prior_mtbf`, so that M = (prior + uptime) / (1 + failures), over all attempts on
    this directory. Where a notice still yields a checkpoint, a failure costs nothing: with the
    probability p of that, M' = M / (1 - p); p is a Beta posterior whose prior mean is
    `notice_probability` and which is worth one failure too.

    Args:
        every: see `parse_every`.
        prior_mtbf: a time, of the whole run (all of its machines).
        notice_probability: from 0 to below 1.
        min_s, max_s: of the interval of "auto", in seconds.
    """

    def __init__(
        self,
        every: Any = "auto",
        prior_mtbf: timedelta = timedelta(hours=_PRIOR_HOURS["on-demand"]),
        *,
        notice_probability: float = 0.0,
        min_s: float = 30.0,
        max_s: float = 1800.0,
    ) -> None:
        self.every = parse_every(every)
        if not isinstance(prior_mtbf, timedelta) or prior_mtbf <= timedelta(0):
            raise ValueError(f"prior_mtbf: expected a timedelta above 0, got {prior_mtbf!r}")
        if not 0.0 <= notice_probability < 1.0:
            raise ValueError(
                "notice_probability: expected a probability from 0 to below 1, got "
                f"{notice_probability!r}"
            )
        if not 0.0 < min_s <= max_s < math.inf:
            raise ValueError(f"interval: expected 0 < min_s <= max_s, got {min_s} and {max_s}")
        self._prior_s = prior_mtbf.total_seconds()
        self._prior_notice = notice_probability
        self._min_s, self._max_s = min_s, max_s
        self._costs_s: deque[float] = deque(maxlen=_NUM_REMEMBERED)
        self._durables_s: deque[float] = deque(maxlen=_NUM_REMEMBERED)
        self._num_failures = 0
        self._num_noticed = 0  # of these, those that a last save came before
        self._earlier_uptime_s = 0.0  # of earlier attempts
        self._uptime_s = 0.0  # of this one
        self._is_last_save_on_notice = False
        self._num_saved = self._num_failed = 0
        self._anchor_s: float | None = None  # when the last save began
        self._anchor_step = 0

    # --- asking -----------------------------------------------------------------------------------

    def begin(self, step: int, now_s: float) -> None:
        """Count from here: the run begins, goes on after a restore, or begins a save."""
        self._anchor_step, self._anchor_s = step, now_s

    def is_due(self, step: int, now_s: float) -> bool:
        """Whether a save is due at this step boundary. Steps count from the run's first one: each
        multiple of N is due once, and one that was missed at the next boundary."""
        if self._anchor_s is None:
            self.begin(0 if self.every.kind == "steps" else step, now_s)
        assert self._anchor_s is not None
        if step <= self._anchor_step:
            return False
        if self.every.kind == "steps":
            return step // self.every.steps > self._anchor_step // self.every.steps
        if now_s < self._anchor_s:  # the clock went back: begin anew, rather than wait it out
            self._anchor_s = now_s
        return now_s - self._anchor_s >= self.interval_s

    @property
    def interval_s(self) -> float:
        """Seconds between two saves as known so far; NaN where steps count."""
        if self.every.kind == "steps":
            return math.nan
        return self.every.seconds if self.every.kind == "time" else self._auto()[0]

    def _auto(self) -> tuple[float, str | None]:
        """The interval, and what holds it where Daly's is not taken as it is."""
        if not self._costs_s:
            return self._min_s, "nothing measured yet"
        best = daly(median(self._costs_s), self.mtbf_s / (1.0 - self.notice_probability))
        wanted = max(best, median(self._durables_s))
        if wanted > self._max_s:  # a save may take longer than that; then one follows the other
            return max(self._max_s, median(self._durables_s)), "max"
        if wanted < self._min_s:
            return self._min_s, "min"
        return wanted, None if wanted == best else "time to durable"

    @property
    def mtbf_s(self) -> float:
        """Estimate of the mean time between failures."""
        return (self._prior_s + self.uptime_s) / (1 + self._num_failures)

    @property
    def notice_probability(self) -> float:
        """Estimate of how often a notice leads to a save before the end."""
        return (
            (self._prior_notice + min(self._num_noticed, self._num_failures))
            / (1 + self._num_failures)
            if self._prior_notice or self._num_noticed
            else 0.0
        )

    @property
    def uptime_s(self) -> float:
        """Of all attempts on this directory."""
        return self._earlier_uptime_s + self._uptime_s

    # --- telling ----------------------------------------------------------------------------------

    def saved(
        self,
        step: int,
        now_s: float,
        stall_s: float,
        durable_s: float,
        *,
        slowed_s: float = 0.0,
        on_notice: bool = False,
    ) -> None:
        """A save of `step` is durable since now. It cost the training a stall of `stall_s` and made
        its compute longer by `slowed_s`; it took `durable_s` from its beginning."""
        self._costs_s.append(_seconds("stall_s", stall_s) + _seconds("slowed_s", slowed_s))
        self._durables_s.append(_seconds("durable_s", durable_s))
        self._num_saved += 1
        self._is_last_save_on_notice = on_notice
        self._move(step, now_s - durable_s)

    def failed(self, step: int, now_s: float) -> None:
        """A save of `step` failed: the next one is due an interval after it."""
        self._num_failed += 1
        self._move(step, now_s)

    def _move(self, step: int, now_s: float) -> None:
        if self._anchor_s is None or step > self._anchor_step:
            self.begin(step, now_s)

    def observe_uptime(self, seconds: float) -> None:
        """How long this attempt has been training, in all."""
        self._uptime_s = max(self._uptime_s, _seconds("uptime", seconds))

    def observe_failure(self, *, after_notice: bool = False) -> None:
        """An attempt ended without having finished; after a notice and a last save, or without."""
        self._num_failures += 1
        self._num_noticed += int(after_notice)

    # --- keeping ----------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """For the report and `stats()`; None where nothing is known. Times in seconds."""
        is_auto = self.every.kind == "auto"
        interval_s, held_by = self._auto() if is_auto else (self.interval_s, None)
        return {
            "every": str(self.every),
            "interval_s": None if math.isnan(interval_s) else interval_s,
            "held_by": held_by,
            "cost_s": median(self._costs_s) if self._costs_s else None,
            "durable_s": median(self._durables_s) if self._durables_s else None,
            "mtbf_s": self.mtbf_s,
            "notice_probability": self.notice_probability,
            "num_failures": self._num_failures,
            "uptime_s": self.uptime_s,
            "num_saved": self._num_saved,
            "num_failed_saves": self._num_failed,
        }

    def state_dict(self) -> dict[str, Any]:
        """What the next attempt on this directory should know, as JSON values."""
        return {
            "num_failures": self._num_failures,
            "num_noticed": self._num_noticed,
            "uptime_s": self.uptime_s,
            "costs_s": list(self._costs_s),
            "durables_s": list(self._durables_s),
            "on_notice": self._is_last_save_on_notice,
        }

    def load_state_dict(self, state: dict[str, Any], *, num_failures: int = 1) -> None:
        """Go on from what an earlier attempt knew at its last save. `num_failures`: attempts that
        ended since without having finished (0: the last one finished); the first of them came after
        a notice where that save was made on one. What an attempt ran after its last save is not
        known and counts as nothing."""
        self._num_failures = int(state["num_failures"])
        self._num_noticed = int(state["num_noticed"])
        self._earlier_uptime_s = _seconds("uptime_s", state["uptime_s"])
        self._costs_s = deque(map(float, state["costs_s"]), maxlen=_NUM_REMEMBERED)
        self._durables_s = deque(map(float, state["durables_s"]), maxlen=_NUM_REMEMBERED)
        for index in range(num_failures):
            self.observe_failure(after_notice=index == 0 and bool(state["on_notice"]))


def _seconds(name: str, value: float) -> float:
    """A clock that went back gives negative times: they count as nothing."""
    value = float(value)
    if not math.isfinite(value):
        raise ValueError(f"{name}: expected a finite number of seconds, got {value}")
    return max(0.0, value)
