"""`tw.GradientSharing`: stands where DistributedDataParallel stood, with any torch optimizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel import distributed as ddp_module

from tradewind._core import native
from tradewind.share.collective import check_device_ids, device_of, resolve
from tradewind.share.departure import reason
from tradewind.share.options import Codec, Overlap, Share, Strategy
from tradewind.share.rendezvous import Meeting, meet
from tradewind.share.rounds import (
    describe,
    feedback_of,
    load_feedback,
    make_rounds,
    statistics_of,
)
from tradewind.share.value_broadcast import ValueBroadcast

# DistributedDataParallel's keywords that change nothing here, and those that are refused.
_REFUSED = {
    "delay_all_reduce_named_params": None,
    "param_to_hook_all_reduce": None,
    "mixed_precision": None,
    "device_mesh": None,
    "skip_all_reduce_unused_params": False,
    "bucket_cap_mb_list": None,
    "batched_grad_copy": False,
}
_tensors_in: Callable[[Any], Iterable[Any]] = ddp_module._find_tensors


class GradientSharing(torch.nn.Module, Joinable):
    """Shares `module`'s gradients between ranks: after backward `.grad` holds the mean over ranks.

    ::

        model = tw.GradientSharing(model)
        loss = F.cross_entropy(model(x), y)
        loss.backward()            # buckets travel while backward runs
        optimizer.step()

    Values differ between ranks at the start: those of rank 0 are broadcast. `.grad` is a view of
    the bucket that travelled, as with DistributedDataParallel(gradient_as_bucket_view=True).
    Parameters that no rank used keep their `.grad`; those that some rank used get the mean
    everywhere, over microbatches under `no_sync()` too. Without an initialized process group, or
    with one rank, nothing travels and the script runs alone. A copy or pickle shares among all
    ranks, which it meets at its first forward that trains.

    Args:
        module: on the CPU or one GPU; its parameters require gradients when this is made, or never.
        process_group: whose ranks share; None: all.
        codec, strategy, overlap, deterministic: see `tw.Share`. "sharded" and "periodic" need an
            Engine. Without an Engine the update cannot wait for the next forward: every overlap is
            "backward".
        timeout: a wait this long ends in `tw.SharingError` on every rank.
        powersgd_rank: see `tw.Share`.
        broadcast_buffers: buffers are rank 0's, from the start and before each forward that trains.
        forward_sync_buffers: the same, but that False leaves them rank 0's at the start.
        ddp: DistributedDataParallel's other keywords. `bucket_cap_mb` is taken;
            `device_ids` may name the module's GPU, to which inputs then move;
            `find_unused_parameters`, `gradient_as_bucket_view`, `static_graph`, `check_reduction`
            and `dim` change nothing; the others are refused by name.

    Raises:
        TypeError, ValueError: an argument, a parameter that cannot be shared, or ranks that
            differ in model or options, by name.
        SharingError: ranks that did not come.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        process_group: dist.ProcessGroup | None = None,
        *,
        codec: Codec = "none",
        strategy: Strategy = "allreduce",
        overlap: Overlap = "backward",
        deterministic: bool = False,
        timeout: timedelta = Share.timeout,
        powersgd_rank: int = Share.powersgd_rank,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        bucket_cap_mb: float | None = None,
        device_ids: list[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        forward_sync_buffers: bool | None = None,
        **ddp: Any,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        _check_keywords(ddp, output_device)
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"module: expected a torch.nn.Module, got {type(module).__name__}")
        self._share = Share(
            codec=codec,
            strategy=strategy,
            overlap=overlap,
            deterministic=deterministic,
            process_group=process_group,
            bucket_mb=bucket_cap_mb,
            timeout=timeout,
            powersgd_rank=powersgd_rank,
        )
        _check_strategy(self._share)
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        named = [(n, p) for n, p in module.named_parameters() if n not in ignored]
        if not any(parameter.requires_grad for _, parameter in named):
            raise RuntimeError(
                "module: expected a parameter that requires a gradient, got none; there is nothing "
                "to share"
            )
        for name, parameter in named:
            _check_parameter(name, parameter)
        self._device = device_of(named)
        check_device_ids(device_ids, self._device)
        self._moves_inputs = bool(device_ids)
        resolve(self._share, self._device)
        self.module = module
        self._named = named
        self._ignored = ignored
        at_start = broadcast_buffers is not False or forward_sync_buffers is not None
        self.broadcast_buffers = at_start if forward_sync_buffers is None else forward_sync_buffers
        self.require_backward_grad_sync = True
        self._syncs_buffers_next = True
        self._init_facts = {"broadcast_buffers": broadcast_buffers, "init_sync": init_sync}
        self._connected = self._connect()
        if init_sync:
            self._broadcast_states(source=0, with_buffers=at_start)

    def _connect(self) -> tuple[Meeting, native.GradientRounds]:
        meeting = meet(self._share.process_group, self._share.timeout)
        facts = describe(self._named, self._share, self._buffers_by_name())
        meeting.check_agreement({**facts, "init": self._init_facts})
        self._broadcast = ValueBroadcast(meeting, self._device)
        share = resolve(self._share, self._device)
        return meeting, make_rounds(meeting, self._named, share, settles_itself=True)

    @property
    def _meeting(self) -> Meeting:
        return self._ensured()[0]

    @property
    def _native(self) -> native.GradientRounds:
        return self._ensured()[1]

    def _ensured(self) -> tuple[Meeting, native.GradientRounds]:
        """A copy meets the other ranks only once it trains: there may be none of them elsewhere."""
        if self._connected is None:
            self._connected = self._connect()
        return self._connected

    # --- forward and backward ---------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's. An error in a forward that trains ends sharing on every rank."""
        try:
            return self._forward(*args, **kwargs)
        except BaseException as error:
            connected = self._connected
            # Within a backward it is a checkpoint that runs it again, and may stop it on the way.
            trains = torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
            if trains and connected and os.getpid() == connected[0].pid:
                connected[1].fail(reason(connected[0].rank, error, "forward"))
            raise

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._connected is None and not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        native_half = self._native
        self._meeting.check_usable()
        if native_half.is_backward_open():
            native_half.abandon(f"rank {self._meeting.rank}: a backward ended with an error")
        # Every forward: ranks without data attend each of them.
        Join.notify_join_context(self)
        if self._will_sync_buffers():
            self._sync_buffers(is_joined=False)
        trains = torch.is_grad_enabled()
        if trains:
            self._syncs_buffers_next = self.require_backward_grad_sync
        if self._joins():
            self._tell_joined(syncs=trains and self.require_backward_grad_sync)
        native_half.tell("forward")
        if self._moves_inputs:
            moved, moved_kwargs = _to_kwargs(args, kwargs, self._device, False)
            args, kwargs = moved[0], moved_kwargs[0]
        outputs = self.module(*args, **kwargs)
        if trains:
            self._watch_backward(outputs)
        return outputs

    def _watch_backward(self, outputs: Any) -> None:
        """The first node of a backward through these outputs opens it, so that nested ones
        (reentrant checkpointing) are known to be nested."""
        syncs = self.require_backward_grad_sync
        native_half = self._native
        native_half.set_syncing(syncs)

        def open_backward(_gradient: torch.Tensor) -> None:
            native_half.open_backward(syncs)

        for tensor in _tensors_in(outputs):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(open_backward)  # type: ignore[no-untyped-call]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of forwards in here stay on this rank, and are summed up to the next one
        outside."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @property
    def nonfinite(self) -> list[native.NonFiniteGradient]:
        """Of the last shared backward: for each rank that had gradients that are not finite, before
        they were summed, `rank`, `parameter_name` (the first one), `microbatch` (from 1, of those
        since the last update) and `num_parameters`."""
        return self._native.nonfinite() if self.num_rounds else []

    @property
    def num_rounds(self) -> int:
        """Backwards whose gradients were shared."""
        return 0 if self._connected is None else int(self._native.statistics().num_rounds)

    def statistics(self) -> dict[str, float]:
        """`num_rounds`, `sent_bytes` of gradients by this rank, `between_hosts_bytes` (of these,
        what left its host, where strategy="hierarchical" knows hosts; else all), `waited_s`, the
        time that backwards waited for other ranks, and `busy_s`, from each round's first byte to
        its last: what sharing cost, and what it would have cost if nothing had been hidden behind
        computing."""
        return statistics_of(self._native)

    def feedback_state_dict(self) -> dict[str, Any]:
        """What a lossy codec still owes: this rank's, for its checkpoint. `state_dict()` is the
        module's alone, as with DistributedDataParallel."""
        return feedback_of(self._native, self._meeting)

    def load_feedback_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `feedback_state_dict()` gave on this rank. Of another rank, world size or
        model, nothing is loaded: a warning says so, and what was owed is lost."""
        load_feedback(self._native, self._meeting, state)

    # --- values and buffers -----------------------------------------------------------------------

    def _buffers_by_name(self) -> list[tuple[str, torch.Tensor]]:
        return [(n, b) for n, b in self.module.named_buffers() if n not in self._ignored]

    def _buffers_to_share(self) -> list[torch.Tensor]:
        return [buffer for _, buffer in self._buffers_by_name()]

    def _broadcast_states(self, source: int, *, with_buffers: bool) -> None:
        states = [parameter.detach() for _, parameter in self._named]
        if with_buffers:
            states += [buffer.detach() for buffer in self._buffers_to_share()]
        self._broadcast("parameters and buffers", states, source)

    def will_sync_module_buffers(self) -> bool:
        return self._will_sync_buffers()

    def _will_sync_buffers(self) -> bool:
        # Ranks without data cannot know whether the others train.
        trains = torch.is_grad_enabled() and self.training
        return (
            (trains or self._joins())
            and self._syncs_buffers_next
            and self.broadcast_buffers
            and self._meeting.group is not None
            and bool(self._buffers_to_share())
        )

    def _sync_buffers(self, *, is_joined: bool) -> None:
        source = 0
        if self._joins() or is_joined:
            source = self._common_rank(candidate=not is_joined)
        # .data: the graph of an earlier forward may hold a buffer that its backward does not read
        # (BatchNorm's running mean), and would take this for a change by the model.
        values = [buffer.data for buffer in self._buffers_to_share()]
        self._broadcast("buffers", values, source)

    def _common_rank(self, *, candidate: bool) -> int:
        """The largest rank that is a candidate."""
        found = torch.tensor([self._meeting.rank if candidate else -1], device=self._device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._meeting.group)
        if int(found) < 0:
            raise RuntimeError("join: no rank has data left to take values from")
        return int(found)

    # --- uneven inputs ----------------------------------------------------------------------------

    def _joins(self) -> bool:
        return bool(self._join_config.enable) and self._meeting.group is not None

    def _tell_joined(self, *, syncs: bool) -> None:
        plans = torch.tensor([int(syncs), int(self._syncs_buffers_next)], device=self._device)
        dist.all_reduce(plans, group=self._meeting.group)

    def _ask_active(self) -> tuple[bool, bool]:
        """Whether the others share gradients in this forward's backward, and buffers in the next
        forward."""
        plans = torch.zeros(2, dtype=torch.int64, device=self._device)
        dist.all_reduce(plans, group=self._meeting.group)
        syncs, syncs_buffers_next = plans.tolist()
        return syncs > 0, syncs_buffers_next > 0

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context in which ranks may run out of data early, as DistributedDataParallel.join."""
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return _ShadowRounds(self, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        return self._device

    @property
    def join_process_group(self) -> dist.ProcessGroup | None:
        return self._meeting.group

    # --- what DistributedDataParallel has besides -------------------------------------------------

    def register_comm_hook(self, state: object, hook: Any) -> None:
        raise NotImplementedError(
            "GradientSharing.register_comm_hook: hooks work on DistributedDataParallel's buckets; "
            "use codec='bf16', 'fp16', 'int8' or 'powersgd'"
        )

    def _set_static_graph(self) -> None:
        """Nothing: what a backward reaches may change or stay."""

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        return self._meeting.group

    @property
    def forward_sync_buffers(self) -> bool:
        return self.broadcast_buffers

    @property
    def parameters_to_ignore(self) -> set[str]:
        return self._ignored

    def __getstate__(self) -> dict[str, Any]:
        group = self._share.process_group
        if group is not None and group is not dist.group.WORLD:
            raise ValueError(
                "process_group: a copy shares among all ranks, but this one is of a group of its "
                "own; copy or save model.module, or model.state_dict()"
            )
        share = replace(self._share, process_group=None)
        return {**self.__dict__, "_connected": None, "_broadcast": None, "_share": share}


class _ShadowRounds(JoinHook):
    """What a rank without data does while the others go on."""

    def __init__(self, sharing: GradientSharing, divides_by_all: bool) -> None:
        self.sharing = sharing
        self._owns_gradients = False
        sharing._native.set_divide_by_all(divides_by_all)
        super().__init__()

    def main_hook(self) -> None:
        sharing = self.sharing
        if sharing._will_sync_buffers():
            sharing._sync_buffers(is_joined=True)
        syncs, sharing._syncs_buffers_next = sharing._ask_active()
        if syncs:
            kept = self._take_gradients()
            sharing._native.shadow_round()
            sharing._native.settle()
            for parameter, gradient in kept:
                parameter.grad = gradient

    def _take_gradients(self) -> list[tuple[torch.nn.Parameter, torch.Tensor | None]]:
        """`.grad` stays as this rank's last step left it: the means of rounds that it merely
        attends are not its own, and would be summed up in its next backward."""
        parameters = [p for _, p in self.sharing._named if p.requires_grad]
        if not self._owns_gradients:
            self._owns_gradients = True
            for parameter in parameters:
                if parameter.grad is not None:  # it may lie in the bucket
                    parameter.grad = parameter.grad.clone()
        return [(parameter, parameter.grad) for parameter in parameters]

    def post_hook(self, is_last_joiner: bool) -> None:
        sharing = self.sharing
        source = sharing._common_rank(candidate=is_last_joiner)
        sharing._broadcast_states(source, with_buffers=sharing.broadcast_buffers)


def _check_keywords(ddp: dict[str, Any], output_device: Any) -> None:
    for name, value in ddp.items():
        if name not in _REFUSED:
            raise TypeError(f"GradientSharing got an unknown option {name!r}")
        if value != _REFUSED[name]:
            raise NotImplementedError(
                f"GradientSharing({name}={value!r}) is not supported; leave it out"
            )
    if output_device is not None:
        raise NotImplementedError(
            f"GradientSharing(output_device={output_device!r}) is not supported: outputs stay "
            "where the module computes them; expected output_device=None, leave it out"
        )


def _check_strategy(share: Share) -> None:
    if share.strategy in ("sharded", "periodic"):
        raise ValueError(
            f"strategy={share.strategy!r} updates parameters itself, which a torch optimizer does "
            "not know; use tw.Engine(model, ..., share=tw.Share(strategy=...))"
        )


def _check_parameter(name: str, parameter: torch.nn.Parameter) -> None:
    if torch.nn.parameter.is_lazy(parameter):
        raise RuntimeError(
            f"parameter {name!r}: is lazy and has no shape yet; run one batch through the module "
            "first"
        )
    if getattr(parameter, "_in_backward_optimizers", None):
        raise NotImplementedError(
            f"parameter {name!r}: has an optimizer that steps during backward "
            "(_apply_optimizer_in_backward), before gradients are shared; step after backward, or "
            "use tw.Engine"
        )
