"""How two checkpoints differ, against numpy's account of the tensors that were saved."""

from __future__ import annotations

import math
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from tradewind.checkpoint import DamagedCheckpointError, PerRank
from tradewind.checkpoint.checkpointer import Checkpointer
from tradewind.checkpoint.difference import Difference, TensorChange, difference
from tradewind.checkpoint.dtypes import NAME_OF
from tradewind.checkpoint.reference import Reference

BUFFER = 4096
COUNT = 3001  # elements, more than a buffer of any dtype but the smallest


def compared(tmp_path: Path, before: Any, after: Any, buffer_bytes: int = BUFFER) -> Difference:
    """What `difference` says of two states, saved as steps 1 and 2."""
    directory = tmp_path / "c"
    with Checkpointer(directory, block_bytes=4096) as checkpointer:
        checkpointer.save(before, step=1).wait(120)
        checkpointer.save(after, step=2).wait(120)
    return of_steps(directory, buffer_bytes)


def of_steps(directory: Path, buffer_bytes: int = BUFFER) -> Difference:
    with ExitStack() as stack:
        references = [stack.enter_context(Reference(f"{directory}@{step}")) for step in (1, 2)]
        readers = [stack.enter_context(each.reader(each.name())) for each in references]
        return difference(*readers, buffer_bytes=buffer_bytes)


def random_tensor(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Of random bits: every kind of NaN, infinities, the largest integers."""
    generator = torch.Generator().manual_seed(seed)
    shape = (COUNT * dtype.itemsize,)
    bits = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    return bits % 2 > 0 if dtype == torch.bool else bits.view(dtype)


def numbers(tensor: torch.Tensor) -> list[Any]:
    """Each element as an exact number of Python."""
    if tensor.dtype.is_floating_point:
        return tensor.double().tolist()
    return [int(value) if isinstance(value, bool) else value for value in tensor.tolist()]


def gap_of(old: Any, new: Any) -> tuple[float, float]:
    """|new - old|, alone and by the larger magnitude, in exact arithmetic."""
    if isinstance(old, complex):
        parts = [old.real, old.imag, new.real, new.imag]
        if any(map(math.isnan, parts)):
            both = (math.isnan(old.real) or math.isnan(old.imag)) and (
                math.isnan(new.real) or math.isnan(new.imag)
            )
            return (0.0, 0.0) if both else (math.inf, math.inf)
        if old == new:
            return 0.0, 0.0
        if any(map(math.isinf, parts)):
            return math.inf, math.inf
        gap = abs(new - old)
        return gap, gap / max(abs(old), abs(new))
    if isinstance(old, float) and not (math.isfinite(old) and math.isfinite(new)):
        same = old == new or (math.isnan(old) and math.isnan(new))
        return (0.0, 0.0) if same else (math.inf, math.inf)
    if old == new:
        return 0.0, 0.0
    exact = abs(Fraction(new) - Fraction(old))
    relative = exact / max(abs(Fraction(old)), abs(Fraction(new)))
    return (float(exact) if exact <= Fraction(1.7e308) else math.inf), float(relative)


@pytest.mark.parametrize("dtype", list(NAME_OF), ids=list(NAME_OF.values()))
def test_elements_of_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    before = random_tensor(dtype, 1)
    after = before.clone()
    size = dtype.itemsize
    bytes_of = [
        each.view(torch.uint8).view(COUNT, size) for each in (after, random_tensor(dtype, 2))
    ]
    bytes_of[0][::7] = bytes_of[1][::7]
    found = compared(tmp_path, {"a": before, "b": before}, {"a": after, "b": before})
    bits = [t.view(torch.uint8).numpy().reshape(COUNT, size) for t in (before, after)]
    differing = (bits[0] != bits[1]).any(axis=1)
    gaps = [gap_of(o, n) for o, n in zip(numbers(before), numbers(after), strict=True)]
    (change,) = found.tensors
    assert (change.name, change.kind, found.num_same) == ("a", "values", 1)
    assert change.before == change.after == f"{NAME_OF[dtype]} [{COUNT}]"
    assert (change.num_differing, change.num_elements) == (int(differing.sum()), COUNT)
    # A few roundings of float64: of the difference, the magnitude of complex numbers, the quotient.
    assert change.max_abs == pytest.approx(max(gap for gap, _ in gaps), rel=1e-14)
    assert change.max_relative == pytest.approx(max(rel for _, rel in gaps), rel=1e-14)
    assert of_steps(tmp_path / "c", 1 << 20).tensors == found.tensors


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([1.0, 2.0, -4.0], [1.0, 2.5, -4.0], (1, 0.5, 0.2)),
        ([0.0], [-0.0], (1, 0.0, 0.0)),
        ([0.0], [1e-40], (1, float(torch.tensor(1e-40)), 1.0)),
        ([3.0], [-3.0], (1, 6.0, 2.0)),
        ([math.inf, 1.0], [math.inf, 2.0], (1, 1.0, 0.5)),
        ([math.inf], [-math.inf], (1, math.inf, math.inf)),
        ([math.nan], [1.0], (1, math.inf, math.inf)),
    ],
)
def test_figures_that_can_be_told_by_hand(
    before: list[float], after: list[float], expected: tuple[int, float, float], tmp_path: Path
) -> None:
    found = compared(tmp_path, {"a": torch.tensor(before)}, {"a": torch.tensor(after)})
    (change,) = found.tensors
    assert (change.num_differing, change.max_abs, change.max_relative) == expected


def test_nans_of_other_bits_differ_by_nothing(tmp_path: Path) -> None:
    bits = [torch.tensor([each, 0], dtype=torch.int32) for each in (0x7FC00000, 0x7FC00001)]
    found = compared(tmp_path, *({"a": each.view(torch.float32)} for each in bits))
    (change,) = found.tensors
    assert (change.num_differing, change.max_abs, change.max_relative) == (1, 0.0, 0.0)


def test_integers_beyond_float64_are_told_apart(tmp_path: Path) -> None:
    old = {
        "s": torch.tensor([2**62 + 1, -1]),
        "u": torch.tensor([2**64 - 1, 0], dtype=torch.uint64),
    }
    new = {"s": torch.tensor([2**62, -1]), "u": torch.tensor([2**64 - 4, 0], dtype=torch.uint64)}
    found = compared(tmp_path, old, new)
    assert [change.max_abs for change in found.tensors] == [1.0, 3.0]


def test_names_shapes_and_dtypes(tmp_path: Path) -> None:
    old = {
        **{"gone": torch.ones(2), "same": torch.ones(3), "reshaped": torch.ones(4)},
        **{"rounded": torch.tensor([1.0, 1.0 + 2**-10]), "kind": torch.ones(2)},
        "widened": torch.full((5000,), 2.0, dtype=torch.float8_e5m2),
    }
    new = {
        **{"come": torch.ones(1, 2), "same": torch.ones(3), "reshaped": torch.ones(2, 2)},
        "rounded": torch.tensor([1.0, 1.0]).bfloat16(),
        "kind": torch.ones(2, dtype=torch.int64),
        "widened": torch.full((5000,), 2.0, dtype=torch.float64),
    }
    found = compared(tmp_path, old, new)
    assert found.num_same == 1
    assert {change.name: change for change in found.tensors} == {
        "gone": TensorChange("gone", "removed", "F32 [2]", None),
        "come": TensorChange("come", "added", None, "F32 [1, 2]"),
        "reshaped": TensorChange("reshaped", "shape", "F32 [4]", "F32 [2, 2]"),
        "kind": TensorChange("kind", "dtype", "F32 [2]", "I64 [2]"),
        "rounded": TensorChange(
            "rounded", "dtype", "F32 [2]", "BF16 [2]", 1, 2, 2**-10, 2**-10 / (1 + 2**-10)
        ),
        "widened": TensorChange(
            "widened", "dtype", "F8_E5M2 [5000]", "F64 [5000]", 0, 5000, 0.0, 0.0
        ),
    }


def test_json_values(tmp_path: Path) -> None:
    old = {
        **{"lr": 0.1, "nan": math.nan, "kind": 1, "gone": None, "list": [1, 2], "b": b"\0"},
        **{"deep": {"er": ({"x": 1}, 2)}, "own": PerRank({"seed": 1, "same": 2})},
    }
    new = {
        **{"lr": 0.2, "nan": math.nan, "kind": True, "come": "text", "list": [1, 3], "b": b"\0"},
        **{"deep": {"er": ({"x": 5}, 2)}, "own": PerRank({"seed": 3, "same": 2})},
    }
    found = compared(tmp_path, old, new)
    assert not found.tensors
    assert {value.path: (value.before, value.after) for value in found.values} == {
        "lr": ("0.1", "0.2"),
        "kind": ("1", "True"),
        "gone": ("None", None),
        "come": (None, "'text'"),
        "list": ("[1, 2]", "[1, 3]"),
        "deep.er.0.x": ("1", "5"),
        "own[rank 0].seed": ("1", "3"),
    }


def test_long_values_are_cut(tmp_path: Path) -> None:
    found = compared(tmp_path, {"order": [*range(1000)]}, {"order": [*range(1, 1001)]})
    (value,) = found.values
    assert value.before is not None and value.before.endswith("… (1000 items)")
    assert len(value.before) < 120


def test_the_same_is_no_difference(tmp_path: Path) -> None:
    state = {"a": torch.tensor([math.nan, -0.0]), "n": math.nan, "l": [1, "x"]}
    found = compared(tmp_path, state, state)
    assert not found and found == Difference(num_same=1)


def test_damage_is_named(tmp_path: Path) -> None:
    compared(tmp_path, {"a": torch.zeros(5000)}, {"a": torch.zeros(5000)})
    shard = sorted((tmp_path / "c").glob("step-*/*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-9000] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match=shard.name):
        of_steps(tmp_path / "c")
