"""TensorBoard events, read back by TensorBoard."""

from __future__ import annotations

import errno
import io
import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.histogram import metadata as histogram_metadata
from tensorboard.plugins.text import metadata as text_metadata
from tensorboard.util import tensor_util

from tradewind.track import Histogram, Image, Run, open_metrics


def read(path: Path) -> EventAccumulator:
    everything = {"scalars": 0, "tensors": 0, "images": 0}
    accumulator = EventAccumulator(str(path / "events"), size_guidance=everything)
    return accumulator.Reload()


def scalars(path: Path, name: str) -> list[tuple[int, float]]:
    return [(each.step, each.value) for each in read(path).Scalars(name)]


def test_scalars(tmp_path: Path) -> None:
    with Run.open(tmp_path, config={}) as run:
        for step in range(50):
            run.log(step, {"loss": 1 / (step + 1), "val/accuracy": step / 64, "n": step})
        run.log(50, {"loss": math.nan, "n": 10**300, "vetoed": True})
    found = scalars(tmp_path, "loss")
    assert found[:50] == [(s, float(np.float32(1 / (s + 1)))) for s in range(50)]
    assert found[50][0] == 50 and math.isnan(found[50][1])
    assert scalars(tmp_path, "val/accuracy") == [(s, s / 64) for s in range(50)]
    assert scalars(tmp_path, "n")[50] == (50, math.inf)
    assert scalars(tmp_path, "vetoed") == [(50, 1.0)]


def test_one_event_holds_all_scalars_of_a_row(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto import event_pb2

    with Run.open(tmp_path, config={}) as run:
        run.log(7, {"a": 1.0})
        run.log(7, {"b": 2.0})
    (path,) = (tmp_path / "events").iterdir()
    events = [event_pb2.Event.FromString(raw) for raw in RawEventFileLoader(str(path)).Load()]
    assert events[0].file_version == "brain.Event:2"
    assert [(e.step, [v.tag for v in e.summary.value]) for e in events[1:]] == [(7, ["a", "b"])]
    (row,) = open_metrics(tmp_path).rows()
    assert events[1].wall_time == row["time"]


def test_text_is_for_the_text_plugin(tmp_path: Path) -> None:
    with Run.open(tmp_path, config={}) as run:
        run.log(3, {"sample": "Grüße\nworld", "odd": "\ud800"})
    found = read(tmp_path)
    (event,) = found.Tensors("sample")
    assert event.step == 3
    assert tensor_util.make_ndarray(event.tensor_proto).tolist() == ["Grüße\nworld".encode()]
    plugin = found.SummaryMetadata("sample").plugin_data
    assert plugin.plugin_name == text_metadata.PLUGIN_NAME
    assert text_metadata.parse_plugin_metadata(plugin.content).version == 0
    assert found.Tensors("odd")


def test_histograms_are_for_the_histogram_plugin(tmp_path: Path) -> None:
    data = np.random.default_rng(0).normal(size=1000)
    with Run.open(tmp_path, config={}) as run:
        run.log(3, {"weights": Histogram(data), "none": Histogram([])})
    found = read(tmp_path)
    (event,) = found.Tensors("weights")
    buckets = tensor_util.make_ndarray(event.tensor_proto)
    assert buckets.shape == (64, 3) and buckets[:, 2].sum() == 1000
    assert (buckets[0, 0], buckets[-1, 1]) == (data.min(), data.max())
    assert (buckets[1:, 0] == buckets[:-1, 1]).all()
    plugin = found.SummaryMetadata("weights").plugin_data
    assert plugin.plugin_name == histogram_metadata.PLUGIN_NAME
    assert histogram_metadata.parse_plugin_metadata(plugin.content).version == 0
    assert tensor_util.make_ndarray(found.Tensors("none")[0].tensor_proto).shape == (0, 3)


def test_pictures(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    with Run.open(tmp_path, config={}) as run:
        run.log(3, {"input": Image(pixels), "grey": Image(pixels[:, :, 0])})
    found = read(tmp_path)
    (event,) = found.Images("input")
    assert (event.step, event.height, event.width) == (3, 5, 7)
    decoded = np.array(PIL.Image.open(io.BytesIO(event.encoded_image_string)))
    assert (decoded == pixels).all()
    grey = PIL.Image.open(io.BytesIO(found.Images("grey")[0].encoded_image_string))
    assert (np.array(grey) == pixels[:, :, 0]).all()
    (row,) = open_metrics(tmp_path).rows()
    assert row["input"] == {"image": {"height": 5, "width": 7, "channels": 3}}


def test_a_later_attempt_replaces_events_as_it_does_rows(tmp_path: Path) -> None:
    with Run.open(tmp_path, config={}) as run:
        for step in range(10):
            run.log(step, {"loss": 1.0})
    with Run.open(tmp_path, config={}) as run:
        for step in range(6, 12):
            run.log(step, {"loss": 2.0})
    found = scalars(tmp_path, "loss")
    assert found == [(s, 1.0 if s < 6 else 2.0) for s in range(12)]
    assert found == [(s, v) for s, _, v in open_metrics(tmp_path).series("loss")]


def test_a_failed_write_leaves_whole_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.open(tmp_path, config={})
    run.log(1, {"loss": 1.0})
    run.flush()
    write = os.write
    (events,) = (tmp_path / "events").iterdir()
    size = events.stat().st_size

    def refuse(descriptor: int, data: Any) -> int:
        if os.path.realpath(f"/proc/self/fd/{descriptor}") != str(events.resolve()):
            return write(descriptor, data)
        if len(data) > 16:
            return write(descriptor, data[:16])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", refuse)
    run.log(2, {"loss": 2.0})
    with pytest.raises(OSError, match="No space"):
        run.flush()
    assert events.stat().st_size == size
    assert scalars(tmp_path, "loss") == [(1, 1.0)]
    monkeypatch.undo()
    run.log(3, {"loss": 3.0})
    run.close()
    assert scalars(tmp_path, "loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert open_metrics(tmp_path).series("loss").steps.tolist() == [1, 2, 3]


def test_without_tensorboard_the_metrics_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    run = Run.open(tmp_path, config={})
    run.log(1, {"loss": 1.0})
    with pytest.warns(UserWarning, match="no TensorBoard events"):
        run.flush()
    run.log(2, {"loss": 2.0})
    run.close()
    assert open_metrics(tmp_path).series("loss").steps.tolist() == [1, 2]
    assert not (tmp_path / "events").exists()
