"""One call of `engine.batches()` in a run that can go on from checkpoints: which of its batches
were trained on, and how it is entered again in the middle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch.utils.data import DataLoader

from tradewind.engine.batch_sources import (
    Cut,
    IndexSource,
    ListSource,
    ReplaySource,
    Source,
    StatefulSource,
    leave_at,
    num_left,
    own_state_of,
)
from tradewind.engine.random_stream import seed_of
from tradewind.engine.rank_batches import RankBatches, has_indices
from tradewind.engine.sampler_state import load_sampler_state, sampler_state


class PositionOfRun(Protocol):
    """What calls ask of the DataPosition that they belong to."""

    say: Callable[[str], None]

    @property
    def seed(self) -> int: ...

    def resumed(self) -> None: ...


@dataclass(frozen=True)
class Spot:
    """Where a batch stands: `taken` batches of `epoch`, counted over all ranks, end with its round;
    `sampler` is the sampler's state at the epoch's beginning, `place` this rank's in the loader."""

    epoch: int = 0
    taken: int = 0
    sampler: dict[str, Any] = field(default_factory=dict)
    place: Any = None


@dataclass
class Record:
    """One call, as checkpoints hold it. `ended`: "end", "left" (by `break` or an error) or None."""

    number: int
    is_nested: bool
    ended: str | None
    num_updates: int
    epoch: int
    taken: int
    size: int  # world size
    shards_itself: bool | None
    loader: dict[str, Any]
    sampler: dict[str, Any]


class BatchCall:
    """One call of `engine.batches()`: reads its batches and knows which of them were trained on."""

    def __init__(
        self,
        position: PositionOfRun,
        number: int,
        is_nested: bool,
        loader: Any,
        epochs: int,
        read_step: Callable[[], int],
        ranks: RankBatches | None,
    ) -> None:
        self.number = number
        self.loader = loader
        self.epochs = epochs
        self.ended: str | None = None
        self.is_skipped = False
        self.is_restored = False
        self._position = position
        self.is_nested = is_nested
        self._ranks = ranks
        self._read_step = read_step
        self.cut = ranks.cut() if ranks is not None else Cut()
        self._source: Source | None = None
        self._facts: dict[str, Any] = {}
        self._is_repeated = False
        self._first_epoch = 0
        self._own: dict[str, Any] | None = None
        self._trained = Spot()  # as of the last update
        self._given: tuple[Spot, int] | None = None  # the last one yielded, and the step it met
        self._num_updates = 0

    # --- beginning --------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin to read at the first batch."""
        self._source = self._choose()
        self._facts = self._source.facts()

    def _choose(self) -> Source:
        loader, ranks = self.loader, self._ranks
        seed = seed_of(self._position.seed, "call", self.number)
        knows_itself = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        divides_by_index = has_indices(loader) and not self.cut.shards_itself
        # A DataLoader's own __iter__ may give anything; where ranks divide it, its sampler counts.
        is_plain = has_indices(loader) and type(loader).__iter__ is DataLoader.__iter__
        if knows_itself and (ranks is None or not divides_by_index):
            source: Source = StatefulSource(loader, seed)
        elif isinstance(loader, Sequence):
            return ListSource(loader, seed)
        elif is_plain or (ranks is not None and has_indices(loader)):
            check = ranks.check_order if ranks is not None and divides_by_index else None
            if not loader.in_order and loader.num_workers > 0:
                self._position.say(
                    "loader: in_order=False gives batches in an order that cannot be had again; "
                    "with checkpoints they come in order"
                )
            return IndexSource(loader, seed, order_seed=seed, check=check)
        else:
            source = ReplaySource(loader, seed)
            if isinstance(loader, Iterator):
                self._position.say(
                    f"{self._name}: a {type(loader).__name__} cannot be read again from its "
                    "beginning, so that no checkpoint made during it can be gone on from"
                )
        return ranks.decide(source, self.cut) if ranks is not None else source

    def go_on(self, record: Record, own: dict[str, Any] | None, *, is_last: bool) -> None:
        """From where the restored run was."""
        if record.ended is not None and record.num_updates == 0:
            self._is_repeated = True  # an evaluation
            self.open()
            return
        self._num_updates = record.num_updates
        self._trained = Spot(record.epoch, record.taken, record.sampler)
        self.is_restored = True
        if record.ended is not None and (not is_last or record.epoch >= self.epochs):
            self.is_skipped = True
            self.ended, self._facts = record.ended, record.loader
            load_sampler_state(self.loader, record.sampler)
            if own is not None:
                self._own = own
                leave_at(self.loader, own)
            self._position.say(
                f"{self._name}: all of it was trained on before the checkpoint was made; nothing "
                "is left to do here"
            )
            return
        self.open()
        try:
            self._enter(record, own)
        except BaseException:
            self._reading.close()
            raise

    def _enter(self, record: Record, own: dict[str, Any] | None) -> None:
        source = self._reading
        self._check_loader(record)
        self._first_epoch = record.epoch
        self._set_begin(record)
        if isinstance(source, StatefulSource) and (record.taken or own is not None):
            if own is None or record.size != self.cut.size:
                raise ValueError(
                    f"{self._name}: this loader keeps its own place, which was saved by "
                    f"{record.size} rank(s) and cannot be divided among {self.cut.size}; go on "
                    f"with {record.size}, or {self._way_out}"
                )
            source.resume(own)
            self._own = own
        if record.taken and source.reads_from_start:
            self._check_replay(record)
        load_sampler_state(self.loader, record.sampler)

    def _set_begin(self, record: Record) -> None:
        cut = self.cut
        if record.size == cut.size and record.shards_itself is not None:
            cut.shards_itself = record.shards_itself
            self._reading.on_first = None
        cut.begin = record.taken
        if cut.shards_itself and record.taken % cut.size:
            self._position.say(
                f"{self._name}: {record.taken} batches of this epoch were taken by {record.size} "
                f"rank(s), which is no multiple of the {cut.size} there are now, and the loader "
                f"shards itself: {record.taken % cut.size} of them are taken again"
            )

    def _check_loader(self, record: Record) -> None:
        now = self._facts
        for key, before in record.loader.items():
            if key == "batches" and record.size != self.cut.size and self.cut.shards_itself:
                continue  # each rank's own number
            if key in now and now[key] != before:
                raise ValueError(
                    f"{self._name}: the checkpoint was made with {key} {before!r}, and now it is "
                    f"{now[key]!r}, so that its place in the data cannot be found; restore it, or "
                    f"{self._way_out}"
                )

    def _check_replay(self, record: Record) -> None:
        if isinstance(self.loader, Iterator):
            raise TypeError(
                f"{self._name}: a {type(self.loader).__name__} cannot be read again from its "
                "beginning to where the checkpoint was made; pass something that can be iterated "
                f"again, or that has state_dict and load_state_dict, or {self._way_out}"
            )
        self._position.say(
            f"{self._name}: a {type(self.loader).__name__} cannot be entered in the middle: "
            f"{record.taken} batches of epoch {record.epoch} are read and dropped"
        )

    @property
    def _name(self) -> str:
        return f"engine.batches (call {self.number + 1})"

    _way_out = "begin its epoch anew with engine.data_position.begin_epoch_anew()"

    # --- reading ----------------------------------------------------------------------------------

    @property
    def _reading(self) -> Source:
        assert self._source is not None
        return self._source

    @property
    def num_left(self) -> int | None:
        """This rank's batches to come, where that is known."""
        if self.is_skipped:
            return 0
        return num_left(self._reading, self.cut, self._first_epoch, self.epochs)

    @property
    def num_taken(self) -> int:
        """This rank's batches that were trained on before, as far as they can be told."""
        if self._source is None:
            return 0
        epoch, taken, each = self._trained.epoch, self._trained.taken, self._source.num_batches or 0
        if self.cut.shards_itself:
            return epoch * each + taken // self.cut.size
        return (epoch * each + taken) // self.cut.size

    def read(self, set_epoch: Callable[[int], None]) -> Iterator[tuple[Any, Spot]]:
        """This rank's batches, and where each one stands."""
        if self.is_skipped:
            return
        source, cut = self._reading, self.cut
        for epoch in range(self._first_epoch, self.epochs):
            set_epoch(epoch)
            begun = sampler_state(self.loader)
            for index, batch in source.read(epoch, cut):
                yield batch, Spot(epoch, cut.taken(index), begun, source.place())
            assert source.num_batches is not None
            cut.end_epoch(source.num_batches)

    def yielding(self, spot: Spot) -> None:
        """This batch is given to the training loop now."""
        self._settle()
        self._given = spot, self._read_step()
        if not self._is_repeated:
            self._position.resumed()

    def finished(self) -> None:
        """The restored run had come to the end of this call."""
        self._position.say(f"{self._name}: the checkpoint was made at its end; nothing is left")
        self.end("end")

    def end(self, how: str) -> None:
        """No more batches: "end", or "left"."""
        self._settle()
        self.ended = how
        self._reading.close()
        if how == "end":
            self._trained = Spot(self.epochs, 0, sampler_state(self.loader), self._reading.place())
            self._given = None

    def _settle(self) -> None:
        if self._given is None:
            return
        spot, step = self._given
        now = self._read_step()
        if now > step:
            self._trained, self._given = spot, None
            self._num_updates += now - step

    # --- the checkpoint ---------------------------------------------------------------------------

    def record(self) -> Record:
        self._settle()
        spot = self._trained
        return Record(
            number=self.number,
            is_nested=self.is_nested,
            ended=self.ended,
            num_updates=self._num_updates,
            epoch=spot.epoch,
            taken=spot.taken,
            size=self.cut.size,
            shards_itself=self.cut.shards_itself,
            loader=self._facts,
            sampler=spot.sampler,
        )

    def own_state(self) -> dict[str, Any] | None:
        """This rank's place in a loader that knows its own."""
        self._settle()
        return own_state_of(self._trained.place) or self._own
