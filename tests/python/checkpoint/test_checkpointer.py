"""`tw.Checkpointer` alone: what goes in comes out, to the bit, or a named error says why not."""

from __future__ import annotations

import copy
import math
import os
import pickle
import subprocess
import sys
import textwrap
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tradewind as tw
from tradewind.checkpoint import (
    CheckpointError,
    DamagedCheckpointError,
    NotACheckpointDirectoryError,
    StateMismatchError,
)
from tradewind.checkpoint.checkpointer import Checkpointer
from tradewind.checkpoint.names import MANIFEST, CommitName


def states_equal(a: Any, b: Any) -> bool:
    """To the bit, kinds included; independent of how a checkpoint walks states."""
    if isinstance(a, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape
        flat = (x.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
        return same and (a.numel() == 0 or torch.equal(*flat))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(states_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(states_equal, a, b))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a, math.copysign(1, a)) == (
            b,
            math.copysign(1, b),
        )
    return bool(a == b)


def everything() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "float": torch.randn(7, 5),
        "bf16": torch.randn(1000).bfloat16(),
        "half": torch.randn(3, 3).half(),
        "double": torch.randn(2, dtype=torch.float64),
        "complex": torch.randn(4, dtype=torch.complex64),
        "int": torch.arange(10),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "large": torch.randn(300_000),
        "strided": torch.randn(6, 8).t()[::2],
        "nested": {"list": [torch.ones(2), {"deep": torch.zeros(1)}], 1: "one", "1": "text one"},
        "pair": (1, torch.full((2,), 7.0)),
        "array": np.arange(6.0).reshape(2, 3),
        "numbers": [1, 2.5, None, True, "text", -0.0, math.inf, math.nan, 2**80],
        "ordered": OrderedDict(b=1, a=2),
        "nan": torch.tensor([math.nan, -0.0, math.inf]),
    }


def blank_of(state: Any) -> Any:
    """A state of the same structure with other values."""
    if isinstance(state, torch.Tensor):
        return torch.empty(state.shape, dtype=state.dtype).fill_(1)
    if isinstance(state, np.ndarray):
        return np.zeros_like(state)
    if isinstance(state, OrderedDict):
        return OrderedDict((key, blank_of(value)) for key, value in state.items())
    if isinstance(state, dict):
        return {key: blank_of(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(blank_of(value) for value in state)
    return None


def folder(checkpointer: Checkpointer, step: int) -> Path:
    names = [name for name in map(CommitName.parse, os.listdir(checkpointer.path)) if name]
    newest = max(name for name in names if name.step == step)
    return Path(checkpointer.path) / newest.folder


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def test_everything_comes_back_to_the_bit(tmp_path: Path) -> None:
    state = everything()
    with Checkpointer(tmp_path / "c") as checkpointer:
        assert checkpointer.restore(blank_of(state)) is None
        assert checkpointer.steps() == []
        save = checkpointer.save(state, step=3)
        save.wait(60)
        assert save.is_durable and save.durable_s > 0 and save.copied_bytes > 300_000 * 4
        assert checkpointer.steps() == [3]
        loaded = checkpointer.load()
        assert loaded is not None and loaded[0] == 3
        assert states_equal(loaded[1], state)
        target = blank_of(state)
        assert checkpointer.restore(target) == 3
        assert states_equal(target["nested"]["list"][0], state["nested"]["list"][0])
        for key, value in state.items():
            if isinstance(value, (torch.Tensor, np.ndarray)):
                assert states_equal(target[key], value), key
        assert target["numbers"][:4] == [1, 2.5, None, True]
        assert checkpointer.restored["nested"][1] == "one"
        assert checkpointer.restored["nested"]["1"] == "text one"
        assert checkpointer.verify() == 3


def test_what_changes_after_save_is_not_in_it(tmp_path: Path) -> None:
    tensor = torch.arange(100_000.0)
    numbers = [1, 2]
    with Checkpointer(tmp_path / "c") as checkpointer:
        checkpointer.save({"t": tensor, "n": numbers}, step=0)
        tensor.zero_()
        numbers.append(3)
        checkpointer.wait(60)
        found = checkpointer.load()
    assert found is not None
    assert torch.equal(found[1]["t"], torch.arange(100_000.0))
    assert found[1]["n"] == [1, 2]


def test_a_model_and_an_optimizer(tmp_path: Path) -> None:
    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
        return net, torch.optim.AdamW(net.parameters(), lr=0.1)

    torch.manual_seed(1)
    model, optimizer = make()
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
    with Checkpointer(tmp_path / "c") as checkpointer:
        checkpointer.save({"model": model, "optimizer": optimizer, "epoch": 4}, step=3)
    fresh, fresh_optimizer = make()
    pointers = [p.data_ptr() for p in fresh.parameters()]
    with Checkpointer(tmp_path / "c") as checkpointer:
        state = {"model": fresh, "optimizer": fresh_optimizer, "epoch": 0}
        assert checkpointer.restore(state) == 3
        assert checkpointer.restored["epoch"] == 4 and state["epoch"] == 4
    assert [p.data_ptr() for p in fresh.parameters()] == pointers
    assert states_equal(dict(fresh.state_dict()), dict(model.state_dict()))
    assert states_equal(fresh_optimizer.state_dict()["state"], optimizer.state_dict()["state"])


def test_what_was_tied_may_be_untied_and_the_other_way_round(tmp_path: Path) -> None:
    tied = torch.randn(200, 300)
    in_place = [(tied.data_ptr(), tied.numel() * 4)]
    with Checkpointer(tmp_path / "c") as checkpointer:
        for ranges in ([], in_place):
            checkpointer.save({"a": tied, "b": tied}, step=1, in_place=ranges).wait(60)
            two = {"a": torch.zeros(200, 300), "b": torch.zeros(200, 300)}
            assert checkpointer.restore(two) == 1
            assert torch.equal(two["a"], tied) and torch.equal(two["b"], tied)
        one = torch.zeros(200, 300)
        assert checkpointer.restore({"a": one, "b": one}) == 1
        assert torch.equal(one, tied)


def test_memory_in_place_is_written_from_where_it_lies(tmp_path: Path) -> None:
    memory = torch.empty(1 << 20, dtype=torch.uint8)
    start = -memory.data_ptr() % 4096
    arena = memory[start : start + (1 << 19)].view(torch.float32)
    arena.copy_(torch.randn(arena.shape))
    first, second = arena[:1000], arena[1024:100_000]
    state = {"first": first, "second": second, "other": torch.ones(3)}
    with Checkpointer(tmp_path / "c") as checkpointer:
        ranges = [(arena.data_ptr(), arena.numel() * 4)]
        save = checkpointer.save(state, step=5, in_place=ranges)
        save.wait(60)
        assert save.copied_bytes == 12
        assert save.in_place_bytes == 4 * (first.numel() + second.numel())
        loaded = checkpointer.load()
    assert loaded is not None and states_equal(loaded[1], state)


def test_the_state_of_our_optimizers_is_written_in_place_while_they_step(tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = torch.nn.Linear(300, 200)
    optimizer = tw.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 300)).square().sum().backward()
        optimizer.step()

    step()
    with Checkpointer(tmp_path / "c") as checkpointer:
        for number in range(5):
            expected = copy.deepcopy(optimizer.state_dict())
            save = checkpointer.save({"model": model, "optimizer": optimizer}, step=number)
            assert save.in_place_bytes >= 2 * 300 * 200 * 4
            step()
            save.wait(60)
            found = checkpointer.load()
            assert found is not None and found[0] == number
            assert states_equal(found[1]["optimizer"]["state"], expected["state"])


def test_an_edit_of_memory_in_place_fails_that_save_by_name(tmp_path: Path) -> None:
    memory = torch.zeros(4096)
    events: list[tuple[str, str]] = []
    with Checkpointer(
        tmp_path / "c", on_event=lambda kind, text: events.append((kind, text))
    ) as checkpointer:
        checkpointer.save({"w": memory.clone()}, step=0).wait(60)
        ranges = [(memory.data_ptr(), memory.numel() * 4)]
        checkpointer._saver._ranks = _Held(checkpointer._saver._ranks)
        save = checkpointer.save({"w": memory}, step=1, in_place=ranges)
        memory.add_(1)
        save.check_edits()
        checkpointer._saver._ranks.release()
        with pytest.raises(CheckpointError, match=r"step 1: w changed in place"):
            save.wait(60)
        assert checkpointer.steps() == [0]
        assert events and events[0][0] == "save-failed"
        checkpointer._saver._ranks = checkpointer._saver._ranks.inner
        checkpointer.save({"w": memory}, step=2, in_place=ranges).wait(60)
        assert checkpointer.steps() == [0, 2]


class _Held:
    """Ranks that begin no save before `release()`."""

    def __init__(self, inner: Any) -> None:
        import threading

        self.inner = inner
        self._go = threading.Event()

    def release(self) -> None:
        self._go.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def together(self, topic: str, do: Any) -> list[Any]:
        assert self._go.wait(60)
        return list(self.inner.together(topic, do))


def test_keep_and_keep_every(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "c", keep=2, keep_every=4) as checkpointer:
        for step in range(1, 10):
            checkpointer.save({"s": torch.tensor(step)}, step=step).wait(60)
        assert checkpointer.steps() == [4, 8, 9]
        target = {"s": torch.tensor(0)}
        assert checkpointer.restore(target, step=4) == 4 and int(target["s"]) == 4
        with pytest.raises(CheckpointError, match="no checkpoint of step 5; there are 4, 8, 9"):
            checkpointer.restore(target, step=5)


def test_a_damaged_checkpoint_is_passed_over_with_a_line(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "c") as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save({"t": torch.full((50_000,), float(step))}, step=step).wait(60)
        shard = next(folder(checkpointer, 3).glob("*.safetensors"))
        flip(shard, 100_000)
        (folder(checkpointer, 2) / MANIFEST).write_bytes(b"{}")
        with pytest.raises(DamagedCheckpointError, match=shard.name):
            checkpointer.verify(3)
        target = {"t": torch.zeros(50_000)}
        with pytest.warns(RuntimeWarning, match="is passed over") as warned:
            assert checkpointer.restore(target) == 1
        assert len(warned) == 2 and shard.name in str(warned[0].message)
        assert torch.equal(target["t"], torch.ones(50_000))
        flip(next(folder(checkpointer, 1).glob("*.safetensors")), 5000)
        with (
            pytest.warns(RuntimeWarning),
            pytest.raises(DamagedCheckpointError, match="none of its 3 checkpoints is whole"),
        ):
            checkpointer.restore(target)


def test_a_state_that_does_not_fit_is_named_and_left_alone(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "c") as checkpointer:
        saved = {"a": torch.ones(3), "b": torch.ones(2, 2), "gone": torch.ones(1)}
        checkpointer.save(saved, step=1).wait(60)
        target = {"a": torch.zeros(4), "b": torch.zeros(2, 2), "new": torch.zeros(5)}
        with pytest.raises(StateMismatchError) as raised:
            checkpointer.restore(target)
        text = str(raised.value)
        assert "a: expected shape (4,), was (3,)" in text
        assert "new: is not in the checkpoint" in text
        assert "gone: is in the checkpoint, not in the state" in text
        assert "partial=True would fill what fits (1 tensors)" in text
        assert all(not tensor.any() for tensor in target.values())
        assert checkpointer.restore(target, partial=True) == 1
        assert target["b"].all() and not target["a"].any() and not target["new"].any()
        assert len(checkpointer.not_restored) == 3


def test_floating_dtypes_convert_and_others_do_not(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "c") as checkpointer:
        values = torch.randn(1000)
        checkpointer.save({"t": values}, step=1).wait(60)
        target = {"t": torch.zeros(1000, dtype=torch.bfloat16)}
        checkpointer.restore(target)
        assert torch.equal(target["t"], values.bfloat16())
        with pytest.raises(StateMismatchError, match=r"t: expected torch.int64, was torch.float32"):
            checkpointer.restore({"t": torch.zeros(1000, dtype=torch.int64)})


def test_strided_targets_are_filled_and_expanded_ones_refused(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "c") as checkpointer:
        values = torch.randn(6, 4)
        checkpointer.save({"t": values}, step=1).wait(60)
        target = torch.zeros(4, 6).t()
        checkpointer.restore({"t": target})
        assert torch.equal(target, values)
        with pytest.raises(StateMismatchError, match="t: is expanded"):
            checkpointer.restore({"t": torch.zeros(1, 4).expand(6, 4)})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.zeros(3, device="meta"), r"state\['x'\].*meta"),
        (object(), r"state\['x'\].*object"),
        (torch.zeros(2, 2).to_sparse(), r"state\['x'\].*sparse"),
        ({1, 2}, r"state\['x'\].*set"),
    ],
)
def test_what_no_checkpoint_can_hold_is_refused_before_anything_is_written(
    tmp_path: Path, value: Any, text: str
) -> None:
    with Checkpointer(tmp_path / "c") as checkpointer:
        checkpointer.save({"x": 1}, step=0).wait(60)
        with pytest.raises(TypeError, match=text):
            checkpointer.save({"x": value}, step=1)
        assert checkpointer.steps() == [0]
        checkpointer.save({"x": 2}, step=1).wait(60)


@pytest.mark.parametrize("step", [-1, 1.0, True, "3", 10**12])
def test_a_step_is_a_whole_number(tmp_path: Path, step: Any) -> None:
    with Checkpointer(tmp_path / "c") as checkpointer, pytest.raises(ValueError, match="step: exp"):
        checkpointer.save({}, step=step)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"keep": 0}, "keep: expected a whole number of at least 1, got 0"),
        ({"keep_every": 0}, "keep_every: expected"),
        ({"block_bytes": 1000}, "block_bytes: expected a multiple of 4096"),
        ({"num_threads": 0}, "num_threads: expected"),
    ],
)
def test_bad_options(tmp_path: Path, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Checkpointer(tmp_path / "c", **arguments)
    assert not (tmp_path / "c").exists()


def test_a_directory_of_something_else_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(NotACheckpointDirectoryError):
        Checkpointer(tmp_path)
    with pytest.raises((NotACheckpointDirectoryError, OSError)):
        Checkpointer(tmp_path / "notes.txt")
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_two_owners_are_refused_and_a_reader_is_not(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "c") as one, Checkpointer(tmp_path / "c") as two:
        one.save({"x": torch.ones(2)}, step=1).wait(60)
        with pytest.raises(CheckpointError, match=str(os.getpid())):
            two.save({"x": torch.zeros(2)}, step=2)
        target = {"x": torch.zeros(2)}
        assert two.restore(target) == 1 and target["x"].all()
        assert one.steps() == two.steps() == [1]
    with Checkpointer(tmp_path / "c") as three:
        three.save({"x": torch.ones(2)}, step=2).wait(60)
        assert three.steps() == [1, 2]


def test_it_is_no_value_to_copy(tmp_path: Path) -> None:
    with (
        Checkpointer(tmp_path / "c") as checkpointer,
        pytest.raises(TypeError, match="owns threads"),
    ):
        pickle.dumps(checkpointer)
    with pytest.raises(RuntimeError, match="is closed"):
        checkpointer.save({}, step=0)
    checkpointer.close()


def test_a_forked_child_can_neither_save_nor_close(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "c") as checkpointer:
        checkpointer.save({"x": 1}, step=1).wait(60)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                checkpointer.close()
                checkpointer.save({"x": 2}, step=2)
            except RuntimeError as error:
                code = 0 if "its child" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        checkpointer.save({"x": 3}, step=3).wait(60)
        assert checkpointer.steps() == [1, 3]


def test_a_script_that_ends_without_close_has_its_last_checkpoint(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys, torch
        from tradewind.checkpoint.checkpointer import Checkpointer
        checkpointer = Checkpointer(sys.argv[1])
        checkpointer.save({"t": torch.arange(500_000)}, step=7)
        """
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "c")], check=True, timeout=120)
    with Checkpointer(tmp_path / "c") as checkpointer:
        found = checkpointer.load()
    assert found is not None and found[0] == 7
    assert torch.equal(found[1]["t"], torch.arange(500_000))


def test_a_state_larger_than_the_memory_for_copies_is_written_in_rounds(tmp_path: Path) -> None:
    state = {f"t{i}": torch.randn(150_000 + i) for i in range(9)}
    state["arena"] = torch.randn(4096)
    with Checkpointer(tmp_path / "c", host_memory=1 << 20, keep=2) as checkpointer:
        ranges = [(state["arena"].data_ptr(), state["arena"].nbytes)]
        for step in range(4):
            expected = {name: tensor.clone() for name, tensor in state.items()}
            save = checkpointer.save(state, step=step, in_place=ranges)
            for name, tensor in state.items():
                if name != "arena":
                    tensor.add_(1)
            save.wait(60)
            assert len(list(folder(checkpointer, step).glob("*.safetensors"))) > 4
            assert checkpointer._saver._staging.capacity_bytes <= 2 << 20
            found = checkpointer.load()
            assert found is not None and states_equal(found[1], expected)
        assert checkpointer.steps() == [2, 3]
    with pytest.raises(ValueError, match="host_memory: expected at least"):
        Checkpointer(tmp_path / "d", host_memory=10)


def test_files_are_recycled(tmp_path: Path) -> None:
    def inodes() -> set[int]:
        return {path.stat().st_ino for path in (tmp_path / "c").rglob("*.safetensors")}

    with Checkpointer(tmp_path / "c", keep=1) as checkpointer:
        seen: list[set[int]] = []
        for step in range(6):
            checkpointer.save({"t": torch.full((600_000,), float(step))}, step=step).wait(60)
            seen.append(inodes())
        target = {"t": torch.zeros(600_000)}
        assert checkpointer.restore(target) == 5
        assert torch.equal(target["t"], torch.full((600_000,), 5.0))
    assert len(set().union(*seen)) < len(seen)


def test_it_is_exported_as_a_public_name() -> None:
    assert tw.Checkpointer is Checkpointer
