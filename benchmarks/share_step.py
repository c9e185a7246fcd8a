"""The model of a training step with shared gradients: costs in, seconds out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from share_events import Core, Events, Link
from share_strategies import STRATEGIES, WIRE_FRACTION, Fabric

# The last of these is in the steady state.
STEPS = 5


@dataclass(frozen=True)
class Layer:
    bytes: float  # of float32 gradients
    forward_s: float
    backward_s: float


# Ten linear layers and a head, as share_net.py has them, on one core.
_DEFAULT_LAYERS = (Layer(4198400, 0.0024, 0.0024), *[Layer(4198400, 0.0024, 0.0048)] * 9)


@dataclass(frozen=True)
class Costs:
    """Seconds a byte are of float32 gradients, whatever travels. The defaults are medians that
    share.py measured on one core of an AMD EPYC (Zen 4) with Gloo over TCP; those of the codecs are
    of AVX-512 loops there."""

    layers: tuple[Layer, ...] = _DEFAULT_LAYERS
    update_s_per_byte: float = 1.4e-10
    sum_s_per_byte: float = 1.0e-10
    wire_cpu_s_per_byte: float = 3.3e-10  # per byte sent, with receiving as many
    codec_s_per_byte: dict[str, float] = field(
        default_factory=lambda: {"none": 0.0, "bf16": 1.6e-11, "int8": 7e-11}
    )
    latency_s: float = 30e-6
    message_s: float = 1e-6
    local_Bps: float = 20e9
    name: str = "defaults"

    @property
    def compute_s(self) -> float:
        return sum(
            layer.forward_s + layer.backward_s + layer.bytes * self.update_s_per_byte
            for layer in self.layers
        )


def read_costs(path: Path) -> Costs:
    """Costs of a JSON file with the names of `Costs`; what it leaves out has its default."""
    document: dict[str, Any] = json.loads(path.read_text())
    known = {each.name for each in fields(Costs)}
    if unknown := set(document) - known:
        names, expected = ", ".join(sorted(unknown)), ", ".join(sorted(known))
        raise SystemExit(f"{path}: expected only {expected}; found {names}")
    if "layers" in document:
        document["layers"] = tuple(Layer(**layer) for layer in document["layers"])
    return Costs(**{"name": str(path), **document})


@dataclass(frozen=True)
class Plan:
    strategy: str = "ring"
    overlap: str = "backward"
    codec: str = "none"
    bucket_bytes: float = 4 * 2**20
    first_bucket_bytes: float | None = None  # where it differs, as in DDP


@dataclass(frozen=True)
class Cluster:
    num_ranks: int
    rate_Bps: float
    ranks_per_host: int = 1


@dataclass
class Bucket:
    layers: list[int]
    bytes: float
    step_done: int = -1  # the last step whose mean is there


def buckets_of(layers: tuple[Layer, ...], plan: Plan) -> list[Bucket]:
    """Layers in the order of backward, each bucket closed by the one that fills it."""
    made: list[Bucket] = [Bucket([], 0)]
    for index in reversed(range(len(layers))):
        is_first = len(made) == 1 and plan.first_bucket_bytes is not None
        limit = plan.first_bucket_bytes if is_first else plan.bucket_bytes
        made[-1].layers.append(index)
        made[-1].bytes += layers[index].bytes
        if made[-1].bytes >= limit and index:
            made.append(Bucket([], 0))
    return made


class Model:
    """One rank's steps, one after the other."""

    def __init__(self, costs: Costs, cluster: Cluster, plan: Plan) -> None:
        self.costs, self.plan = costs, plan
        self.events = Events()
        self.core = Core(self.events)
        network = Link(self.events, cluster.rate_Bps, costs.latency_s, costs.message_s)
        self.fabric = Fabric(
            self.core,
            network,
            Link(self.events, costs.local_Bps, 0.0),
            cluster.num_ranks,
            cluster.ranks_per_host,
            costs.sum_s_per_byte,
            costs.wire_cpu_s_per_byte,
        )
        self.buckets = buckets_of(costs.layers, plan)
        self.bucket_of = {layer: bucket for bucket in self.buckets for layer in bucket.layers}
        self.updated = [-1] * len(costs.layers)
        self.step_ended: list[float] = []
        self._waiting: tuple[Callable[[], bool], Callable[[], None]] | None = None

    def run(self) -> list[float]:
        """When each step ended, in seconds from the beginning of the first."""
        self._forward(0, 0)
        self.events.run()
        return self.step_ended

    def _when(self, is_ready: Callable[[], bool], go_on: Callable[[], None]) -> None:
        """Go on as soon as it is ready; the core waits for one thing at a time."""
        if is_ready():
            go_on()
        else:
            self._waiting = (is_ready, go_on)

    def _bucket_done(self, bucket: Bucket, step: int) -> None:
        bucket.step_done = step
        if self._waiting and self._waiting[0]():
            go_on = self._waiting[1]
            self._waiting = None
            go_on()

    def _forward(self, step: int, layer: int) -> None:
        if layer == len(self.costs.layers):
            self._backward(step, layer - 1)
            return
        bucket = self.bucket_of[layer]

        def compute() -> None:
            seconds = self.costs.layers[layer].forward_s
            if self.updated[layer] < step - 1:
                self.updated[layer] = step - 1
                seconds += self.costs.layers[layer].bytes * self.costs.update_s_per_byte
            self.core.compute(seconds, lambda: self._forward(step, layer + 1))

        self._when(lambda: bucket.step_done >= step - 1, compute)

    def _backward(self, step: int, layer: int) -> None:
        def computed() -> None:
            bucket = self.bucket_of[layer]
            if layer == bucket.layers[-1]:
                self._share(bucket, step)
            if layer:
                self._backward(step, layer - 1)
            else:
                self._end(step)

        self.core.compute(self.costs.layers[layer].backward_s, computed)

    def _share(self, bucket: Bucket, step: int) -> None:
        lazy = self.plan.overlap == "next-forward"
        priority = (step, bucket.layers[-1]) if lazy else (step,)
        # Half of a codec's time is encoding, before; half decoding, after.
        codec_s = bucket.bytes * self.costs.codec_s_per_byte[self.plan.codec] / 2
        num_bytes = bucket.bytes * WIRE_FRACTION[self.plan.codec]
        reduce = STRATEGIES[self.plan.strategy]

        def decode() -> None:
            self.core.process(codec_s, lambda: self._bucket_done(bucket, step))

        self.core.process(codec_s, lambda: reduce(self.fabric, num_bytes, priority, decode))

    def _end(self, step: int) -> None:
        if self.plan.overlap == "next-forward":
            self._ended(step)
            return

        def update() -> None:
            self.updated = [step] * len(self.updated)
            num_bytes = sum(layer.bytes for layer in self.costs.layers)
            seconds = num_bytes * self.costs.update_s_per_byte
            self.core.compute(seconds, lambda: self._ended(step))

        self._when(lambda: all(bucket.step_done >= step for bucket in self.buckets), update)

    def _ended(self, step: int) -> None:
        self.step_ended.append(self.events.now)
        if step + 1 < STEPS:
            self._forward(step + 1, 0)


def step_seconds(costs: Costs, cluster: Cluster, plan: Plan) -> float:
    """A step in the steady state."""
    ended = Model(costs, cluster, plan).run()
    return ended[-1] - ended[-2]
