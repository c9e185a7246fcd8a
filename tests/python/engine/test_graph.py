"""Engine(graph=True): what is replayed gives the bits of the same training without graphs. CUDA
graphs need a GPU (tests/python/gpu); here a stand-in runs again what it was given to capture, over
the emulated device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cuda_emulation
import pytest
import torch
import torch.nn.functional as F
from engine.models import batches, bits, small_net, twins
from torch import nn

import tradewind as tw
from tradewind.engine.graph import _Microbatch
from tradewind.optim import cuda


class RunsAgain:
    """In the place of CUDA graphs. As in a real capture, a captured step has not been taken."""

    def __init__(self) -> None:
        self.num_replays = 0
        self.num_captures = 0

    def warm_up(self, run: Callable[[], None]) -> None:
        run()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        self.num_captures += 1
        owner = getattr(run, "__self__", None)
        fixed: list[torch.Tensor | None] = []
        if isinstance(owner, _Microbatch):
            run()
            fixed = owner._gradients

        def replay() -> None:
            self.num_replays += 1
            run()
            if fixed:  # a graph writes to the same memory again
                for there, new in zip(fixed, owner._gradients, strict=True):
                    if there is not None:
                        there.copy_(new)
                owner._gradients = fixed

        return replay


@pytest.fixture(scope="module")
def built() -> cuda_emulation.Emulation:
    return cuda_emulation.build()


@pytest.fixture(autouse=True)
def graphs(built: cuda_emulation.Emulation, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunsAgain]:
    made = RunsAgain()
    monkeypatch.setattr(cuda, "library", lambda: built.library)
    monkeypatch.setattr(tw.Engine, "_make_graphs", staticmethod(lambda: made))
    yield made
    assert built.failure == ""


def on_device(model: nn.Module, recipe: tw.Recipe, **options: Any) -> tw.Engine:
    optimizer = recipe.build(list(model.named_parameters()), model=model)
    optimizer._device_type = "cpu"
    return tw.Engine(model, optimizer, **options)


def step(engine: tw.Engine, x: torch.Tensor, y: torch.Tensor) -> tw.StepResult:
    return engine.step(F.cross_entropy(engine(x), y))


OPTIONS: list[dict[str, Any]] = [
    {"clip_norm": 0.1},
    {"precision": "amp-bf16"},
    {"precision": "fp16", "clip_norm": 0.1},
    {"accumulate": 2, "clip_norm": 0.1},
    {"accumulate": 2, "precision": "bf16"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_same_bits_as_without(options: dict[str, Any], graphs: RunsAgain) -> None:
    first, second = twins()
    plain = tw.Engine(first, tw.AdamW(lr=1e-2), **options)
    graphed = on_device(second, tw.AdamW(lr=1e-2), graph=True, **options)
    for x, y in batches(8):
        expected, result = step(plain, x, y), step(graphed, x, y)
        assert (result.applied, result.loss) == (expected.applied, expected.loss)
        if result.applied:
            assert result.grad_norm == expected.grad_norm
    assert bits(first) == bits(second)  # batch norm's statistics too
    assert graphed.stats() == plain.stats()
    # Forward and backward of every microbatch, and every update but the first two.
    updates = 8 // options.get("accumulate", 1)
    assert graphs.num_replays == 2 * 8 + updates - 1
    assert graphs.num_captures == 3


def test_a_batch_of_another_shape_runs_without(graphs: RunsAgain) -> None:
    for accumulate in (1, 2):
        first, second = twins()
        plain = tw.Engine(first, tw.SGD(lr=0.1), accumulate=accumulate)
        graphed = on_device(second, tw.SGD(lr=0.1), graph=True, accumulate=accumulate)
        (whole, short) = batches(5), batches(3, size=5, seed=4)
        given = [*whole[:3], *short[:2], *whole[3:], short[2]]
        with pytest.warns(UserWarning, match="another shape.*drop_last=True"):
            for x, y in given:
                assert step(graphed, x, y).loss == pytest.approx(step(plain, x, y).loss, rel=1e-6)
        for p, q in zip(first.parameters(), second.parameters(), strict=True):
            torch.testing.assert_close(p, q)  # sums of two microbatches meet in another order


def test_schedules_reach_the_graph(graphs: RunsAgain) -> None:
    first, second = twins()
    engines = [
        tw.Engine(first, tw.SGD(lr=0.1)),
        on_device(second, tw.SGD(lr=0.1), graph=True),
    ]
    schedules = [
        torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.5) for engine in engines
    ]
    for x, y in batches(5):
        for engine, schedule in zip(engines, schedules, strict=True):
            step(engine, x, y)
            schedule.step()
    assert graphs.num_captures == 3  # not one for each learning rate
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(p, q)


def test_another_option_takes_another_graph(graphs: RunsAgain) -> None:
    engine = on_device(small_net(), tw.AdamW(lr=1e-2), graph=True)
    for index, (x, y) in enumerate(batches(8)):
        if index == 4:
            engine.optimizer.param_groups[0]["weight_decay"] = 0.5
        step(engine, x, y)
    assert graphs.num_captures == 4


def test_inputs_that_need_gradients_and_structures() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, given: dict[str, torch.Tensor], *, scale: float) -> dict[str, Any]:
            hidden = self.layer(given["a"]) * scale
            return {"sum": hidden.sum(), "mask": given["a"] > 0, "name": "two"}

    engines = [
        tw.Engine(Two(), tw.SGD(lr=0.1)),
        on_device(Two(), tw.SGD(lr=0.1), graph=True),
    ]
    gradients = []
    for engine in engines:
        for seed in range(3):
            torch.manual_seed(seed)
            a = torch.randn(2, 3, requires_grad=True)
            out = engine({"a": a}, scale=2.0)
            assert torch.equal(out["mask"], a > 0)
            assert out["name"] == "two"
            engine.step(out["sum"])
        gradients.append(a.grad)
    assert torch.equal(gradients[0], gradients[1])
    assert bits(engines[0].model) == bits(engines[1].model)
    assert engines[1].model.unused.weight.grad is None


def test_evaluation_runs_without(graphs: RunsAgain) -> None:
    engine = on_device(small_net(), tw.SGD(lr=0.1), graph=True)
    (x, y), (other, _) = batches(2)
    step(engine, x, y)
    replays = graphs.num_replays
    engine.eval()
    with torch.no_grad():
        expected = engine.model(other)
        assert torch.equal(engine(other), expected)
    assert graphs.num_replays == replays


def test_a_model_that_cannot_be_captured(
    graphs: RunsAgain, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(run: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs, "capture", refuse)
    engine = on_device(small_net(), tw.SGD(lr=0.1), graph=True)
    before = bits(engine.model)
    with pytest.raises(RuntimeError, match=r"cannot be captured.*\.item\(\).*not permitted"):
        engine(batches(1)[0][0])
    assert bits(engine.model) == before


def test_on_the_cpu_it_is_refused() -> None:
    model = small_net()
    addresses = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(ValueError, match="graph=True: CUDA graphs need the model on a GPU"):
        tw.Engine(model, tw.SGD(lr=0.1), graph=True)
    with pytest.raises(TypeError, match="graph: expected True or False, got 1"):
        tw.Engine(model, tw.SGD(lr=0.1), graph=1)
    assert [p.data_ptr() for p in model.parameters()] == addresses
