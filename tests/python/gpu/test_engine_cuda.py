"""The Engine on a GPU: its graphs replay the same training, and a step waits for nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tradewind as tw


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 36, 10),
    ).cuda()


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(16, 3, 8, 8, generator=generator).cuda(),
            torch.randint(0, 10, (16,), generator=generator).cuda(),
        )
        for _ in range(count)
    ]


def step(engine: tw.Engine, x: torch.Tensor, y: torch.Tensor) -> tw.StepResult:
    return engine.step(F.cross_entropy(engine(x), y))


OPTIONS: list[dict[str, Any]] = [
    {"clip_norm": 0.1},
    {"precision": "amp-bf16"},
    {"precision": "amp-fp16", "clip_norm": 0.1},
    {"precision": "bf16", "masters": "split", "state_dtype": "8bit"},
    {"precision": "fp16", "accumulate": 2},
    {"accumulate": 2, "clip_norm": 0.1},
]


@pytest.fixture(autouse=True)
def deterministic() -> Any:
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = False


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_graphs_replay_the_same_training(options: dict[str, Any]) -> None:
    first = net()
    second = copy.deepcopy(first)
    plain = tw.Engine(first, tw.AdamW(lr=1e-2), **options)
    graphed = tw.Engine(second, tw.AdamW(lr=1e-2), graph=True, **options)
    for x, y in batches(10):
        expected, result = step(plain, x, y), step(graphed, x, y)
        assert result.loss == pytest.approx(expected.loss, rel=1e-3)
        assert result.applied == expected.applied
    for (name, p), (_, q) in zip(
        first.state_dict().items(), second.state_dict().items(), strict=True
    ):
        torch.testing.assert_close(p, q, rtol=2e-2, atol=2e-3, msg=name)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "amp-fp16", "bf16"])
def test_a_step_waits_for_nothing(precision: str, graph: bool) -> None:
    engine = tw.Engine(net(), tw.AdamW(lr=1e-2), precision=precision, clip_norm=1.0, graph=graph)
    data = batches(8)
    for x, y in data[:4]:
        step(engine, x, y)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x, y in data[4:]:
            step(engine, x, y)
            engine.stats()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    engine.close()


def test_an_overflow_leaves_everything() -> None:
    engine = tw.Engine(net(), tw.AdamW(lr=1e-2), precision="fp16")
    x, y = batches(1)[0]
    assert step(engine, x, y).applied
    before = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    result = engine.step(F.cross_entropy(engine(x), y) * 1e30)
    assert result.vetoed
    for name, p in engine.model.named_parameters():
        assert torch.equal(p, before[name])
    engine.close()
    assert engine.stats()["loss_scale"] == 2.0**15
