"""How an Engine shares its gradients: the process group, the agreement of ranks, when buckets are
settled, and which overlap is the faster."""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tradewind._core import native
from tradewind.engine.draining import drain_before_state, drain_on_parameters, forget
from tradewind.engine.late_update import LateUpdate, PendingUpdate
from tradewind.engine.rank_batches import RankBatches
from tradewind.engine.readers import ReaderRecord
from tradewind.engine.sharded import ShardedOptimizer, ShardedUpdate, check_shardable
from tradewind.optim.cuda import DeviceTables
from tradewind.optim.device_outcome import DeviceOutcome
from tradewind.optim.fused import FusedOptimizer, Orders, Outcome
from tradewind.place import place
from tradewind.share.collective import calls_alone, device_of, resolve
from tradewind.share.departure import reason
from tradewind.share.options import Share
from tradewind.share.rendezvous import Meeting, meet
from tradewind.share.rounds import (
    describe,
    feedback_of,
    load_feedback,
    make_rounds,
    statistics_of,
)
from tradewind.share.value_broadcast import ValueBroadcast

Named = Sequence[tuple[str, torch.nn.Parameter]]

_RECORDED_FORWARDS = 2
_TRIAL_STEPS = 6  # of each overlap; the first ones warm up


def join_ranks(share: Share | None) -> Meeting | None:
    """The ranks to share with; None where this process trains alone.

    Starts torch.distributed (Gloo) where torchrun started this process and nobody else did.
    """
    here = place()
    if share is None:
        if here.world_size > 1:
            raise ValueError(
                f"Engine over {here.world_size} processes: each would train alone; pass "
                "share=tw.Share(), or start one process"
            )
        return None
    if not isinstance(share, Share):
        raise TypeError(f"share: expected a tw.Share, got {type(share).__name__}")
    if here.world_size > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    meeting = meet(share.process_group, share.timeout)
    return meeting if meeting.size > 1 or calls_alone() else None


class Sharing:
    """What an Engine with more than one rank has. Made before the model is adopted."""

    def __init__(
        self,
        meeting: Meeting,
        share: Share,
        named: Named,
        model: torch.nn.Module,
        optimizer: FusedOptimizer,
        config: Any,
    ) -> None:
        if share.strategy == "sharded":
            check_shardable(optimizer)
        device = device_of(named)
        self._meeting = meeting
        self._share = resolve(share, device)
        self._model = model
        facts = describe(named, share, model.named_buffers())
        meeting.check_agreement({**facts, "engine": config})
        broadcast = ValueBroadcast(meeting, device)
        states = [value.detach() for value in (*(p for _, p in named), *model.buffers())]
        broadcast("parameters and buffers", states)
        self._late: PendingUpdate | None = None
        self.sharded: ShardedOptimizer | None = None
        self._waited_s = 0.0
        self._clip_waited_s = self._clip_recorded_s = 0.0
        # A bit for each wish of any rank, the same on all: of the round before the newest one.
        self.wishes = 0
        # Before others than sweeps write parameters.
        self.before_writing: Callable[[], None] = _nothing

    # Whether all ranks stand at one boundary after an update, and whether `wishes` are then those
    # of the round that has just ended.
    is_boundary = True
    decides_at_once = False

    def attach(
        self,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        optimizer: FusedOptimizer,
        *,
        sums: bool,
    ) -> None:
        """Once the parameters lie where they stay."""
        self._parameters = list(parameters)
        self._optimizer = optimizer
        self._sums = sums
        self.shared = make_rounds(
            self._meeting,
            list(zip(names, parameters, strict=True)),
            self._share,
            sums_microbatches=sums,
            measures=True,
            shards_update=self._share.strategy == "sharded",
            buffers=[buffer.detach() for buffer in self._model.buffers()],
        )
        if self._share.strategy == "sharded":
            self.sharded = ShardedOptimizer(optimizer, parameters, self._messages, self._meeting)
        optimizer.hook_gradients("shared")
        self._table: Any = None
        overlap = "backward" if self._share.codec == "powersgd" else self._share.overlap
        self._schedule = _Schedule(self, overlap)

    @property
    def _messages(self) -> native.SharedGradients:
        """What shares, where that is by messages between ranks: on the CPU."""
        assert isinstance(self.shared, native.SharedGradients)
        return self.shared

    @property
    def _collectives(self) -> native.CollectiveGradients:
        assert isinstance(self.shared, native.CollectiveGradients)
        return self.shared

    @property
    def rank(self) -> int:
        return self._meeting.rank

    @property
    def size(self) -> int:
        return self._meeting.size

    @property
    def shards_state(self) -> bool:
        return self._share.strategy == "sharded"

    @property
    def shares_gradients(self) -> bool:
        """Whether every backward's gradients travel."""
        return True

    def updated(self, *, has_next: bool) -> None:
        """After every update of this rank."""

    # --- forward and backward ---------------------------------------------------------------------

    def before_forward(self) -> None:
        self._meeting.check_usable()
        self.shared.take_buffers()
        self.shared.tell("forward")

    def before_backward(self, *, syncs: bool) -> None:
        self.settle()
        self.wishes = self.shared.wishes()
        self.shared.set_syncing(syncs)
        self.shared.install_hooks()
        self.shared.tell("backward")

    def after_backward(self, *, syncs: bool, has_next: bool) -> None:
        if syncs:
            self.shared.finish_backward(has_next)
        else:
            self.shared.end_microbatch()

    def backward_failed(self, error: BaseException) -> None:
        """The other ranks learn why within moments, instead of waiting."""
        self.shared.abandon(reason(self.rank, error, "backward"))

    def failed(self, error: BaseException, where: str) -> None:
        """This rank will not go on, and the others cannot without it."""
        if os.getpid() != self._meeting.pid:
            return
        self.shared.fail(reason(self.rank, error, where))
        if self._late is not None and self._late.is_torn:
            warnings.warn(
                f"sharing ended in the middle of an update: {self._late.progress}; the parameters "
                "are neither those before it nor those after, load a checkpoint",
                RuntimeWarning,
                stacklevel=3,
            )

    def flush(self, multiplier: float, *, has_next: bool) -> None:
        """Share microbatches whose last one did not know that it was the last."""
        self.settle()
        self.shared.set_syncing(True)
        if multiplier != 1.0:
            self.shared.scale(multiplier)
        self.shared.finish_backward(has_next)

    def batches_of(self, loader: Any) -> RankBatches:
        return RankBatches(loader, self._meeting)

    def others_go_on(self) -> bool:
        """After a round: whether some rank takes part in another one."""
        self.settle()
        return int(self.shared.num_contributors_next()) > 0

    def shadow_round(self) -> None:
        """A round in which this rank gives nothing, as it has no data left."""
        self.settle()
        self.wishes = self.shared.wishes()
        self.shared.shadow_round(False)

    # --- the update -------------------------------------------------------------------------------

    def update(self, orders: Orders, on_end: Any) -> Outcome | None:
        """Begin a late update, or, where this round is settled at once, return None once `.grad`
        holds the means and their measures are known."""
        table = self._optimizer.native_table
        if table is not self._table:
            self._bind(table)
        self.shared.tell("step")
        if self.sharded is not None:
            return self._update_shards(self.sharded, orders, on_end)
        if self._schedule.is_late():
            late = LateUpdate(
                self._messages,
                self._optimizer.defer(orders),
                self._table_indices,
                self._give_measures,
                on_end,
            )
            self._late = late
            late.need(self._schedule.buckets_of_nobody)
            return late.outcome
        self.shared.settle()
        # A codec may have made numbers of what was not finite; every rank decides by what was there
        # before.
        if isinstance(table, DeviceTables):
            orders.found_inf = self._collectives.found_inf()
            return None
        self._give_measures()
        if self.shared.nonfinite():
            orders.found_inf = torch.ones(())
        return None

    def name_nonfinite(self, outcome: Outcome) -> None:
        """Say in `outcome` whose gradients were not finite, where that vetoed the update."""
        if isinstance(outcome, DeviceOutcome):
            # Read a step later, when the device has come so far, if at all.
            facts = self._collectives.nonfinite_facts()
            outcome.find_nonfinite = partial(self._collectives.nonfinite_of, facts)
        elif not outcome.applied:
            outcome.nonfinite = tuple(self.shared.nonfinite())

    def _update_shards(self, sharded: ShardedOptimizer, orders: Orders, on_end: Any) -> Outcome:
        update = ShardedUpdate(
            self._messages, sharded, self._optimizer, orders, self._give_measures, on_end
        )
        self._late = update
        update.decide()  # owners begin
        if self._schedule.is_late():
            update.need(self._schedule.buckets_of_nobody)
        else:
            self.settle()
        return update.outcome

    def _bind(self, table: Any) -> None:
        index_of = {id(p): i for i, p in enumerate(self._optimizer._table_parameters)}
        self._table_indices = [index_of.get(id(p), -1) for p in self._parameters]
        if self._sums or self.sharded is not None:
            means: list[torch.Tensor | None] = [None] * len(index_of)
            for index, table_index in enumerate(self._table_indices):
                if table_index >= 0:
                    means[table_index] = self.shared.mean(index)
            table.take_gradients(means)
        self._table = table

    def _give_measures(self) -> None:
        # After collective calls the table measures the means itself.
        if isinstance(self.shared, native.SharedGradients):
            self.shared.give_measures(self._table, self._table_indices)

    def need(self, buckets: Sequence[int]) -> None:
        if self._late is not None:
            self._late.need(buckets)

    def settle(self) -> None:
        """Return once every update reached the parameters."""
        late = self._late
        if late is None or late.is_finishing:
            return
        late.finish()  # where it raises, it will again: nobody reads half an update unawares
        self._late = None
        self._clip_waited_s += late.clip_waited_s
        late.outcome.over()

    def state_dict(self) -> dict[str, Any]:
        """`feedback`: what a lossy codec of this rank still owes. Between rounds."""
        return self.own_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """After the model's."""
        self.load_own_state(state)

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """What `own_state` gave; with a warning where that was another rank's, or of other ones."""
        if "feedback" in state and self._share.codec != "none":
            load_feedback(self.shared, self._meeting, state["feedback"])

    # --- for checkpoints --------------------------------------------------------------------------

    def own_state(self) -> dict[str, Any]:
        """What each rank has alone, between rounds."""
        if self._share.codec == "none":
            return {}
        return {"feedback": feedback_of(self.shared, self._meeting)}

    def set_wishes(self, wishes: int) -> None:
        """Of this rank, with every round from now on."""
        self.shared.set_wishes(wishes)

    def any_rank(self, value: bool) -> bool:
        """Whether it is true on some rank, where ranks may not know that of each other."""
        return value

    def tell_all(self, topic: str, text: str) -> list[str]:
        """What every rank says, in rank order. All ranks ask in one order."""
        return self._meeting.tell_all(f"{topic}/{self._meeting.count(topic)}", text)

    @property
    def timeout_s(self) -> float:
        return self._share.timeout.total_seconds()

    def described(self) -> dict[str, Any]:
        """How ranks share, for "what changed"."""
        return {**self._share.described(), "world_size": self.size}

    def statistics(self) -> dict[str, float]:
        """As `GradientSharing.statistics`; `hidden`, the part of busy_s that nobody waited for; and
        `clip_waited_s`, what of waited_s late updates spent on the norm to clip by."""
        found = statistics_of(self.shared)
        busy = found["busy_s"]
        hidden = max(0.0, 1.0 - found["waited_s"] / busy) if busy > 0 else math.nan
        return {**found, "hidden": hidden, "clip_waited_s": self._clip_waited_s}

    def waits(self) -> dict[str, float]:
        """For the run's record: seconds that the step's thread waited for other ranks since this
        was asked last, and how many of them late updates spent on the norm to clip by."""
        total, for_norm = self.shared.statistics().waited_s, self._clip_waited_s
        waited, self._waited_s = total - self._waited_s, total
        found = {"share_wait_s": float(waited)}
        if self._optimizer.clip_norm is not None:
            found["clip_wait_s"] = for_norm - self._clip_recorded_s
            self._clip_recorded_s = for_norm
        return found

    def close(self) -> None:
        self._schedule.close()
        self.shared.remove_hooks()


def _nothing() -> None: ...


class _Schedule:
    """When buckets are settled: in `step`, or when the next forward needs them."""

    def __init__(self, sharing: Sharing, overlap: str) -> None:
        self._sharing = sharing
        self._model = sharing._model
        self._record = ReaderRecord(self._model, sharing._parameters)
        self._is_ready = False  # for late updates
        self.buckets_of_nobody: list[int] = []
        self._gates: list[Any] = []
        self._modes: tuple[bool, ...] = ()
        self._trial: _Trial | None = _Trial() if overlap == "auto" else None
        self._handles: list[Any] = []
        if overlap != "backward" and not _is_compiled(self._model):
            model = self._model
            self._handles.append(model.register_forward_pre_hook(self._before, prepend=True))
            self._handles.append(model.register_forward_hook(self._after, always_call=True))
            drain = model.register_state_dict_pre_hook(drain_before_state)  # type: ignore[no-untyped-call]
            self._handles.append(drain)
            drain_on_parameters(model, sharing)

    def is_late(self) -> bool:
        if not self._is_ready:
            return False
        if self._trial is not None:
            return self._trial.is_late()
        return True

    def _before(self, model: torch.nn.Module, _inputs: Any) -> None:
        sharing = self._sharing
        if not self._is_ready:
            if model.training and torch.is_grad_enabled():
                self._record.begin()
            return
        if self._trial is not None and torch.is_grad_enabled():
            self._trial.step_begins()
        # Another path through the model than the recorded ones may read what no gate guards.
        if not torch.is_grad_enabled() or self._modes_now() != self._modes:
            sharing.settle()

    def _after(self, model: torch.nn.Module, _inputs: Any, outputs: Any) -> None:
        if outputs is None and sys.exc_info()[0] is not None:
            return  # the forward failed, and another error now would only be warned of
        if not self._is_ready:
            self._record.end()
            if self._record.num_forwards >= _RECORDED_FORWARDS:
                self._make_gates()
            return
        self._sharing.settle()

    def _modes_now(self) -> tuple[bool, ...]:
        return tuple(module.training for module in self._model.modules())

    def _make_gates(self) -> None:
        shared = self._sharing._messages
        shared.set_forward_order(self._record.order)
        readers = self._record.readers
        needs: dict[torch.nn.Module, set[int]] = {}
        unknown: set[int] = set()
        for index in range(len(self._sharing._parameters)):
            bucket = shared.bucket_of(index)
            if bucket < 0:
                continue
            if index not in readers:
                unknown.add(bucket)
            for module in readers.get(index, ()):
                needs.setdefault(module, set()).add(bucket)
        for module, buckets in needs.items():
            gate = _Gate(self._sharing, sorted(buckets - unknown))
            self._gates.append(module.register_forward_pre_hook(gate, prepend=True))
        self.buckets_of_nobody = sorted(unknown)
        self._modes = self._modes_now()
        self._is_ready = True

    def close(self) -> None:
        for handle in (*self._handles, *self._gates):
            handle.remove()
        forget(self._model)


class _Gate:
    def __init__(self, sharing: Sharing, buckets: Sequence[int]) -> None:
        self._sharing = sharing
        self._buckets = buckets

    def __call__(self, _module: torch.nn.Module, _inputs: Any) -> None:
        self._sharing.need(self._buckets)


class _Trial:
    """Measures steps of either kind, on this rank: which one a rank takes is its own affair."""

    def __init__(self) -> None:
        self._times: dict[bool, list[float]] = {True: [], False: []}
        self._last: float | None = None
        self._num_steps = 0
        self._chosen: bool | None = None

    def is_late(self) -> bool:
        if self._chosen is not None:
            return self._chosen
        return (self._num_steps // _TRIAL_STEPS) % 2 == 0

    def step_begins(self) -> None:
        if self._chosen is not None:
            return
        now = time.perf_counter()
        if self._last is not None:
            place_in_trial = self._num_steps % _TRIAL_STEPS
            if place_in_trial > 1:  # the first ones carry the other kind's remains
                self._times[self.is_late()].append(now - self._last)
            self._num_steps += 1
            if self._num_steps == 2 * _TRIAL_STEPS:
                late, synchronous = (statistics.median(self._times[k]) for k in (True, False))
                self._chosen = late <= synchronous
        self._last = now


def _is_compiled(model: torch.nn.Module) -> bool:
    return any(
        type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
        for module in model.modules()
    )
