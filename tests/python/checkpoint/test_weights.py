"""Weights of others as a start, against the libraries that wrote them: safetensors and torch."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from tradewind.checkpoint import (
    StateMismatchError,
    WeightsError,
    load_weights,
    start_from,
)
from tradewind.checkpoint.checkpointer import Checkpointer


class Tied(nn.Module):
    """An embedding whose weight is the head's too, and a buffer of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(4)


def make_model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


def copy_of(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() for name, value in state.items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


# --- files ----------------------------------------------------------------------------------------


def write(kind: str, path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """The weights of a model as `kind`, and what they are."""
    state = copy_of(make_model(1).state_dict())
    names = list(state)
    if kind == "safetensors":
        safetensors.torch.save_file(state, path / "w.safetensors", metadata={"format": "pt"})
        return path / "w.safetensors", state
    if kind == "safetensors of another name":
        safetensors.torch.save_file(state, path / "weights.bin")
        return path / "weights.bin", state
    if kind == "torch":
        torch.save(state, path / "w.pt")
        return path / "w.pt", state
    if kind == "torch of before 1.6":
        torch.save(state, path / "w.pt", _use_new_zipfile_serialization=False)
        return path / "w.pt", state
    suffix = "safetensors" if "safetensors" in kind else "bin"
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    parts = {f"{stem}-00001-of-00002.{suffix}": names[:3]}
    parts[f"{stem}-00002-of-00002.{suffix}"] = names[3:]
    for file, members in parts.items():
        part = {name: state[name] for name in members}
        if suffix == "safetensors":
            safetensors.torch.save_file(part, path / file)
        else:
            torch.save(part, path / file)
    of = {name: file for file, members in parts.items() for name in members}
    index = path / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": of}))
    return path if "folder" in kind else index, state


KINDS = [
    *("safetensors", "safetensors of another name", "torch", "torch of before 1.6"),
    *("index of safetensors", "folder of safetensors", "index of torch", "folder of torch"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_read_as_their_writers_wrote_them(kind: str, tmp_path: Path) -> None:
    path, state = write(kind, tmp_path)
    assert_same(load_weights(path), state)
    model = make_model(2)
    started = start_from(model, path)
    assert_same(dict(model.state_dict()), state)
    assert sorted(started.filled) == sorted(state)
    assert not started.missing and not started.unexpected and not started.misfits


@pytest.mark.parametrize("wrapper", ["state_dict", "model_state_dict", "model"])
def test_a_state_dict_is_found_in_a_training_scripts_file(wrapper: str, tmp_path: Path) -> None:
    state = copy_of(make_model(1).state_dict())
    optimizer = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 1e-3}]}
    torch.save({wrapper: state, "optimizer": optimizer, "epoch": 3}, tmp_path / "w.pt")
    assert_same(load_weights(tmp_path / "w.pt"), state)


def test_a_state_dict_is_found_where_key_says(tmp_path: Path) -> None:
    state = copy_of(make_model(1).state_dict())
    path = tmp_path / "w.pt"
    torch.save({"nets": {"student": state, "teacher": {"a": torch.ones(1)}}}, path)
    assert_same(load_weights(path, key="nets.student"), state)
    with pytest.raises(WeightsError, match=r"expected names and tensors, got a dict of 'nets'"):
        load_weights(path)
    with pytest.raises(WeightsError, match=r"has no 'nets\.third'; it holds .*'student'"):
        load_weights(path, key="nets.third")


def test_what_stands_there_twice_is_not_guessed(tmp_path: Path) -> None:
    state = copy_of(make_model(1).state_dict())
    torch.save({"model": state, "state_dict": state}, tmp_path / "w.pt")
    with pytest.raises(WeightsError, match="say where they are with key="):
        load_weights(tmp_path / "w.pt")


def test_a_shard_of_ours_has_no_pads(tmp_path: Path) -> None:
    state = copy_of(make_model(1).state_dict())
    with Checkpointer(tmp_path / "c") as checkpointer:
        checkpointer.save({"model": state}, step=1).wait(120)
    (shard,) = (tmp_path / "c").glob("step-*/*.safetensors")
    found = load_weights(shard)
    assert_same(found, {f"model.{name}": value for name, value in state.items()})


# --- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_names_of_ddp_and_of_compiled_models_are_known(prefix: str, tmp_path: Path) -> None:
    state = copy_of(make_model(1).state_dict())
    torch.save({prefix + name: value for name, value in state.items()}, tmp_path / "w.pt")
    model = make_model(2)
    start_from(model, tmp_path / "w.pt")
    assert_same(dict(model.state_dict()), state)


def test_one_name_of_a_tied_weight_is_enough(tmp_path: Path) -> None:
    torch.manual_seed(3)
    source, model = Tied(), Tied()
    state = copy_of(source.state_dict())
    del state["head.weight"]  # as transformers writes it
    safetensors.torch.save_file(state, tmp_path / "w.safetensors")
    assert not start_from(model, tmp_path / "w.safetensors").missing
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.head.weight, source.embed.weight)


def test_floating_point_values_take_the_models_dtype(tmp_path: Path) -> None:
    state = {name: value.double() for name, value in nn.Linear(3, 2).state_dict().items()}
    torch.save(state, tmp_path / "w.pt")
    model = nn.Linear(3, 2).bfloat16()
    start_from(model, tmp_path / "w.pt")
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name].bfloat16())


def test_autograd_sees_that_parameters_were_written(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    torch.save(copy_of(model.state_dict()), tmp_path / "w.pt")
    loss = model(torch.ones(3)).square().sum()
    inputs = torch.ones(3, requires_grad=True)
    loss = loss + (inputs @ model.weight[0]).square()
    start_from(model, tmp_path / "w.pt")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def misfit(name: str) -> dict[str, Any]:
    state = copy_of(make_model(1).state_dict())
    if name == "missing":
        del state["2.bias"]
    elif name == "unexpected":
        state["3.weight"] = torch.ones(1)
    elif name == "shape":
        state["0.weight"] = torch.ones(5, 4)
    else:
        state["0.bias"] = torch.arange(5)
    return state


MISFITS = {
    "missing": r"2\.bias: is not in the file",
    "unexpected": r"3\.weight: is in the file, not in the model",
    "shape": r"0\.weight: expected shape \(5, 3\), the file has \(5, 4\)",
    "dtype": r"0\.bias: expected torch\.float32, the file has torch\.int64",
}


@pytest.mark.parametrize("kind", MISFITS)
def test_what_does_not_fit_is_named_and_nothing_changed(kind: str, tmp_path: Path) -> None:
    state = misfit(kind)
    torch.save(state, tmp_path / "w.pt")
    model = make_model(2)
    before = copy_of(model.state_dict())
    with pytest.raises(StateMismatchError, match=MISFITS[kind]) as caught:
        start_from(model, tmp_path / "w.pt")
    assert "Nothing was changed" in str(caught.value) and "strict=False" in str(caught.value)
    assert_same(dict(model.state_dict()), before)

    started = start_from(model, tmp_path / "w.pt", strict=False)
    listed = {
        "missing": started.missing,
        "unexpected": started.unexpected,
        "shape": [name for name, _ in started.misfits],
        "dtype": [name for name, _ in started.misfits],
    }
    wrong = MISFITS[kind].split(":")[0].replace("\\", "")
    assert listed[kind] == [wrong]
    for name, value in model.state_dict().items():
        expected = before[name] if name == wrong else state[name]
        assert torch.equal(value, expected), name


def test_a_model_without_memory_is_refused(tmp_path: Path) -> None:
    torch.save(copy_of(nn.Linear(3, 2).state_dict()), tmp_path / "w.pt")
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    with pytest.raises(StateMismatchError, match=r"weight: is on the meta device.*to_empty"):
        start_from(model, tmp_path / "w.pt")


# --- files that are none --------------------------------------------------------------------------


class Trap:
    """Its pickle makes a folder when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["zip", "legacy", "pickle"])
def test_a_pickle_that_would_run_code_is_refused_and_not_run(kind: str, tmp_path: Path) -> None:
    path, folder = tmp_path / "w.pt", tmp_path / "made"
    content = {"weight": torch.ones(2), "trap": Trap(folder)}
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Trap(folder)))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=kind == "zip")
    with pytest.raises(WeightsError, match=r"w\.pt'"):
        load_weights(path)
    assert not folder.exists()
    if kind == "zip":
        torch.load(path, weights_only=False)  # the trap works
        assert folder.exists()
        with pytest.raises(WeightsError, match=r"weights_only=True\) refuses it.*safetensors"):
            load_weights(path)


def damaged(kind: str, path: Path) -> Path:
    state = copy_of(make_model(1).state_dict())
    safetensors.torch.save_file(state, path / "w.safetensors")
    data = (path / "w.safetensors").read_bytes()
    torch.save(state, path / "w.pt")
    if kind == "cut safetensors":
        (path / "w.safetensors").write_bytes(data[:-1])
    elif kind == "safetensors with a long tail":
        (path / "w.safetensors").write_bytes(data + b"\0")
    elif kind == "empty safetensors":
        (path / "w.safetensors").write_bytes(b"")
    elif kind == "cut torch":
        whole = (path / "w.pt").read_bytes()
        (path / "w.pt").write_bytes(whole[: len(whole) // 2])
    elif kind == "text":
        (path / "w.pt").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1234\n")
    elif kind == "empty torch":
        (path / "w.pt").write_bytes(b"")
    elif kind == "no names":
        torch.save([torch.ones(1)], path / "w.pt")
    return path / ("w.safetensors" if "safetensors" in kind else "w.pt")


@pytest.mark.parametrize(
    "kind",
    [
        *("cut safetensors", "safetensors with a long tail", "empty safetensors"),
        *("cut torch", "text", "empty torch", "no names"),
    ],
)
def test_damaged_files_are_named(kind: str, tmp_path: Path) -> None:
    path = damaged(kind, tmp_path)
    with pytest.raises(WeightsError, match=path.name.replace(".", r"\.")):
        load_weights(path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "../w.safetensors"}, "names the file '../w.safetensors'; expected one of its own"),
        ({"a": "/etc/passwd"}, "expected one of its own folder"),
        ({"a": "other.safetensors"}, "names 'other.safetensors', which is not there"),
        ({"b": "w.safetensors"}, "'w.safetensors' has no tensor 'b'"),
        ({"a": 3}, "expected an index with a weight_map"),
        (None, "expected an index with a weight_map"),
    ],
)
def test_an_index_is_not_trusted(weight_map: Any, message: str, tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(1)}, tmp_path / "w.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(WeightsError) as caught:
        load_weights(index)
    assert message in str(caught.value)


def test_folders_and_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_weights(tmp_path / "no.safetensors")
    with pytest.raises(WeightsError, match=r"or a folder with model\.safetensors"):
        load_weights(tmp_path)
    with Checkpointer(tmp_path / "c") as checkpointer:
        checkpointer.save({"a": torch.ones(1)}, step=1).wait(120)
    with pytest.raises(WeightsError, match=r"directory of checkpoints.*partial=True.*export"):
        load_weights(tmp_path / "c")
