"""An Engine's checkpoints: when one is due, what may be written, what is done at a notice, and what
the run's record says of it. One thread, the step's; the Checkpointer's own writes.

Ranks decide alike without a word more than rounds of gradients carry: updates count on every rank;
what one rank alone knows (that time is up, that its machine goes) is a wish that travels with its
next round, and that every rank acts on at the boundary after all have heard it."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from statistics import median
from typing import TYPE_CHECKING, Any, NoReturn

from tradewind._core import native
from tradewind.checkpoint.checkpointer import Checkpointer
from tradewind.checkpoint.errors import CheckpointError
from tradewind.checkpoint.interval import Interval
from tradewind.checkpoint.last_save import plan_last_save
from tradewind.checkpoint.notices import SIGNALS, Notice, Notices
from tradewind.checkpoint.options import Checkpoint
from tradewind.checkpoint.save import Save
from tradewind.engine import saved_state
from tradewind.engine.data_position import DataPosition
from tradewind.engine.resume import Resume, go_on
from tradewind.engine.schedulers import untracked_schedulers
from tradewind.place import place
from tradewind.share.options import Share

if TYPE_CHECKING:
    from tradewind.engine.engine import Engine

EXIT_CODE = 75  # "resume me"
# Wishes: a bit each, of any rank.
_SAVE, _STOP, _DROP = 1, 2, 4
# An error of training does not wait longer than this for a save that is under way.
PATIENCE_AT_ERROR = timedelta(seconds=30)
# Where the machine may go at any time, one in two notices is expected to lead to a save.
_SPOT_NOTICE = 0.5
_NUM_REMEMBERED = 64


class Checkpointing:
    """Of one Engine, from after its model was adopted until it is closed."""

    def __init__(
        self,
        engine: Engine,
        options: Checkpoint,
        path: str,
        resume: Resume,
        config: Mapping[str, Any],
        share: Share | None,
    ) -> None:
        self._engine = engine
        self._options = options
        self._config = saved_state.describe(config)
        self._told: deque[tuple[str, str]] = deque()  # by the writing thread, for this one
        self._warned: set[str] = set()
        self._begun_s = time.monotonic()
        listens = options.notices != "off"
        self._interval = Interval(
            options.schedule,
            options.prior_mtbf(place().num_nodes),
            notice_probability=_SPOT_NOTICE if options.spot and listens else 0.0,
        )
        self._save: Save | None = None  # the newest one, until its end was noted
        self._last_step = -1  # of the newest one
        self._stalls_s: deque[float] = deque(maxlen=_NUM_REMEMBERED)
        self._durables_s: deque[float] = deque(maxlen=_NUM_REMEMBERED)
        self._num_saved = self._num_failed = 0
        self._error: str | None = None
        self.retake_options: Callable[[], None] | None = None  # after a resume
        self._is_scheduler_checked = False
        self._held_s = 0.0  # by the newest save, of the step's thread
        self._granted = 0  # wishes that the next boundary fulfils, since this update
        self._granted_step = 0
        self._deaf_until = -1  # wishes of rounds before this step were granted
        self._notice: Notice | None = None
        if engine._sharing is not None:  # names with the time in them differ
            path = engine._sharing.tell_all("checkpoint path", path)[0]
        self._checkpointer = Checkpointer(
            path,
            options.keep,
            options.keep_every,
            process_group=share.process_group if share is not None else None,
            deadline=options.timeout,
            host_memory=options.host_memory,
            peers=options.peers,
            local=options.local,
            store_options=options.store_options,
            on_event=self._note,
        )
        self.position = DataPosition()
        try:
            self.resumed_step = go_on(self, engine, self._checkpointer, resume, self._config)
            self._tell_events()
        except BaseException:
            self._checkpointer.close()
            raise
        self._interval.begin(engine.num_steps, time.monotonic())
        self._last_step = engine.num_steps if self.resumed_step is not None else -1
        self._committed_step = self._last_step  # known by all ranks alike
        engine._adopted.before_writing = self.drain
        if engine._sharing is not None:
            engine._sharing.before_writing = self.drain
        self._notices: Notices | None = None
        if listens:
            services: Any = "auto" if options.notices == "auto" else ()
            grace_s = options.grace.total_seconds()
            self._notices = Notices(SIGNALS, signal_grace_s=grace_s, services=services)

    # --- around an update -------------------------------------------------------------------------

    def before_update(self) -> None:
        """Just before the Engine writes parameters and state: others' edits end here."""
        if self.resumed_step is not None:
            self._check_schedulers()
        save = self._save
        if save is None or save.is_done:
            return
        save.check_edits()
        save.hold_stream()
        sharing = self._engine._sharing
        if sharing is not None and sharing.sharded is not None:
            # Parts of other ranks are not swept, but copied into place by the exchange.
            self._await(self._engine._adopted.arena.memory_ranges())

    def drain(self) -> None:
        """Return once memory may be written by others than sweeps."""
        save = self._save
        if save is not None and not save.is_done:
            save.check_edits()
            save.hold_stream()
            self._await(saved_state.in_place(self._engine))

    def _await(self, ranges: saved_state.Ranges) -> None:
        timeout_s = self._options.timeout.total_seconds()
        for address, size_bytes in ranges:
            native.wait_for_gate(address, size_bytes, timeout_s)

    def after_update(self) -> None:
        """Decide what is done at the boundary that follows, on all ranks or on none."""
        engine = self._engine
        now_s = time.monotonic()
        self._interval.observe_uptime(now_s - self._begun_s)
        wishes = self._heard() if engine._sharing is not None else self._wish(0)
        if wishes & _SAVE:
            self._interval.begin(engine.num_steps, now_s)
            self._deaf_until = engine.num_steps + 1
        if wishes:
            self._granted |= wishes
            self._granted_step = engine.num_steps
        if engine._sharing is not None:
            engine._sharing.set_wishes(self._wish(2))

    @property
    def is_overdue(self) -> bool:
        """Whether a boundary was missed, by a loop that was left and is still held open."""
        return self._granted > 0 and self._engine.num_steps > self._granted_step

    def boundary(self) -> None:
        """Between two updates, once the training loop is done with the one before, schedules and
        averages included: save where that is due; at a notice raise SystemExit."""
        self._follow()
        self._tell_events()
        granted, self._granted = self._granted, 0
        if self._engine._sharing is None:  # nobody has to be told first
            granted |= self._noticed(0)
        if granted & _STOP:
            self._end(saves=not granted & _DROP)
        if granted & _SAVE:
            self._begin()

    def _heard(self) -> int:
        """What all ranks know that one of them wishes, and what all know anyway."""
        engine, sharing = self._engine, self._engine._sharing
        assert sharing is not None
        if not sharing.is_boundary:
            return 0
        wishes = sharing.wishes
        if engine.num_steps <= self._deaf_until and not sharing.decides_at_once:
            wishes &= ~_SAVE  # the round began before the save did
        if self._counts_steps and not sharing.decides_at_once:
            wishes |= _SAVE if self._interval.is_due(engine.num_steps, time.monotonic()) else 0
        return wishes

    def _wish(self, num_ahead: int) -> int:
        """What this rank wishes; where ranks share, for a boundary `num_ahead` updates on."""
        engine = self._engine
        wishes = 0
        if engine.rank == 0 and not (num_ahead and self._follows_count):
            step = engine.num_steps + int(num_ahead > 0)
            if self._interval.is_due(step, time.monotonic()):
                wishes |= _SAVE
        return wishes | (self._noticed(num_ahead) if num_ahead else 0)

    def _noticed(self, num_ahead: int) -> int:
        """What a notice to this rank makes it wish."""
        notice = self._notices.notice() if self._notices is not None else None
        if notice is None:
            return 0
        if notice.is_soft:
            assert self._notices is not None
            self._notices.acknowledge_soft()
            return _SAVE
        self._notice = notice
        return _STOP | (0 if self._can_save_until(notice, num_ahead) else _DROP)

    @property
    def _counts_steps(self) -> bool:
        return self._interval.every.kind == "steps"

    @property
    def _follows_count(self) -> bool:
        """Whether every rank finds by itself when a save is due."""
        sharing = self._engine._sharing
        return self._counts_steps and (sharing is None or not sharing.decides_at_once)

    # --- one save ---------------------------------------------------------------------------------

    def save(self) -> Save:
        """Save now, at the user's wish. Raises what `Checkpointer.save` does."""
        self._follow()
        return self._save_state()

    def _begin(self) -> None:
        try:
            self._save_state()
        except (CheckpointError, OSError, RuntimeError) as error:
            self._failed(error)

    def _save_state(self, *, on_notice: bool = False, is_finished: bool = False) -> Save:
        engine = self._engine
        began_s = time.perf_counter()
        if engine._num_microbatches:
            raise RuntimeError(
                f"save: {engine._num_microbatches} of {engine.accumulate} microbatches wait for "
                "their update, and would be lost; save after the update, or call engine.flush()"
            )
        self._check_schedulers()
        self._await_last()
        engine.settle()
        engine._take_numbers()
        self._interval.begin(engine.num_steps, time.monotonic())
        self._last_step = engine.num_steps
        state = saved_state.collect(
            engine,
            {
                "config": self._config,
                "interval": {**self._interval.state_dict(), "on_notice": on_notice},
                "saved_at_s": time.time(),
                "is_finished": is_finished,
                "data": self.position.state_dict(),
            },
        )
        self._save = self._checkpointer.save(
            state,
            step=engine.num_steps,
            in_place=saved_state.in_place(engine),
            facts={"config": self._config, "is_finished": is_finished},
            paranoid=self._options.paranoid,
            holds_stream=False,  # before_update() does, so that forward and backward go on
        )
        self._held_s = time.perf_counter() - began_s
        return self._save

    def _await_last(self) -> None:
        """Two saves do not run at a time: one that is due before the other ends waits for it."""
        if self._save is not None:
            with contextlib.suppress(CheckpointError, OSError, TimeoutError):
                self._save.wait(2 * self._options.timeout.total_seconds())
            self._follow()

    def _follow(self) -> None:
        """Note how the newest save ended, if it has."""
        save = self._save
        if save is None or not save.is_done:
            return
        self._save = None
        if save.error is not None:
            self._failed(save.error, save.step)
            return
        self._committed_step = save.step
        stall_s = self._held_s + save.waited_s
        self._num_saved += 1
        self._stalls_s.append(stall_s)
        self._durables_s.append(save.durable_s)
        self._interval.saved(save.step, time.monotonic(), stall_s, save.durable_s)
        self._log(
            save.step,
            checkpoint_stall_s=stall_s,
            checkpoint_durable_s=save.durable_s,
            checkpoint_MB=(save.in_place_bytes + save.copied_bytes) / 1e6,
        )

    def _failed(self, error: BaseException, step: int | None = None) -> None:
        """An event: said once for each kind of error, and the next save is tried as if nothing had
        been."""
        step = self._engine.num_steps if step is None else step
        self._num_failed += 1
        self._error = f"{type(error).__name__}: {error}"
        self._interval.failed(step, time.monotonic())
        self._log(step, checkpoint_failed=1, checkpoint_error=self._error)
        kind = type(error).__name__ + str(getattr(error, "errno", ""))
        if kind not in self._warned:
            self._warned.add(kind)
            reason = str(error).removeprefix(f"checkpoint of step {step}: ")
            warnings.warn(
                f"checkpoint of step {step} failed: {reason}; {self._what_now()}",
                RuntimeWarning,
                stacklevel=5,
            )

    def _what_now(self) -> str:
        if self._engine._closed:
            return self._newest()
        after = f"after {self._interval.every}"
        if not self._counts_steps:
            after = f"in {self._interval.interval_s:.0f} s"
        return (
            f"training goes on, and the next one is tried {after} (said once; "
            "engine.stats()['checkpoint'] counts)"
        )

    def _log(self, step: int, **values: Any) -> None:
        run = self._engine.run
        if run is not None and not run.is_closed:
            newest = run.step
            run.log(step, values)
            run.step = max(newest, run.step)

    def _note(self, kind: str, text: str) -> None:
        """From the checkpointer, on any thread."""
        if kind != "save-failed":  # its handle says so
            self._told.append((kind, text))

    def _tell_events(self) -> None:
        while self._told:
            kind, text = self._told.popleft()
            self._log(self._engine.num_steps, checkpoint_event=text)
            if kind == "passed-over" or kind not in self._warned:
                self._warned.add(kind)
                warnings.warn(text, RuntimeWarning, stacklevel=5)

    # --- a notice ---------------------------------------------------------------------------------

    def _can_save_until(self, notice: Notice, num_ahead: int) -> bool:
        """Whether a save that begins `num_ahead` updates from now would be done in time."""
        if notice.deadline_s is None:
            return True
        durable_s = median(self._durables_s) if self._durables_s else 0.0
        begins_s = time.monotonic() + num_ahead * self._engine._step_s
        plan = plan_last_save(0, None, durable_s, notice.deadline_s, begins_s)
        return plan.reach != "skip"

    def _end(self, *, saves: bool) -> NoReturn:
        """The last save, then the end of this process, "resume me"."""
        engine = self._engine
        what = self._notice.kind if self._notice is not None else "a notice to another rank"
        text = f"{what}: "
        try:
            if not saves:
                text += f"no save can be done in time; {self._newest()}"
            elif self._last_save(on_notice=True):
                text += f"step {engine.num_steps} is saved in {self._where()}"
            else:
                text += f"the last save failed ({self._error}); {self._newest()}"
        finally:
            text += f"; resume me (exit code {EXIT_CODE})"
            if engine.rank == 0:
                print(f"tradewind: {text}", file=sys.stderr, flush=True)
            engine._stop(text)
        raise SystemExit(EXIT_CODE)

    def _last_save(self, *, on_notice: bool = False, is_finished: bool = False) -> bool:
        """Save the present step, unless it is saved, and wait for it. Whether it is durable."""
        engine = self._engine
        step = engine.num_steps
        try:
            if self._save is None or self._save.step != step:
                if self._committed_step == step:
                    return True
                self._save_state(on_notice=on_notice, is_finished=is_finished)
            assert self._save is not None
            self._save.wait(self._last_timeout_s())
        except (CheckpointError, OSError, RuntimeError) as error:  # TimeoutError is an OSError
            if self._save is None or not self._save.is_done:
                self._failed(error)
        self._follow()
        return self._committed_step == step

    def _last_timeout_s(self) -> float:
        timeout_s = self._options.timeout.total_seconds()
        if self._notice is None or self._notice.deadline_s is None:
            return timeout_s
        return max(0.1, min(timeout_s, self._notice.deadline_s - time.monotonic()))

    def _where(self) -> str:
        durable = self._checkpointer.last_durable
        is_new = self._committed_step != self.resumed_step
        if is_new and (durable is None or durable[0] != self._committed_step):
            return f"the local directory alone, as the way to {self._checkpointer.path} is too long"
        return self._checkpointer.path

    def _newest(self) -> str:
        durable = self._checkpointer.last_durable
        if durable is not None:
            return f"the newest checkpoint is of step {durable[0]}"
        if self.resumed_step is not None:
            return f"the newest checkpoint is of step {self.resumed_step}"
        return "there is no checkpoint"

    # --- schedules ------------------------------------------------------------------------------

    def tracked(self, value: Any) -> None:
        """`value` was filled by `engine.track` after a resume: a scheduler that was made since has
        put its first values into the options."""
        is_ours = getattr(value, "optimizer", None) is self._engine.optimizer
        is_fresh = self._engine.num_steps == self.resumed_step
        if is_ours and is_fresh and self.retake_options is not None:
            self.retake_options()

    def _check_schedulers(self) -> None:
        """Warn, once, of schedulers that are not tracked: after a resume they begin anew."""
        if self._is_scheduler_checked:
            return
        self._is_scheduler_checked = True
        found = untracked_schedulers(self._engine.optimizer, self._engine._tracked.values())
        if found:
            again = (
                "this run goes on from a checkpoint, and they began anew with their first lr"
                if self.resumed_step is not None
                else "they will begin anew when the run is resumed"
            )
            warnings.warn(
                f"checkpoint: the optimizer's schedulers {', '.join(found)} are not tracked: "
                f"{again}; call engine.track(scheduler=...) right after making one",
                RuntimeWarning,
                stacklevel=5,
            )

    # --- what is told -----------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """As `Engine.stats` has it under `checkpoint`."""
        self._follow()
        durable = self._checkpointer.last_durable
        known = self._interval.describe()
        return {
            "step": durable[0] if durable is not None else self.resumed_step,
            "age_s": durable[1] if durable is not None else None,
            "num_saved": self._num_saved,
            "num_failed": self._num_failed,
            "error": self._error,
            "stall_s": median(self._stalls_s) if self._stalls_s else None,
            "durable_s": median(self._durables_s) if self._durables_s else None,
            "every": known["every"],
            "interval_s": known["interval_s"],
            "mtbf_s": known["mtbf_s"],
            "is_saving": self._save is not None,
            "path": self._checkpointer.path,
        }

    # --- the end ----------------------------------------------------------------------------------

    def finish(self) -> None:
        """The run ends as it should: its last update is saved, if it was not."""
        engine = self._engine
        self._follow()
        is_behind = engine.num_steps > max(self._last_step, 0) and not engine._num_microbatches
        if engine._sharing is not None:
            is_behind = engine._sharing.any_rank(is_behind)
        if is_behind:
            self._last_save(is_finished=True)
        elif self._save is not None:
            with contextlib.suppress(CheckpointError, OSError, TimeoutError):
                self._save.wait(self._options.timeout.total_seconds())
            self._follow()
        self._tell_events()

    def close(self, *, patience: timedelta | None = None) -> None:
        """Let go. A save under way is waited for, at most `patience`."""
        if self._notices is not None:
            self._notices.close()
        self._engine._adopted.before_writing = _nothing
        if self._engine._sharing is not None:
            self._engine._sharing.before_writing = _nothing
        timeout = patience if patience is not None else self._options.timeout
        self._checkpointer.close(timeout.total_seconds())
        if os.getpid() == self._checkpointer._owner_pid:
            self._follow()


def _nothing() -> None: ...
