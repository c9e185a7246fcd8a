"""What saves do to training, and training to saves."""

from __future__ import annotations

import errno
import functools
import threading
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine.models import batches
from engine.resuming import make_engine, net

import tradewind as tw
from tradewind._core import native
from tradewind.checkpoint import CheckpointError
from tradewind.engine import checkpointing
from tradewind.report import write_report
from tradewind.track import open_metrics


class Held:
    """The writing of saves waits until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    made = Held()
    original = native.ShardWriter.start

    def start(self: native.ShardWriter, *args: Any, **options: Any) -> Any:
        assert made.go.wait(120)
        return original(self, *args, **options)

    monkeypatch.setattr(native.ShardWriter, "start", start)
    yield made
    made.go.set()


def step(engine: Any, seed: int = 1) -> Any:
    x, y = batches(1, seed=seed)[0]
    return engine.step(F.cross_entropy(engine(x), y))


def newest(folder: Path) -> Any:
    with tw.Checkpointer(folder) as checkpointer:
        return checkpointer.load()


def test_arenas_are_written_from_where_they_lie(tmp_path: Path) -> None:
    with make_engine(tmp_path) as engine:
        step(engine)
        save = engine.save()
        save.wait(120)
        elements = sum(p.numel() for p in engine.model.parameters())
        # Parameters, and two states each, in float32.
        assert save.in_place_bytes == 3 * 4 * elements
        assert save.copied_bytes < 64 * 1024  # buffers, counts, random states


def test_what_was_saved_is_the_state_of_that_update(tmp_path: Path) -> None:
    with make_engine(tmp_path) as engine:
        step(engine)
        expected = {name: value.clone() for name, value in engine.model.state_dict().items()}
        save = engine.save()
        step(engine)  # waits, range by range, for what is not written yet
        save.wait(120)
        _, state = newest(tmp_path)
        for name, value in expected.items():
            assert torch.equal(state["model"][name], value), name


class TestForeignEdits:
    def test_one_in_place_fails_that_save_by_name(self, tmp_path: Path, held: Held) -> None:
        with make_engine(tmp_path) as engine:
            step(engine)
            save = engine.save()
            with torch.no_grad():
                engine.model[5].weight.mul_(2.0)
            held.go.set()
            with pytest.raises(CheckpointError, match=r"step 1: model\.5\.weight changed in place"):
                save.wait(120)
            with pytest.warns(RuntimeWarning, match=r"step 1 failed.*model\.5\.weight"):
                step(engine)
            stats = engine.stats()["checkpoint"]
            assert stats["num_failed"] == 1 and "model.5.weight" in stats["error"]
            engine.save().wait(120)
        assert tw.Checkpointer(tmp_path).steps() == [2]

    def test_one_before_the_next_update_is_found_by_it(self, tmp_path: Path, held: Held) -> None:
        with make_engine(tmp_path) as engine:
            step(engine)
            save = engine.save()
            with torch.no_grad():
                engine.model[5].weight.mul_(2.0)
            engine._checkpoints.before_update()  # as the update does before it writes
            held.go.set()
            with pytest.raises(CheckpointError, match=r"model\.5\.weight changed in place"):
                save.wait(120)
            with pytest.warns(RuntimeWarning, match="step 1 failed"):
                step(engine)

    def test_the_engines_own_updates_are_none(self, tmp_path: Path) -> None:
        with make_engine(tmp_path) as engine:
            for _ in range(4):
                step(engine)
                engine.save()
            engine.save().wait(120)
            assert engine.stats()["checkpoint"]["num_failed"] == 0

    def test_edit_parameters_waits_for_the_writer(self, tmp_path: Path) -> None:
        with make_engine(tmp_path) as engine:
            step(engine)
            before = engine.model[5].weight.detach().clone()
            save = engine.save()
            with engine.edit_parameters(), torch.no_grad():
                engine.model[5].weight.mul_(2.0)
            save.wait(120)
            assert torch.equal(newest(tmp_path)[1]["model"]["5.weight"], before)

    def test_loading_a_state_dict_waits_for_the_writer(self, tmp_path: Path) -> None:
        with make_engine(tmp_path) as engine:
            other = engine.state_dict()
            other = {**other, "model": {k: v.clone() for k, v in other["model"].items()}}
            step(engine)
            before = engine.model[5].weight.detach().clone()
            save = engine.save()
            engine.load_state_dict(other)
            save.wait(120)
            assert torch.equal(newest(tmp_path)[1]["model"]["5.weight"], before)

    @pytest.mark.parametrize("paranoid", [False, True])
    def test_one_through_data_is_found_by_the_paranoid(
        self, tmp_path: Path, held: Held, paranoid: bool
    ) -> None:
        options = tw.Checkpoint(tmp_path, notices="off", paranoid=paranoid)
        engine = tw.Engine(net(), tw.AdamW(lr=1e-2), checkpoint=options)
        step(engine)
        save = engine.save()
        engine.model[5].weight.data.view(-1)[0] += 1.0
        held.go.set()
        if paranoid:
            with pytest.raises(CheckpointError, match=r"model\.5\.weight changed in place"):
                save.wait(120)
        else:
            save.wait(120)
        engine._abort(RuntimeError("the test is over"))


class TestFailures:
    @pytest.fixture
    def env(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        env = native.RecordingEnv(keep_data=False)
        made = functools.partial(checkpointing.Checkpointer, env=env)
        monkeypatch.setattr(checkpointing, "Checkpointer", made)
        return env

    def test_a_full_disk_is_an_event(self, tmp_path: Path, env: Any) -> None:
        with make_engine(tmp_path / "c", every=2, run=tmp_path / "run") as engine:
            step(engine)
            env.inject(0, errno.ENOSPC, sticky=True)
            step(engine)  # due
            engine._boundary()
            engine._checkpoints._save._done.wait(120)
            with pytest.warns(RuntimeWarning, match=r"step 2 failed.*after 2 steps"):
                step(engine)
            step(engine)
            engine._boundary()
            engine._checkpoints._save._done.wait(120)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                step(engine)  # said once
            stats = engine.stats()["checkpoint"]
            assert stats["num_failed"] == 2 and stats["num_saved"] == 0
            assert "No space left" in stats["error"] and stats["age_s"] is None
            env.heal()  # the disk has room again
            step(engine)
            engine._boundary()
            engine._checkpoints._save.wait(120)
            stats = engine.stats()["checkpoint"]
            assert stats["num_saved"] == 1 and stats["step"] == 6 and stats["age_s"] >= 0
        assert tw.Checkpointer(tmp_path / "c").steps() == [6]
        failed = open_metrics(tmp_path / "run").series("checkpoint_failed")
        assert dict(zip(failed.steps, failed.values, strict=True)) == {2: 1, 4: 1}

    def test_an_error_of_training_waits_for_the_save_under_way(self, tmp_path: Path) -> None:
        with pytest.raises(ZeroDivisionError), make_engine(tmp_path) as engine:
            step(engine)
            engine.save()
            1 / 0  # noqa: B018
        assert tw.Checkpointer(tmp_path).steps() == [1]

    def test_an_error_of_training_does_not_wait_for_ever(
        self, tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from tradewind.engine import engine as engines

        monkeypatch.setattr(engines, "PATIENCE_AT_ERROR", timedelta(seconds=0.2))
        with pytest.raises(ZeroDivisionError), make_engine(tmp_path) as engine:
            step(engine)
            save = engine.save()
            # Let the writer go once the Engine has given the save up.
            watch = threading.Thread(target=lambda: (_until_failed(save), held.go.set()))
            watch.start()
            1 / 0  # noqa: B018
        watch.join(120)
        assert tw.Checkpointer(tmp_path).steps() == []


def _until_failed(save: Any) -> None:
    while save._failure is None and not save.is_done:
        save._done.wait(0.01)


class TestWhen:
    def saved(self, folder: Path, count: int, **options: Any) -> list[int]:
        with make_engine(folder, **options) as engine:
            for x, y in engine.batches(batches(count), progress="off"):
                engine.step(F.cross_entropy(engine(x), y))
        return tw.Checkpointer(folder).steps()

    def test_by_count(self, tmp_path: Path) -> None:
        assert self.saved(tmp_path, 7, every=3) == [3, 6, 7]

    def test_by_time(self, tmp_path: Path) -> None:
        assert self.saved(tmp_path, 3, every=timedelta(microseconds=1)) == [1, 2, 3]

    def test_never_between_microbatches(self, tmp_path: Path) -> None:
        assert self.saved(tmp_path, 10, every=2, accumulate=3) == [2, 4]  # the last one is short
        with make_engine(tmp_path / "other", accumulate=2) as engine:
            step(engine)
            with pytest.raises(RuntimeError, match="1 of 2 microbatches wait for their update"):
                engine.save()

    def test_in_a_loop_without_batches(self, tmp_path: Path) -> None:
        with make_engine(tmp_path, every=2) as engine:
            for seed in range(5):
                step(engine, seed)
        assert tw.Checkpointer(tmp_path).steps() == [2, 4, 5]

    def test_in_a_loop_that_was_left_and_is_held(self, tmp_path: Path) -> None:
        with make_engine(tmp_path, every=2) as engine:
            left = engine.batches(batches(3), progress="off")
            next(left)
            for seed in range(5):
                step(engine, seed)
            left.close()
        assert tw.Checkpointer(tmp_path).steps() == [3, 5]

    def test_an_evaluation_inside_does_not_save_half_a_body(self, tmp_path: Path) -> None:
        with make_engine(tmp_path, every=1) as engine:
            for x, y in engine.batches(batches(2), progress="off"):
                engine.step(F.cross_entropy(engine(x), y))
                for a, _ in engine.batches(batches(2, seed=5), progress="off"):
                    with torch.no_grad():
                        engine(a)
                assert engine._checkpoints._last_step == engine.num_steps - 1 or (
                    engine.num_steps == 1 and engine._checkpoints._last_step == -1
                )
        assert tw.Checkpointer(tmp_path).steps() == [1, 2]

    def test_without_checkpoints_there_is_nothing_to_save(self) -> None:
        engine = tw.Engine(net(), tw.SGD(lr=0.1))
        with pytest.raises(RuntimeError, match=r"pass checkpoint=tw\.Checkpoint\(\)"):
            engine.save()
        assert "checkpoint" not in engine.stats()
        engine.close()


def test_what_the_record_and_the_statistics_say(tmp_path: Path) -> None:
    with make_engine(tmp_path / "c", every=2, run=tmp_path / "run") as engine:
        assert engine.stats()["checkpoint"]["step"] is None
        for seed in range(4):
            step(engine, seed)
        engine._boundary()
        engine._checkpoints._save.wait(120)
        stats = engine.stats()["checkpoint"]
        assert stats["step"] == 4 and stats["num_saved"] == 2 and stats["num_failed"] == 0
        assert stats["stall_s"] > 0 and stats["durable_s"] > 0 and stats["every"] == "2 steps"
    metrics = open_metrics(tmp_path / "run")
    for name in ("checkpoint_stall_s", "checkpoint_durable_s", "checkpoint_MB"):
        assert list(metrics.series(name).steps) == [2, 4], name
    text = write_report(tmp_path / "run").read_text()
    assert "stall of a checkpoint, median" in text and "until it is durable" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every: expected"),
        ({"every": "often"}, "every: expected"),
        ({"keep": 0}, "keep: expected a whole number of at least 1"),
        ({"keep_every": 1.5}, "keep_every: expected a whole number"),
        ({"notices": "loud"}, "notices: expected one of auto, signals, off"),
        ({"path": ""}, "path: expected a directory"),
        ({"timeout": timedelta(0)}, "timeout: expected a duration above 0"),
        ({"mean_time_between_failures": timedelta(0)}, "expected a duration above 0"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tw.Checkpoint(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": 600}, "timeout: expected a datetime.timedelta"),
        ({"spot": "yes"}, "spot: expected True or False"),
        ({"paranoid": None}, "paranoid: expected True or False"),
    ],
)
def test_options_of_another_type(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        tw.Checkpoint(**options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"checkpoint": 3}, TypeError, "checkpoint: expected a tw.Checkpoint, a directory"),
        ({"resume": "maybe"}, ValueError, "resume: expected one of auto, must, never"),
        ({"resume": "must"}, ValueError, "without checkpoint="),
    ],
)
def test_engine_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    model = net()
    with pytest.raises(error, match=message):
        tw.Engine(model, tw.SGD(lr=0.1), **options)
    tw.Engine(model, tw.SGD(lr=0.1)).close()


def test_a_path_that_is_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    model = net()
    with pytest.raises((CheckpointError, OSError)):
        tw.Engine(model, tw.SGD(lr=0.1), checkpoint=tw.Checkpoint(tmp_path / "file", notices="off"))
    assert (tmp_path / "file").read_text() == "mine"
    tw.Engine(model, tw.SGD(lr=0.1)).close()


def test_a_path_alone_says_where(tmp_path: Path) -> None:
    for path in (tmp_path / "c", str(tmp_path / "c")):
        with tw.Engine(net(), tw.SGD(lr=0.1), checkpoint=path) as engine:
            assert engine.stats()["checkpoint"]["path"] == str(tmp_path / "c")
