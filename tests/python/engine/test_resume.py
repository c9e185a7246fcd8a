"""N updates are k updates, an end of any kind, and N - k updates: byte by byte."""

from __future__ import annotations

import json
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import resuming
from engine.resuming import STEPS, Lost, differing, make_engine, net, train

import tradewind as tw
from tradewind.checkpoint import CheckpointError, StateMismatchError

KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "clipped": {"clip_norm": 0.5},
    "accumulated": {"accumulate": 3},
    "in backward": {"update": "in-backward"},
    "SGD": {"recipe": "SGD"},
    "LAMB": {"recipe": "LAMB"},
    "Muon": {"recipe": "Muon"},
    "amp-bf16": {"precision": "amp-bf16"},
    "amp-fp16": {
        "precision": "amp-fp16",
        "loss_scale": tw.LossScale(initial=2.0**20, growth_interval=3),
    },
    "bf16": {"precision": "bf16"},
    "bf16 accumulated": {"precision": "bf16", "accumulate": 2},
    "bf16 SGD": {"precision": "bf16", "recipe": "SGD"},
    "bf16 Muon": {"precision": "bf16", "recipe": "Muon"},
    "split": {"precision": "bf16", "masters": "split"},
    "fp16": {"precision": "fp16", "loss_scale": tw.LossScale(initial=2.0**18, growth_interval=3)},
    "bf16 state": {"state_dtype": "bf16"},
    "8-bit state": {"state_dtype": "8bit"},
    "8-bit state, split": {"precision": "bf16", "masters": "split", "state_dtype": "8bit"},
}


@pytest.mark.filterwarnings("ignore:step .*vetoed|step .*skipped")
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_to_the_same_bits(tmp_path: Path, kind: str) -> None:
    options = KINDS[kind]
    expected = train(tmp_path / "whole", **options)
    num_updates = expected["steps"]
    k = num_updates // 2
    with pytest.raises(Lost):
        train(tmp_path / "lost", save_at=k, lose_at=k + 2, **options)
    found = train(tmp_path / "lost", resume="must", **options)
    assert differing(found, expected) == []


def test_saving_changes_nothing(tmp_path: Path) -> None:
    assert differing(train(tmp_path / "a", every=1), train(tmp_path / "b")) == []


def test_a_schedule_and_an_average_are_as_of_the_save(tmp_path: Path) -> None:
    # A save that is due by count is made once the loop's body is done: schedule.step() included.
    expected = train(tmp_path / "whole")
    with pytest.raises(Lost):
        train(tmp_path / "lost", every=5, lose_at=13)
    with pytest.raises(Lost):  # a second time, from step 10
        train(tmp_path / "lost", every=5, lose_at=17)
    assert tw.Checkpointer(tmp_path / "lost").steps() == [5, 10, 15]
    assert differing(train(tmp_path / "lost", resume="must"), expected) == []


def run_script(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, resuming.__file__, str(folder), str(folder) + ".result", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("whole") / "checkpoints"
    done = run_script(folder)
    assert done.returncode == 0, done.stderr
    return pickle.loads(Path(f"{folder}.result").read_bytes())


def test_a_killed_process_goes_on(tmp_path: Path, uninterrupted: Any) -> None:
    folder = tmp_path / "checkpoints"
    killed = run_script(folder, "SIGKILL", "11")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    # The save of step 9 may or may not have been done; that of step 6 was waited for by it.
    assert tw.Checkpointer(folder).steps()[-1] in (6, 9)
    done = run_script(folder)
    assert done.returncode == 0, done.stderr
    assert "goes on from step" in done.stderr
    found = pickle.loads(Path(f"{folder}.result").read_bytes())
    assert differing(found, uninterrupted) == []


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_notice_ends_with_a_last_save_and_75(
    tmp_path: Path, uninterrupted: Any, name: str
) -> None:
    folder = tmp_path / "checkpoints"
    told = run_script(folder, name, "11")
    assert told.returncode == 75, told.stderr
    assert f"{name}: step 11 is saved" in told.stderr and "resume me" in told.stderr
    attempt = json.loads(Path(f"{folder}-run/run.json").read_text())["attempts"][-1]
    assert attempt["status"] == "stopped" and "resume me" in attempt["error"]
    assert tw.Checkpointer(folder).steps()[-1] == 11
    done = run_script(folder)
    assert done.returncode == 0 and "goes on from step 11" in done.stderr, done.stderr
    found = pickle.loads(Path(f"{folder}.result").read_bytes())
    assert differing(found, uninterrupted) == []


def test_a_finished_run_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    expected = train(tmp_path)
    assert tw.Checkpointer(tmp_path).steps() == [STEPS]
    capfd.readouterr()
    found = train(tmp_path)
    text = capfd.readouterr().err
    assert f"goes on from step {STEPS}" in text and "had finished" in text
    assert found["state"] == expected["state"] and found["steps"] == STEPS
    assert tw.Checkpointer(tmp_path).steps() == [STEPS]


def test_the_line_names_step_age_and_changes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Lost):
        train(tmp_path, save_at=4, lose_at=4)
    capfd.readouterr()
    make_engine(tmp_path, clip_norm=0.25).close()
    text = capfd.readouterr().err
    assert "goes on from step 4" in text and " s ago" in text
    assert "changed: clip_norm None -> 0.25" in text


def test_resume_never_refuses_a_directory_with_checkpoints(tmp_path: Path) -> None:
    train(tmp_path, resume="never")
    with pytest.raises(ValueError, match=rf"resume='never'.*step {STEPS}.*resume='auto'"):
        make_engine(tmp_path, resume="never")
    make_engine(tmp_path).close()


def test_resume_must_refuses_to_start_anew(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="resume='must': there is no checkpoint in"):
        make_engine(tmp_path / "none", resume="must")
    assert not (tmp_path / "none").exists()


def test_without_a_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TRADEWIND_RUN", raising=False)
    monkeypatch.delenv("TRADEWIND_CHECKPOINT_DIR", raising=False)
    with pytest.raises(ValueError, match=r"pass tw.Checkpoint\(path=.*run='runs/NAME'"):
        tw.Engine(net(), tw.SGD(lr=0.1), checkpoint=tw.Checkpoint())
    options = {"checkpoint": tw.Checkpoint(notices="off")}
    with tw.Engine(net(), tw.SGD(lr=0.1), run=tmp_path / "run", **options) as engine:
        assert engine.stats()["checkpoint"]["path"] == str(tmp_path / "run" / "checkpoints")
    monkeypatch.setenv("TRADEWIND_CHECKPOINT_DIR", str(tmp_path / "place"))
    with tw.Engine(net(), tw.SGD(lr=0.1), run=tmp_path / "run", **options) as engine:
        assert engine.stats()["checkpoint"]["path"] == str(tmp_path / "place")


def test_another_model_is_named(tmp_path: Path) -> None:
    with make_engine(tmp_path) as engine:
        engine.save().wait(120)
    model = net()
    model[7] = torch.nn.Linear(32, 11)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(StateMismatchError) as caught:
        tw.Engine(model, tw.AdamW(lr=1e-2), checkpoint=tw.Checkpoint(path=tmp_path, notices="off"))
    text = str(caught.value)
    assert "'7.weight': expected shape (11, 32), was (10, 32)" in text
    assert "partial=True" in text and "Nothing was changed" in text
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    # The model is free again, and the way that the message names works.
    with tw.Checkpointer(tmp_path) as checkpointer:
        checkpointer.restore({"model": model}, partial=True)
        assert any("7.weight" in text for text in checkpointer.not_restored)
    tw.Engine(model, tw.AdamW(lr=1e-2)).close()


def test_a_state_of_somebody_else_is_refused(tmp_path: Path) -> None:
    with tw.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"weights": torch.ones(3)}, step=1).wait(120)
    with pytest.raises(StateMismatchError, match="expected the state of an Engine"):
        make_engine(tmp_path)


def test_two_engines_on_one_directory(tmp_path: Path) -> None:
    with make_engine(tmp_path):
        model = net()
        with pytest.raises(CheckpointError, match=r"owns|in use|live"):
            tw.Engine(model, tw.SGD(lr=0.1), checkpoint=tw.Checkpoint(tmp_path, notices="off"))
        tw.Engine(model, tw.SGD(lr=0.1)).close()


def test_another_rule_starts_its_state_anew(tmp_path: Path) -> None:
    with pytest.raises(Lost):
        train(tmp_path, save_at=4, lose_at=4)
    with (
        pytest.warns(RuntimeWarning, match="was AdamW's, the Engine has SGD"),
        make_engine(tmp_path, recipe="SGD") as engine,
    ):
        assert engine.num_steps == 4


class TestSchedules:
    def lose(self, folder: Path) -> float:
        with pytest.raises(Lost):
            train(folder, save_at=9, lose_at=9)
        return 0.5e-2 * (1 + torch.cos(torch.tensor(torch.pi * 9 / STEPS)).item())

    def test_an_untracked_one_warns_by_name(self, tmp_path: Path) -> None:
        self.lose(tmp_path)
        engine = make_engine(tmp_path)
        torch.optim.lr_scheduler.CosineAnnealingLR(engine.optimizer, T_max=STEPS)
        schedule = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.9)
        x, y = torch.randn(4, 3, 8, 8), torch.zeros(4, dtype=torch.long)
        with pytest.warns(RuntimeWarning, match="ExponentialLR are not tracked: this run goes on"):
            engine.step(torch.nn.functional.cross_entropy(engine(x), y))
        engine.close()
        del schedule

    def test_a_tracked_one_goes_on(self, tmp_path: Path) -> None:
        expected = self.lose(tmp_path)
        with make_engine(tmp_path) as engine:
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(engine.optimizer, T_max=STEPS)
            engine.track(schedule=schedule)
            assert schedule.last_epoch == 9
            assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(expected, rel=1e-6)

    def test_one_that_changes_lr_when_it_is_made(self, tmp_path: Path) -> None:
        def make(folder: Path) -> Any:
            engine = make_engine(folder)
            schedule = torch.optim.lr_scheduler.LinearLR(engine.optimizer, 0.25, total_iters=8)
            engine.track(schedule=schedule)
            return engine, schedule

        engine, schedule = make(tmp_path)
        x, y = torch.randn(4, 3, 8, 8), torch.zeros(4, dtype=torch.long)
        for _ in range(4):
            engine.step(torch.nn.functional.cross_entropy(engine(x), y))
            schedule.step()
        expected = engine.optimizer.param_groups[0]["lr"]
        assert expected == pytest.approx(1e-2 * (0.25 + 0.75 * 4 / 8))
        engine.close()
        engine, _ = make(tmp_path)
        assert engine.optimizer.param_groups[0]["lr"] == expected
        engine.close()

    def test_one_in_a_sequence_is_tracked_with_it(self, tmp_path: Path) -> None:
        from tradewind.engine.schedulers import untracked_schedulers

        with make_engine(tmp_path) as engine:
            optimizer = engine.optimizer
            parts = [
                torch.optim.lr_scheduler.LinearLR(optimizer),
                torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
            ]
            whole = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [3])
            assert untracked_schedulers(optimizer, []) == ["SequentialLR"]
            assert untracked_schedulers(optimizer, [whole]) == []
