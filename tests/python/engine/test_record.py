"""What the Engine writes into a run directory, read back by the run's own readers."""

from __future__ import annotations

import json
import math
import pathlib
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from engine.models import batches, small_net

import tradewind as tw
from tradewind.track import current_run, open_metrics, read_run


def train(path: pathlib.Path, steps: int = 4) -> list[tw.StepResult]:
    with tw.Engine(small_net(), tw.AdamW(lr=1e-3), clip_norm=0.5, run=path) as engine:
        results = []
        for x, y in engine.batches(batches(steps), progress="off"):
            logits = engine(x)
            engine.log(accuracy=(logits.argmax(1) == y).float().mean())
            results.append(engine.step(F.cross_entropy(logits, y)))
        engine.log(test_accuracy=0.5)
    return results


def series(path: pathlib.Path, name: str) -> dict[int, float]:
    found = open_metrics(path).series(name)
    return dict(zip(found.steps, found.values, strict=True))


def test_each_step_has_its_row(tmp_path: pathlib.Path) -> None:
    results = train(tmp_path / "run")
    for name, expected in {
        "loss": [r.loss for r in results],
        "grad_norm": [r.grad_norm for r in results],
        "clip_factor": [r.clip_factor for r in results],
        "lr": [1e-3] * 4,
        "vetoed": [0] * 4,
        "hot_gradients": [5] * 4,
    }.items():
        assert series(tmp_path / "run", name) == dict(enumerate(expected, start=1)), name
    assert set(series(tmp_path / "run", "accuracy")) == {1, 2, 3, 4}
    assert series(tmp_path / "run", "test_accuracy") == {4: 0.5}
    assert all(rate > 0 for rate in series(tmp_path / "run", "samples_per_s").values())


def test_record_says_what_ran(tmp_path: pathlib.Path) -> None:
    torch.manual_seed(7)
    with tw.Engine(small_net(7), tw.AdamW(lr=1e-3), accumulate=2, run=tmp_path / "run"):
        pass
    attempt = json.loads((tmp_path / "run" / "run.json").read_text())["attempts"][-1]
    assert attempt["status"] == "finished"
    assert attempt["seed"] == 7
    config = attempt["config"]
    assert config["optimizer"] == "AdamW" and config["accumulate"] == 2
    assert config["param_groups"][0]["lr"] == 1e-3
    assert torch.__version__.startswith(attempt["versions"]["torch"])


def test_environment_overrides_the_directory(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRADEWIND_RUN", str(tmp_path / "elsewhere"))
    train(tmp_path / "here")
    assert (tmp_path / "elsewhere" / "run.json").exists() and not (tmp_path / "here").exists()


def test_two_engines_cannot_own_one_run(tmp_path: pathlib.Path) -> None:
    with tw.Engine(small_net(), tw.SGD(lr=0.1), run=tmp_path / "run"):
        other = small_net()
        with pytest.raises(RuntimeError, match="run"):
            tw.Engine(other, tw.SGD(lr=0.1), run=tmp_path / "run")
        tw.Engine(other, tw.SGD(lr=0.1)).close()


def test_a_refused_model_ends_the_run_as_failed(tmp_path: pathlib.Path) -> None:
    whole = torch.randn(4)
    model = torch.nn.ParameterList([torch.nn.Parameter(whole), torch.nn.Parameter(whole)])
    with pytest.raises(ValueError, match="share memory"):
        tw.Engine(model, tw.SGD(lr=0.1), run=tmp_path / "run")
    attempt = json.loads((tmp_path / "run" / "run.json").read_text())["attempts"][-1]
    assert attempt["status"] == "failed" and "share memory" in attempt["error"]


def test_an_exception_in_the_loop_is_recorded(tmp_path: pathlib.Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        tw.Engine(small_net(), tw.SGD(lr=0.1), run=tmp_path / "run"),
    ):
        1 / 0  # noqa: B018
    attempt = json.loads((tmp_path / "run" / "run.json").read_text())["attempts"][-1]
    assert attempt["status"] == "failed" and "ZeroDivisionError" in attempt["error"]


def test_vetoed_steps_are_marked(tmp_path: pathlib.Path) -> None:
    with tw.Engine(small_net(), tw.SGD(lr=0.1), run=tmp_path / "run") as engine:
        x, y = batches(1)[0]
        with pytest.warns(RuntimeWarning, match="skipped"):
            engine.step(F.cross_entropy(engine(x), y) * float("nan"))
    assert series(tmp_path / "run", "vetoed") == {1: 1}
    assert math.isnan(series(tmp_path / "run", "loss")[1])


def test_report_is_drawn_while_the_run_lives(tmp_path: pathlib.Path) -> None:
    with tw.Engine(small_net(), tw.SGD(lr=0.1), run=tmp_path / "run") as engine:
        x, y = batches(1)[0]
        engine.step(F.cross_entropy(engine(x), y))
        page = engine.report()
        assert "running" in page.read_text()
    assert "finished" in page.read_text()  # drawn once more at the end
    assert engine.report() == page
    assert page == tmp_path / "run" / "report.html"
    text = page.read_text()
    assert "<svg" in text and "http://" not in text.replace("http://www.w3.org", "")


def test_module_level_log_reaches_the_live_run(tmp_path: pathlib.Path) -> None:
    with tw.Engine(small_net(), tw.SGD(lr=0.1), run=tmp_path / "run") as engine:
        x, y = batches(1)[0]
        loss = F.cross_entropy(engine(x), y)
        tw.log(extra=3.0)
        engine.step(loss)
    assert series(tmp_path / "run", "extra") == {1: 3.0}
    assert current_run() is None
    with pytest.raises(RuntimeError, match="live run"):
        tw.log(extra=1.0)


def test_a_script_that_never_closes_leaves_a_finished_record(tmp_path: pathlib.Path) -> None:
    code = f"""
import torch, tradewind as tw
engine = tw.Engine(torch.nn.Linear(2, 1), tw.SGD(lr=0.1), run={str(tmp_path / "run")!r})
for x in engine.batches([torch.ones(3, 2)] * 5, progress="lines"):
    engine.step(engine(x).mean())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert read_run(tmp_path / "run").attempts[-1]["status"] == "finished"
    assert set(series(tmp_path / "run", "loss")) == {1, 2, 3, 4, 5}
    assert "5/5" in done.stderr or "step 5" in done.stderr


@pytest.mark.parametrize("every", [1, 4])
def test_the_loss_of_an_update_is_the_mean_of_its_microbatches(
    tmp_path: pathlib.Path, every: int
) -> None:
    with tw.Engine(
        small_net(), tw.SGD(lr=0.0), accumulate=every, run=tmp_path / f"run{every}"
    ) as engine:
        losses = []
        for x, y in batches(4):
            loss = F.cross_entropy(engine(x), y)
            losses.append(loss.item())
            engine.step(loss)
    logged = series(tmp_path / f"run{every}", "loss")
    groups = [losses[i : i + every] for i in range(0, 4, every)]
    assert logged == pytest.approx(
        {i: sum(group) / every for i, group in enumerate(groups, start=1)}, rel=1e-6
    )
