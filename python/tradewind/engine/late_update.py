"""An update whose sums are still under way when `Engine.step` returns: each bucket's part is
applied when the next forward first needs it, the rest when that forward ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from tradewind._core import native
from tradewind.optim.deferred import DeferredUpdate
from tradewind.optim.fused import Outcome


class PendingUpdate(ABC):
    """One round of shared gradients on its way to the parameters. One thread: the step's."""

    def __init__(
        self,
        shared: native.SharedGradients,
        outcome: Outcome,
        give_measures: Callable[[], None],
        on_end: Callable[[Outcome], None],
    ) -> None:
        self._shared = shared
        self._give_measures = give_measures
        self._on_end = on_end
        self._is_decided = False
        self.clip_waited_s = 0.0  # for the norm to clip by, of a step that could have gone on
        self.is_over = False
        self.is_finishing = False
        self.outcome = LateOutcome(outcome, self.finish)
        shared.set_deferred(True)

    def decide(self) -> None:
        """Whether and with which clip factor the update is applied: the same on every rank."""
        if not self._is_decided:
            self._decide()
            self._is_decided = True

    def need(self, buckets: Iterable[int]) -> None:
        """Apply these buckets' parts now, waiting for their sums."""
        for bucket in buckets:
            if self.is_over or not self._is_open(bucket):
                continue
            self.decide()
            if not self.is_over:
                self._apply(bucket)

    def finish(self) -> None:
        """Apply what is left."""
        if self.is_over or self.is_finishing:
            return
        self.is_finishing = True
        try:
            self.decide()
            if not self.is_over:
                self._apply_rest()
        finally:
            self.is_finishing = False

    def _wait_for_norm(self, measure: Callable[[], Any]) -> Any:
        before = self._shared.statistics().waited_s
        found = measure()
        self.clip_waited_s = self._shared.statistics().waited_s - before
        return found

    def _end(self, outcome: Outcome) -> None:
        self.is_over = True
        self._shared.set_deferred(False)
        self._on_end(outcome)

    @abstractmethod
    def _decide(self) -> None: ...

    @abstractmethod
    def _is_open(self, bucket: int) -> bool:
        """Whether anything of it may be left to apply."""

    @abstractmethod
    def _apply(self, bucket: int) -> None: ...

    @abstractmethod
    def _apply_rest(self) -> None: ...

    @property
    @abstractmethod
    def is_torn(self) -> bool:
        """Some parameters may have been updated and some not."""

    @property
    @abstractmethod
    def progress(self) -> str: ...


class LateUpdate(PendingUpdate):
    """Every rank applies every bucket, as its means are there."""

    def __init__(
        self,
        shared: native.SharedGradients,
        deferred: DeferredUpdate,
        table_indices: Sequence[int],
        give_measures: Callable[[], None],
        on_end: Callable[[Outcome], None],
    ) -> None:
        super().__init__(shared, deferred.outcome, give_measures, on_end)
        self._deferred = deferred
        self._table_indices = table_indices  # by parameter; -1: the optimizer does not have it
        self._open = dict.fromkeys(range(shared.num_buckets()))
        self._has_measures = False

    def _decide(self) -> None:
        shared = self._shared
        vetoed = bool(shared.nonfinite())
        if vetoed or not shared.is_mean_final():
            shared.settle()
        else:
            shared.assign_gradients()
        if vetoed:
            self._measure()
            self._open.clear()
            outcome = self._deferred.veto()
            outcome.nonfinite = tuple(shared.nonfinite())
            self._end(outcome)
        elif self._deferred.clips:
            self._wait_for_norm(self._measure)
            self._deferred.measure()

    def _measure(self) -> None:
        if not self._has_measures:
            self._give_measures()
            self._has_measures = True

    def _is_open(self, bucket: int) -> bool:
        return bucket in self._open

    def _apply(self, bucket: int) -> None:
        self._shared.settle_bucket(bucket)
        del self._open[bucket]
        indices = [self._table_indices[i] for i in self._shared.parameters_of(bucket)]
        self._deferred.apply([index for index in indices if index >= 0])

    def _apply_rest(self) -> None:
        for bucket in list(self._open):
            self._apply(bucket)
        self._shared.settle()
        self._measure()
        self._end(self._deferred.end())

    @property
    def is_torn(self) -> bool:
        return not self.is_over and 0 < len(self._open) < self._shared.num_buckets()

    @property
    def progress(self) -> str:
        num_buckets = self._shared.num_buckets()
        return f"{num_buckets - len(self._open)} of {num_buckets} buckets are updated"


class LateOutcome(Outcome):
    """The outcome of a late update; reading a number applies what is left of it."""

    def __init__(self, outcome: Outcome, finish: Callable[[], None]) -> None:
        self._inner = outcome
        self._finish = finish
        self._is_over = False

    def over(self) -> None:
        self._is_over = True
        self._finish = _nothing

    def is_ready(self) -> bool:
        return self._is_over

    def found_inf(self, device: torch.device) -> torch.Tensor:
        return self._read().found_inf(device)

    def _read(self) -> Outcome:
        self._finish()
        return self._inner

    @property
    def norm(self) -> float | torch.Tensor | None:  # type: ignore[override]
        return self._read().norm

    @property
    def clip_factor(self) -> float:  # type: ignore[override]
        return self._read().clip_factor

    @property
    def applied(self) -> bool:  # type: ignore[override]
        return self._read().applied

    @property
    def num_nonfinite(self) -> int:  # type: ignore[override]
        return self._read().num_nonfinite

    @property
    def first_nonfinite_name(self) -> str:  # type: ignore[override]
        return self._read().first_nonfinite_name

    @property
    def nonfinite(self) -> tuple[native.NonFiniteGradient, ...]:  # type: ignore[override]
        return self._read().nonfinite

    @property
    def num_hot(self) -> int:  # type: ignore[override]
        return self._read().num_hot

    @property
    def num_withheld(self) -> int:  # type: ignore[override]
        return 0

    @property
    def gradient_multiplier(self) -> float:  # type: ignore[override]
        return self._inner.gradient_multiplier


def _nothing() -> None: ...
