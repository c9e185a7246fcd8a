"""What may be logged, and what it is when read back."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tradewind.track import Histogram, Image, Run, open_metrics
from tradewind.track.rows import Row
from tradewind.track.segments import SegmentWriter, read_segment


def read_back(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    with Run.open(path, config={}) as run:
        run.log(1, values)
    (row,) = open_metrics(path).rows()
    return row


def test_numbers_of_all_kinds(tmp_path: Path) -> None:
    row = read_back(
        tmp_path,
        {
            "float": 0.1,
            "int": 7,
            "bool": True,
            "float32": np.float32(0.1),
            "float16": np.float16(1.5),
            "int64": np.int64(2**60),
            "numpy_bool": np.bool_(False),
            "array": np.array(3.0),
            "tensor": torch.tensor(0.1),
            "bfloat16": torch.tensor(1.5, dtype=torch.bfloat16),
            "integers": torch.tensor(2**62 + 1),
            "truth": torch.tensor(True),
            "shape_one": torch.tensor([[2.5]]),
            "huge": 10**400,
            "beyond_int64": 2**63,
        },
    )
    assert row["float"] == 0.1
    assert row["int"] == 7 and type(row["int"]) is int
    assert row["bool"] is True and row["numpy_bool"] is False and row["truth"] is True
    assert row["float32"] == float(np.float32(0.1)) == row["tensor"]
    assert row["float16"] == row["bfloat16"] == 1.5
    assert row["int64"] == 2**60 and row["integers"] == 2**62 + 1
    assert row["array"] == 3.0 and row["shape_one"] == 2.5
    assert row["huge"] == math.inf and row["beyond_int64"] == 2.0**63


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.dictionaries(
            st.text(min_size=1).filter(lambda name: name not in ("step", "time", "attempt")),
            st.floats(width=64) | st.integers(-(2**63), 2**63 - 1) | st.booleans(),
            max_size=4,
        ),
        min_size=1,
        max_size=4,
    )
)
def test_any_number_survives_a_segment(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]
) -> None:
    writer = SegmentWriter(tmp_path_factory.mktemp("run"), attempt=3)
    path = writer.write([Row(step, 0.5 + step, values) for step, values in enumerate(rows)])
    found = read_segment(path)
    assert [(row["step"], row["time"], row["attempt"]) for row in found] == [
        (step, 0.5 + step, 3) for step in range(len(rows))
    ]
    for row, values in zip(found, rows, strict=True):
        for name, value in values.items():
            same = value == row[name] or (math.isnan(value) and math.isnan(row[name]))
            assert same and type(value) is type(row[name])
            assert math.copysign(1, value) == math.copysign(1, row[name]) or math.isnan(value)


def test_text_that_reads_like_a_number_stays_text(tmp_path: Path) -> None:
    row = read_back(tmp_path, {"a": "NaN", "b": "true", "c": "1", "d": float("nan"), "e": "\ud800"})
    assert (
        row["a"] == {"text": "NaN"} and row["b"] == {"text": "true"} and row["c"] == {"text": "1"}
    )
    assert math.isnan(row["d"]) and row["e"] == {"text": "\ud800"}
    assert open_metrics(tmp_path).names() == ["d"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1.0], "list"),
        (None, "NoneType"),
        (1 + 2j, "complex"),
        (np.zeros(3), "shape [3]"),
        (np.datetime64("2020-01-01"), "datetime64"),
        (torch.zeros(2, 3), "shape [2, 3]"),
        (torch.tensor(1j), "complex"),
        (torch.tensor(1.0, device="meta"), "real number"),
        ({"a": 1}, "dict"),
    ],
)
def test_other_types_are_refused_by_key(tmp_path: Path, value: object, words: str) -> None:
    with Run.open(tmp_path, config={}) as run:
        with pytest.raises(TypeError, match="'acc'") as caught:
            run.log(1, {"loss": 1.0, "acc": value})
        assert words in str(caught.value)
    assert list(open_metrics(tmp_path).rows()) == []


@pytest.mark.parametrize("name", ["", 3, None, b"loss"])
def test_names_are_non_empty_strings(tmp_path: Path, name: Any) -> None:
    with Run.open(tmp_path, config={}) as run, pytest.raises(TypeError, match="non-empty strings"):
        run.log(1, {name: 1.0})


@pytest.mark.parametrize("name", ["step", "time", "attempt"])
def test_the_columns_of_every_row_are_reserved(tmp_path: Path, name: str) -> None:
    with Run.open(tmp_path, config={}) as run, pytest.raises(ValueError, match=name):
        run.log(1, {name: 1.0})


@pytest.mark.parametrize(
    ("step", "error"), [(-1, ValueError), (1.0, TypeError), (True, TypeError), (2**63, ValueError)]
)
def test_steps_are_counts(tmp_path: Path, step: Any, error: type[Exception]) -> None:
    with Run.open(tmp_path, config={}) as run, pytest.raises(error, match="step"):
        run.log(step, {"loss": 1.0})
    with Run.open(tmp_path, config={}) as run:
        run.log(np.int64(3), {"loss": 1.0})
    assert open_metrics(tmp_path).series("loss").steps.tolist() == [3]


class Lazy:
    """Stands for a tensor on a device: reading it is counted."""

    shape = ()
    num_reads = 0

    def __init__(self, value: float) -> None:
        self.value = value

    def detach(self) -> Lazy:
        return self

    def item(self) -> float:
        Lazy.num_reads += 1
        if self.value < 0:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return self.value


def test_tensors_are_read_at_a_flush_only(tmp_path: Path) -> None:
    Lazy.num_reads = 0
    with Run.open(tmp_path, config={}) as run:
        run.log(1, {"a": Lazy(2.0), "b": Lazy(3.0)})
        assert Lazy.num_reads == 0
        run.flush()
        assert Lazy.num_reads == 2
    assert open_metrics(tmp_path).series("b").values.tolist() == [3.0]


def test_a_tensor_changed_after_it_was_logged_keeps_its_value(tmp_path: Path) -> None:
    total = torch.zeros(())
    with Run.open(tmp_path, config={}) as run:
        for step in range(3):
            total += 1
            run.log(step, {"total": total})
    assert open_metrics(tmp_path).series("total").values.tolist() == [1.0, 2.0, 3.0]


def test_logging_keeps_no_graph(tmp_path: Path) -> None:
    with Run.open(tmp_path, config={}) as run:
        weight = torch.ones((), requires_grad=True)
        run.log(1, {"loss": weight * 2})
        _, _, values = run._writer._logged[0]
        assert not values["loss"].requires_grad


def test_a_dead_device_costs_its_numbers_only(tmp_path: Path) -> None:
    with Run.open(tmp_path, config={}) as run:
        run.log(1, {"loss": 1.0, "dead": Lazy(-1.0)})
        with pytest.warns(UserWarning, match="1 logged tensor.*dead"):
            run.flush()
    (row,) = open_metrics(tmp_path).rows()
    assert row["loss"] == 1.0 and "dead" not in row


def test_histogram_counts_as_numpy_does(tmp_path: Path) -> None:
    data = np.random.default_rng(0).normal(size=(50, 20)).astype(np.float32)
    data[0, :3] = [np.nan, np.inf, -np.inf]
    row = read_back(tmp_path, {"array": Histogram(data), "tensor": Histogram(torch.tensor(data))})
    assert row["array"] == row["tensor"]
    found = row["array"]["histogram"]
    assert found["non_finite"] == 3
    finite = data[np.isfinite(data)].astype(np.float64)
    assert sum(found["counts"]) == finite.size
    counts, _ = np.histogram(finite, bins=np.array(found["edges"]))
    assert counts.tolist() == found["counts"]
    assert (found["edges"][0], found["edges"][-1]) == (finite.min(), finite.max())


@pytest.mark.parametrize(
    ("values", "total", "non_finite"),
    [
        ([], 0, 0),
        ([2.0] * 5, 5, 0),
        ([float("nan")], 0, 1),
        ([-1.7e308, 1.7e308], 2, 0),
        ([1.0, math.nextafter(1.0, 2.0)], 2, 0),
        ([5e-324, 0.0], 2, 0),
        ([True, False], 2, 0),
    ],
)
def test_histograms_at_the_edges(values: list[float], total: int, non_finite: int) -> None:
    edges, counts, found = Histogram(np.array(values)).counted()
    assert (sum(counts), found) == (total, non_finite)
    assert len(edges) == len(counts) + 1 or not counts
    assert edges == sorted(edges) and all(math.isfinite(edge) for edge in edges)


def test_histogram_is_of_the_moment(tmp_path: Path) -> None:
    data = np.ones(4)
    histogram = Histogram(data)
    data[:] = 9.0
    assert histogram.counted()[0] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("picture", "expected_shape"),
    [
        (np.zeros((4, 6), np.uint8), (4, 6, 1)),
        (np.zeros((4, 6, 3), np.uint8), (4, 6, 3)),
        (np.zeros((3, 4, 6), np.float32), (4, 6, 3)),
        (np.zeros((3, 6, 3), np.float32), (3, 6, 3)),
        (torch.zeros(3, 6, 3), (6, 3, 3)),
        (torch.zeros(1, 4, 6, dtype=torch.uint8), (4, 6, 1)),
        (torch.zeros(4, 6, 4, dtype=torch.bfloat16), (6, 4, 4)),
        (PIL.Image.new("RGB", (6, 4)), (4, 6, 3)),
        (PIL.Image.new("L", (6, 4)), (4, 6, 1)),
        (PIL.Image.new("P", (6, 4)), (4, 6, 3)),
    ],
)
def test_pictures_of_all_kinds(picture: Any, expected_shape: tuple[int, ...]) -> None:
    pixels = Image(picture).pixels()
    assert pixels.shape == expected_shape and pixels.dtype == np.uint8


def test_a_pictures_layout_can_be_said() -> None:
    assert Image(torch.zeros(4, 6, 4), layout="HWC").pixels().shape == (4, 6, 4)
    assert Image(np.zeros((3, 6, 3)), layout="CHW").pixels().shape == (6, 3, 3)
    with pytest.raises(ValueError, match="layout"):
        Image(np.zeros((3, 6)), layout="NCHW")


def test_a_picture_keeps_its_pixels() -> None:
    import io

    values = np.random.default_rng(0).random((5, 7, 3))
    decoded = np.array(PIL.Image.open(io.BytesIO(Image(values).png())))
    assert np.abs(decoded / 255.0 - values).max() <= 0.5 / 255 + 1e-12
    whole = (values * 255).astype(np.uint8)
    tensor = torch.tensor(whole).permute(2, 0, 1)
    decoded = np.array(PIL.Image.open(io.BytesIO(Image(tensor).png())))
    assert (decoded == whole).all()


@pytest.mark.parametrize(
    ("picture", "error", "words"),
    [
        (np.zeros((2, 3, 4, 5)), ValueError, "one picture at a time"),
        (np.zeros((5, 6, 7)), ValueError, "1, 3 or 4 channels"),
        (np.zeros((0, 6)), ValueError, "shape"),
        (np.full((4, 4), 200.0), ValueError, "divide by 255"),
        (np.zeros((4, 4), np.int64), TypeError, "uint8"),
        (torch.zeros(4, 4, dtype=torch.complex64), TypeError, "real numbers"),
        ("cat.png", ValueError, "str"),
    ],
)
def test_no_picture(picture: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match="Image: ") as caught:
        Image(picture)
    assert words in str(caught.value)


def test_a_histogram_of_words_is_refused() -> None:
    with pytest.raises(TypeError, match="Histogram: "):
        Histogram(["a", "b"])


def test_a_value_out_of_range_rounds_without_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pixels = Image(np.array([[-1e-4, 1.0001]])).pixels()
    assert pixels.ravel().tolist() == [0, 255]
