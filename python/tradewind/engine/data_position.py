"""Where the run is in its data, as a checkpoint holds it: for each call of `engine.batches()` the
epoch and how many of its batches all ranks together have trained on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from tradewind.checkpoint.parts import PerRank
from tradewind.engine.batch_call import BatchCall, Record
from tradewind.engine.rank_batches import RankBatches


class DataPosition:
    """Made by an Engine with checkpoints, and kept for as long as it lives. One thread.

    Calls of `engine.batches()` are told apart by their order. In a run that goes on, a call that
    had ended yields nothing (unless nothing was trained on it: an evaluation is made again), the
    one that was under way goes on, and later ones are new.

    `on_resumed` is called once, before the first batch of the run is yielded that has not been
    trained on: the time to restore the random state. Data is read with random numbers of its own
    and changes no others. `say` gets sentences for people.
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self.say = say if say is not None else _say
        self.on_resumed: Callable[[], None] | None = None
        self._seed: int | None = None
        self._num_calls = 0
        self._calls: list[BatchCall] = []  # under way, or ended since the last one began
        self._ended: list[_Ended] = []
        self._expected: list[Record] = []  # of the restored run, in their order
        self._own: dict[str, Any] = {}

    # --- the checkpoint ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """After the last update: what was yielded since counts as not taken. JSON values and CPU
        tensors, alike on all ranks but for `own`, which is a `PerRank`."""
        self._sweep()
        # A restored call that has not come up again yet is where it was.
        found = [(record, self._own.get(str(record.number))) for record in self._expected]
        found += [(ended.record, ended.own) for ended in self._ended]
        found += [(call.record(), call.own_state()) for call in self._calls]
        found.sort(key=lambda call: call[0].number)
        return {
            "seed": self._seed,
            "num_calls": self._num_calls,
            "calls": [_plain(record) for record, _ in found],
            "own": PerRank({str(r.number): own for r, own in found if own is not None}),
        }

    def _sweep(self) -> None:
        """Of calls that ended, keep what a checkpoint holds: nothing of those within others, which
        yield only their rest and do not make them again; and how a loader was left, only of the
        last call that read it."""
        for call in self._calls:
            if call.ended is None or call.is_nested:
                continue
            for earlier in self._ended:
                if earlier.loader is call.loader:
                    earlier.forget()
            self._ended.append(_Ended(call.record(), call.own_state(), call.loader))
        self._calls = [call for call in self._calls if call.ended is None]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Before the first `engine.batches()`.

        Raises RuntimeError afterwards, ValueError for what is no such state.
        """
        if self._calls or self._ended:
            raise RuntimeError(
                "data position: engine.batches() has been called already; load before it"
            )
        try:
            records = [Record(**record) for record in state["calls"]]
            self._num_calls = int(state["num_calls"])
            self._seed = None if state["seed"] is None else int(state["seed"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"data position: expected what state_dict() gave; {error}") from error
        own: Any = state.get("own")
        if isinstance(own, PerRank):
            own = own.value
        self._own = dict(own or {})
        self._expected = records

    def begin_epoch_anew(self) -> None:
        """Of every call under way in the restored run: its epoch begins at its first batch again,
        with whatever loader there is now. For data that changed in between."""
        for record in self._expected:
            if record.ended is None:
                record.taken, record.loader, record.sampler = 0, {}, {}
                self._own.pop(str(record.number), None)

    # --- for the loop -----------------------------------------------------------------------------

    def begin(
        self,
        loader: Any,
        epochs: int,
        read_step: Callable[[], int],
        ranks: RankBatches | None = None,
    ) -> BatchCall:
        """The next call of `engine.batches()`. `read_step` counts updates.

        Raises ValueError or TypeError where it cannot go on as the checkpoint says.
        """
        if self._seed is None:
            self._seed = torch.initial_seed() & (2**63 - 1) if ranks is None else ranks.seed
        record = self._expected.pop(0) if self._expected else None
        if record is None:
            number, self._num_calls = self._num_calls, self._num_calls + 1
        else:
            number = record.number
        self._sweep()
        is_nested = bool(self._calls)
        call = BatchCall(self, number, is_nested, loader, epochs, read_step, ranks)
        if record is None:
            call.open()
        else:
            is_last = all(later.is_nested for later in self._expected)
            call.go_on(record, self._own.pop(str(number), None), is_last=is_last)
        self._calls.append(call)
        return call

    @property
    def seed(self) -> int:
        """Of everything that is drawn for data."""
        assert self._seed is not None
        return self._seed

    def resumed(self) -> None:
        """Before the first new batch: what was restored but for the data is set now."""
        tell, self.on_resumed = self.on_resumed, None
        if tell is not None:
            tell()


@dataclass
class _Ended:
    record: Record
    own: dict[str, Any] | None
    loader: Any

    def forget(self) -> None:
        self.record.sampler, self.own, self.loader = {}, None, None


def _plain(record: Record) -> dict[str, Any]:
    return {f.name: getattr(record, f.name) for f in fields(record)}


def _say(text: str) -> None:
    print(f"tradewind: {text}", file=sys.stderr, flush=True)
