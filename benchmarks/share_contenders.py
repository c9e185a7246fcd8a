"""Who takes part: ways of one training step, each by name, made anew for every turn.

A contender that cannot be made or fails in its first steps is reported with the reason.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from models import Task, loss_of
from share_stepper import LEARNING_RATE, Rank, Stepper, training
from share_wire import beside_compute, ring_of_sockets, wire


@dataclass(frozen=True)
class Contender:
    name: str
    kind: str  # what it is compared as: "wire", "ddp", "ddp-compressed", "ours" ...
    make: Callable[[Rank], Stepper]
    settings: dict[str, Any] = field(default_factory=dict)


def compute_alone(rank: Rank) -> Stepper:
    task = rank.task()
    return Stepper(training(task, task.model))


def engine_alone(rank: Rank) -> Stepper:
    import tradewind as tw

    return _engine_stepper(rank.task(), lambda model: tw.Engine(model, tw.AdamW(lr=LEARNING_RATE)))


def ddp(hook: str | None = None, **options: Any) -> Contender:
    def make(rank: Rank) -> Stepper:
        task = rank.task()
        group = rank.group(name)
        model = nn.parallel.DistributedDataParallel(task.model, process_group=group, **options)
        if hook is not None:
            _register_hook(model, group, hook)
        return Stepper(training(task, model))

    words = ["ddp", hook or "", *(_word(key, value) for key, value in options.items())]
    name = " ".join(filter(None, words))
    kind = "ddp" if hook is None else "ddp-compressed"
    return Contender(name, kind, make, {"hook": hook, **options})


def _word(key: str, value: object) -> str:
    short = {"bucket_cap_mb": f"{value}MB", "gradient_as_bucket_view": "view"}
    return short.get(key, key.removesuffix("_graph"))


def _register_hook(model: nn.parallel.DistributedDataParallel, group: Any, hook: str) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if hook == "fp16":
        model.register_comm_hook(group, default_hooks.fp16_compress_hook)
        return
    # As early as it may: within the steps before the clock.
    state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _engine_stepper(task: Task, make_engine: Callable[[nn.Module], Any]) -> Stepper:
    engine = make_engine(task.model)

    def close() -> None:
        getattr(engine, "close", lambda: None)()
        gc.collect()

    return Stepper(
        lambda: engine.step(loss_of(engine(task.inputs), task.targets)),
        settle=getattr(engine, "settle", lambda: None),
        close=close,
    )


def engine(overlap: str, codec: str, strategy: str) -> Contender:
    def make(rank: Rank) -> Stepper:
        import tradewind as tw

        share = tw.Share(overlap=overlap, codec=codec, strategy=strategy)
        return _engine_stepper(
            rank.task(),
            lambda model: tw.Engine(model, tw.AdamW(lr=LEARNING_RATE), share=share),
        )

    kind = "ours" if codec == "none" else "ours-compressed"
    settings = {"overlap": overlap, "codec": codec, "strategy": strategy}
    return Contender(f"engine {strategy} {overlap} {codec}", kind, make, settings)


def gradient_sharing(codec: str, strategy: str = "allreduce") -> Contender:
    def make(rank: Rank) -> Stepper:
        import tradewind as tw

        task = rank.task()
        model = tw.GradientSharing(task.model, codec=codec, strategy=strategy)
        return Stepper(training(task, model), close=getattr(model, "close", lambda: None))

    kind = "ours" if codec == "none" else "ours-compressed"
    settings = {"overlap": "backward", "codec": codec, "strategy": strategy}
    return Contender(f"sharing {strategy} {codec}", kind, make, settings)


def _all() -> Iterable[Contender]:
    yield Contender("compute alone", "compute", compute_alone)
    yield Contender("engine alone", "compute-ours", engine_alone)
    # Early: on Gloo it may end the process, and those before it are then measured twice.
    yield ddp("powersgd")
    for megabytes in (1, 2, 4, 8, None):
        label = "whole" if megabytes is None else f"{megabytes}MB"
        settings = {"bucket_cap_mb": megabytes}
        yield Contender(f"wire {label}", "wire", wire(megabytes), settings)
    halves = torch.float16
    yield Contender("wire fp16 4MB", "wire-fp16", wire(4, halves), {"bucket_cap_mb": 4})
    yield Contender("wire beside compute", "beside", beside_compute(4, torch.float32))
    yield Contender("wire fp16 beside compute", "beside-fp16", beside_compute(4, halves))
    yield Contender("sockets", "sockets", ring_of_sockets)
    yield ddp()
    yield ddp(gradient_as_bucket_view=True)
    yield ddp(bucket_cap_mb=4)
    for megabytes in (1, 2, 4, 8):
        yield ddp(bucket_cap_mb=megabytes, gradient_as_bucket_view=True)
    for megabytes in (2, 4):
        yield ddp(bucket_cap_mb=megabytes, gradient_as_bucket_view=True, static_graph=True)
    yield ddp("fp16")
    for megabytes in (1, 2, 4, 8):
        yield ddp("fp16", bucket_cap_mb=megabytes, gradient_as_bucket_view=True)

    for strategy in ("allreduce", "sharded"):
        for overlap in ("backward", "next-forward"):
            for codec in ("none", "bf16", "int8"):
                yield engine(overlap, codec, strategy)
    yield engine("backward", "powersgd", "allreduce")
    for overlap in ("backward", "next-forward"):
        yield engine(overlap, "none", "hierarchical")
    for codec in ("none", "bf16", "int8", "powersgd"):
        yield gradient_sharing(codec)
    yield gradient_sharing("none", "hierarchical")


CONTENDERS: dict[str, Contender] = {contender.name: contender for contender in _all()}
