"""Checkpoints of an Engine on a GPU: staged in pinned memory beside the training, and exact."""

from __future__ import annotations

from pathlib import Path
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
        nn.Dropout(0.1),
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


@pytest.fixture(autouse=True)
def deterministic() -> Any:
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = False


def make(folder: Path, **options: Any) -> tw.Engine:
    checkpoint = tw.Checkpoint(
        folder, every=10_000, notices="off", host_memory=options.pop("host_memory", None)
    )
    return tw.Engine(net(), tw.AdamW(lr=1e-2), checkpoint=checkpoint, **options)


def train(engine: tw.Engine, last: int) -> None:
    for x, y in batches(last)[engine.num_steps :]:
        engine.step(F.cross_entropy(engine(x), y))
        if engine.num_steps == 4:
            engine.save().wait(120)


@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": 0.1},
        {"precision": "amp-fp16"},
        {"precision": "bf16", "masters": "split", "state_dtype": "8bit"},
        {"precision": "fp16"},
        {"graph": True},
    ],
    ids=str,
)
def test_a_run_goes_on_to_the_same_bits(tmp_path: Path, options: dict[str, Any]) -> None:
    whole = make(tmp_path / "whole", **options)
    train(whole, 10)
    lost = make(tmp_path / "lost", **options)
    train(lost, 6)
    lost._abort(RuntimeError("lost"))
    found = make(tmp_path / "lost", resume="must", **options)
    assert found.num_steps == 4
    train(found, 10)
    theirs, ours = whole.model.state_dict(), found.model.state_dict()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    theirs, ours = (e.state_dict()["optimizer"]["state"] for e in (whole, found))
    for index, entry in theirs.items():
        assert all(torch.equal(ours[index][name], value) for name, value in entry.items()), index


def test_what_is_saved_is_what_was_there_whatever_the_gpu_does_next(tmp_path: Path) -> None:
    engine = make(tmp_path)
    train(engine, 3)
    expected = {name: value.clone() for name, value in engine.model.state_dict().items()}
    save = engine.save()
    for _ in range(3):  # queued at once, and held until the copies are made
        x, y = batches(1)[0]
        engine.step(F.cross_entropy(engine(x), y))
    save.wait(120)
    loaded = tw.Checkpointer(tmp_path).load()
    assert loaded is not None and loaded[0] == 3
    for name, value in expected.items():
        assert torch.equal(loaded[1]["model"][name], value.cpu()), name


def test_a_checkpoint_of_a_gpu_goes_on_on_the_cpu(tmp_path: Path) -> None:
    engine = make(tmp_path)
    train(engine, 4)
    expected = {name: value.cpu() for name, value in engine.model.state_dict().items()}
    engine._abort(RuntimeError("lost"))
    model = net().cpu()
    checkpoint = tw.Checkpoint(tmp_path, notices="off")
    there = tw.Engine(model, tw.AdamW(lr=1e-2), checkpoint=checkpoint, resume="must")
    assert all(torch.equal(model.state_dict()[name], value) for name, value in expected.items())
    there.close()
