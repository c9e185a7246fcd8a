"""The Engine over a device's tables gives the CPU's bits. Here the device is emulated: the CUDA
library's kernels, compiled for the host, step CPU tensors."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cuda_emulation
import pytest
import torch
import torch.nn.functional as F
from engine.models import batches, bits, small_net, twins
from torch import nn

import tradewind as tw
from tradewind.optim import cuda
from tradewind.optim.device_outcome import DeviceOutcome
from tradewind.track import open_metrics


@pytest.fixture(scope="module")
def built() -> cuda_emulation.Emulation:
    return cuda_emulation.build()


@pytest.fixture(autouse=True)
def emulation(
    built: cuda_emulation.Emulation, monkeypatch: pytest.MonkeyPatch
) -> Iterator[cuda_emulation.Emulation]:
    monkeypatch.setattr(cuda, "library", lambda: built.library)
    yield built
    assert built.failure == ""


def on_device(model: nn.Module, recipe: tw.Recipe, **options: Any) -> tw.Engine:
    """An Engine whose optimizer takes these CPU tensors for a device's."""
    optimizer = recipe.build(list(model.named_parameters()), model=model)
    optimizer._device_type = "cpu"
    engine = tw.Engine(model, optimizer, **options)
    assert isinstance(engine.optimizer.native_table, cuda.DeviceTables)
    return engine


def step(engine: tw.Engine, x: torch.Tensor, y: torch.Tensor) -> tw.StepResult:
    return engine.step(F.cross_entropy(engine(x), y))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "amp-bf16", "clip_norm": 0.1},
        {"precision": "bf16", "masters": "split", "state_dtype": "8bit"},
        {"precision": "fp16", "clip_norm": 0.1},
        {"precision": "bf16", "accumulate": 2},
        {"accumulate": 2},
    ],
    ids=str,
)
def test_same_bits_as_the_cpu(options: dict[str, Any]) -> None:
    first, second = twins()
    here = tw.Engine(first, tw.AdamW(lr=1e-2), **options)
    there = on_device(second, tw.AdamW(lr=1e-2), **options)
    for x, y in batches(5):
        expected, result = step(here, x, y), step(there, x, y)
        assert (result.applied, result.loss) == (expected.applied, expected.loss)
        if result.applied:
            assert result.grad_norm == expected.grad_norm
            assert result.clip_factor == expected.clip_factor
    if options.get("accumulate"):
        assert here.flush() is not None
        assert there.flush() is not None
    assert bits(first) == bits(second)
    assert there.stats() == here.stats()


def test_a_veto_and_the_loss_scale() -> None:
    model = small_net()
    scale = tw.LossScale(initial=2.0**12, growth_interval=2)
    engine = on_device(model, tw.AdamW(lr=1e-2), precision="amp-fp16", loss_scale=scale)
    x, y = batches(1)[0]
    engine.eval()
    assert step(engine, x, y).applied
    before = bits(model)
    result = engine.step(F.cross_entropy(engine(x), y) * 1e30)
    assert result.vetoed
    assert result.first_nonfinite
    assert bits(model) == before
    assert float(engine._loss_scale.scale) == engine.stats()["loss_scale"] == 2.0**11
    for _ in range(2):
        step(engine, x, y)
    assert float(engine._loss_scale.scale) == engine.stats()["loss_scale"] == 2.0**12
    assert engine.stats()["num_skipped"] == 1


def test_numbers_come_late_and_none_is_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    arrived: set[int] = set()
    monkeypatch.setattr(DeviceOutcome, "is_ready", lambda self: id(self) in arrived)
    engine = on_device(small_net(), tw.AdamW(lr=1e-2), run=tmp_path / "run")
    outcomes = []
    for x, y in batches(4):
        loss = F.cross_entropy(engine(x), y)
        engine.step(loss * float("nan") if len(outcomes) == 1 else loss)
        outcomes.append(engine.optimizer.outcome)
    assert engine.stats()["step"] == 0
    assert engine.stats()["grad_norm"] is None
    arrived.update(map(id, outcomes[:2]))
    with pytest.warns(RuntimeWarning, match=r"step 2: the gradient of .* is not finite"):
        stats = engine.stats()
    assert (stats["step"], stats["num_skipped"]) == (2, 1)
    engine.close()  # waits for the rest
    with open_metrics(tmp_path / "run") as metrics:
        assert list(metrics.series("grad_norm").steps) == [1, 2, 3, 4]


def test_resume_is_exact() -> None:
    def fresh() -> tw.Engine:
        return on_device(small_net(), tw.AdamW(lr=1e-2), precision="bf16", state_dtype="bf16")

    data = batches(5)
    straight = fresh()
    losses = [step(straight, x, y).loss for x, y in data]
    engine = fresh()
    for x, y in data[:2]:
        step(engine, x, y)
    file = io.BytesIO()
    torch.save(engine.state_dict(), file)
    file.seek(0)
    resumed = fresh()
    resumed.load_state_dict(torch.load(file))
    assert [step(resumed, x, y).loss for x, y in data[2:]] == losses[2:]
    assert bits(resumed.model) == bits(straight.model)


@pytest.mark.parametrize("recipe", [tw.AdamW(lr=1e-2), tw.LAMB(lr=1e-2), tw.SGD(lr=0.1)], ids=str)
def test_the_update_in_backward(recipe: tw.Recipe) -> None:
    first, second = twins()
    here = tw.Engine(first, recipe, update="in-backward")
    there = on_device(second, recipe, update="in-backward")
    for x, y in batches(4):
        expected, result = step(here, x, y), step(there, x, y)
        assert result.applied
        assert result.grad_norm == expected.grad_norm
        assert there.stats() == here.stats()
    assert bits(first) == bits(second)


def test_gradients_are_freed_in_backward() -> None:
    """4M elements share a step: of 24M, no more than 4M and a layer live at once."""
    layers = [nn.Linear(1024, 1024, bias=False) for _ in range(24)]
    model = nn.Sequential(*layers)
    engine = on_device(model, tw.SGD(lr=1e-3), update="in-backward")
    alive: list[int] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(p.grad is not None for p in model.parameters()))
        )
    engine.step(engine(torch.randn(2, 1024)).square().mean())
    assert max(alive) <= 4
    assert all(p.grad is None for p in model.parameters())


def test_a_veto_in_backward_is_of_the_parameters_that_share_a_step() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.good = nn.Parameter(torch.ones(1 << 22))
            self.bad = nn.Parameter(torch.ones(3))

        def forward(self, factor: torch.Tensor) -> torch.Tensor:
            return self.good.sum() + (self.bad * factor).sum()

    model = Two()
    engine = on_device(model, tw.SGD(lr=0.5), update="in-backward")
    loss = engine(torch.tensor([1.0, float("nan"), 1.0]))
    with pytest.warns(RuntimeWarning, match="'bad' is not finite"):
        result = engine.step(loss)
    assert (result.vetoed, result.first_nonfinite, result.num_nonfinite) == (True, "bad", 1)
    assert torch.equal(model.bad, torch.ones(3))
    assert engine.step(engine(torch.ones(3))).applied
    assert torch.equal(model.bad, torch.full((3,), 0.5))


@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": 0.1},
        {"precision": "bf16", "masters": "split", "state_dtype": "8bit"},
        {"precision": "fp16", "loss_scale": tw.LossScale(initial=2.0**20, growth_interval=2)},
    ],
    ids=["clipped", "split 8-bit", "fp16"],
)
def test_a_run_on_a_device_goes_on_to_the_same_bits(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    data = batches(9)

    def train(folder: Path, first: int, last: int) -> tw.Engine:
        checkpoint = tw.Checkpoint(folder, every=10_000, notices="off")
        engine = on_device(small_net(), tw.AdamW(lr=1e-2), checkpoint=checkpoint, **options)
        assert engine.num_steps == first
        for x, y in data[first:last]:
            step(engine, x, y)
            if engine.num_steps == 4:
                save = engine.save()
                assert save.in_place_bytes == 0  # a device's memory is staged
                save.wait(120)
        return engine

    expected = train(tmp_path / "whole", 0, 9)
    train(tmp_path / "lost", 0, 6)._abort(RuntimeError("lost"))
    found = train(tmp_path / "lost", 4, 9)
    assert bits(found.model) == bits(expected.model)
    ours, theirs = (e.state_dict()["optimizer"]["state"] for e in (found, expected))
    for index, entry in theirs.items():
        assert all(torch.equal(ours[index][name], value) for name, value in entry.items()), index
    assert found.stats()["num_skipped"] == expected.stats()["num_skipped"]
    assert found.stats()["loss_scale"] == expected.stats()["loss_scale"]
    found.close()
    expected.close()
