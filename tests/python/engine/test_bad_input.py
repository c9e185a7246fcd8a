"""Wrong arguments: one clear error each, before anything changes."""

from __future__ import annotations

import pathlib
import re

import pytest
import torch
import torch.nn.functional as F
from engine.models import batches, bits, small_net
from torch import nn

import tradewind as tw


def make(model: nn.Module | None = None, **options: object) -> tw.Engine:
    return tw.Engine(model if model is not None else small_net(), tw.SGD(lr=0.1), **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"precision": "fp8"}, ValueError, "precision: expected one of fp32.*got 'fp8'"),
        ({"clip_norm": -1.0}, ValueError, "clip_norm: expected a number >= 0, got -1"),
        ({"clip_norm": float("nan")}, ValueError, "clip_norm.*nan"),
        ({"accumulate": 0}, ValueError, "accumulate: expected a whole number of at least 1, got 0"),
        ({"accumulate": 1.5}, ValueError, "accumulate.*1.5"),
        ({"accumulate": True}, ValueError, "accumulate.*True"),
        ({"colour": 1}, TypeError, "unknown option 'colour'"),
    ],
)
def test_options(options: dict[str, object], error: type[Exception], message: str) -> None:
    model = small_net()
    addresses = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(error, match=message):
        make(model, **options)
    assert [p.data_ptr() for p in model.parameters()] == addresses
    make(model).close()  # and nothing was kept


def test_what_is_not_built_says_so() -> None:
    with pytest.raises(NotImplementedError, match=r"Engine\(watch=.*not built yet"):
        make(watch="anything")


def test_more_than_one_process_is_not_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(ValueError, match="2 processes: each would train alone"):
        make()


@pytest.mark.parametrize(
    ("optimizer", "error", "message"),
    [
        (lambda m: torch.optim.SGD(m.parameters()), TypeError, "recipe.*got SGD of torch.optim"),
        (lambda m: "adam", TypeError, "recipe.*got str"),
        (lambda m: tw.optim.SGD(nn.Linear(2, 2).parameters()), ValueError, "holds none of this"),
        (lambda m: tw.SGD(lr=0.1, clip_norm=1.0), ValueError, "clip_norm.*has 1.0.*given 2.0"),
        (
            lambda m: tw.SGD(lr=0.1, groups=[{"params": "nothing*"}]),
            ValueError,
            r"groups\[0\].*'nothing\*' matches no parameter",
        ),
    ],
)
def test_optimizers(optimizer, error: type[Exception], message: str) -> None:  # type: ignore[no-untyped-def]
    model = small_net()
    addresses = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(error, match=message):
        tw.Engine(model, optimizer(model), clip_norm=2.0)
    assert [p.data_ptr() for p in model.parameters()] == addresses


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (nn.ReLU(), ValueError, "at least one parameter"),
        ("model", TypeError, r"expected a torch\.nn\.Module, got str"),
        (nn.Linear(2, 2).half(), ValueError, "'weight'.*float32 parameters, got torch.float16"),
    ],
)
def test_models(model: nn.Module, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(model)


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (lambda output: 0.5, TypeError, "expected a scalar tensor, got float"),
        (lambda output: output, ValueError, r"expected a scalar, got shape \(8, 10\).*mean"),
        (lambda output: output.mean().detach(), ValueError, "no graph"),
        (lambda output: None, RuntimeError, "expected a backward before it"),
    ],
)
def test_losses(loss, error: type[Exception], message: str) -> None:  # type: ignore[no-untyped-def]
    model = small_net()
    with make(model) as engine:
        value = loss(engine(batches(1)[0][0]))
        before = bits(model)
        with pytest.raises(error, match=message):
            engine.step(value)
        assert bits(model) == before and engine.num_steps == 0


def test_step_without_backward_under_accumulation() -> None:
    with make(accumulate=2) as engine:
        x, y = batches(1)[0]
        F.cross_entropy(engine(x), y).backward()
        with pytest.raises(RuntimeError, match=r"engine\.backward\(loss\) before engine\.step"):
            engine.step()


def test_backward_twice_without_step() -> None:
    with make() as engine:
        x, y = batches(1)[0]
        engine.backward(F.cross_entropy(engine(x), y))
        with pytest.raises(RuntimeError, match="1 microbatches wait"):
            engine.backward(F.cross_entropy(engine(x), y))


@pytest.mark.parametrize(
    ("loader", "epochs", "error", "message"),
    [
        ([], 0, ValueError, "epochs: expected a whole number of at least 1, got 0"),
        ([], 2.0, ValueError, "epochs.*2.0"),
        (5, 1, TypeError, "loader: expected an iterable.*got int"),
        (iter([1]), 2, TypeError, "can be read once, but epochs=2"),
    ],
)
def test_batches(loader, epochs: int, error: type[Exception], message: str) -> None:  # type: ignore[no-untyped-def]
    with make() as engine, pytest.raises(error, match=message):
        engine.batches(loader, epochs)  # at the call, not at the first batch


def test_lr_that_becomes_nan_changes_nothing() -> None:
    model = small_net()
    with make(model) as engine:
        x, y = batches(1)[0]
        loss = F.cross_entropy(engine(x), y)
        before = bits(model)
        engine.optimizer.param_groups[0]["lr"] = float("nan")
        with pytest.raises(ValueError, match="param group 0: expected a number for lr, got NaN"):
            engine.step(loss)
        assert bits(model) == before


def test_run_that_is_a_file_leaves_the_model_alone(tmp_path: pathlib.Path) -> None:
    target = tmp_path / "run"
    target.write_text("mine")
    model = small_net()
    addresses = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(OSError, match=re.escape(str(target))):
        make(model, run=target)
    assert target.read_text() == "mine"
    assert [p.data_ptr() for p in model.parameters()] == addresses
    make(model).close()


def test_report_without_a_run() -> None:
    with make() as engine, pytest.raises(ValueError, match=r"keeps no record.*TRADEWIND_RUN"):
        engine.report()
