"""`tradewind checkpoint`: what it prints where, its exit codes, and that it changes nothing."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoint import reader_from_the_page
from checkpoint.local_commits import snapshot
from click.testing import CliRunner, Result

import tradewind as tw
from tradewind.checkpoint import PerRank
from tradewind.checkpoint.checkpointer import Checkpointer
from tradewind.checkpoint.names import MANIFEST, CommitName
from tradewind.launch.cli import main

DAMAGED = "is not what was written"  # said of a block whose checksum differs
COMMANDS = ("list", "show", "verify", "diff", "export")


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["checkpoint", *map(str, arguments)])


def facts_of(*arguments: object, exit_code: int = 0) -> Any:
    """The one JSON document on stdout."""
    result = invoke(*arguments, "--json")
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout)


def state(step: int) -> dict[str, Any]:
    return {
        "model": {"weight": torch.full((30, 40), float(step)), "bias": torch.arange(40.0)},
        "lr": 0.1 / step,
        "epoch": 3,
        "own": PerRank({"seed": 7}),
    }


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Steps 10, 20 and 30."""
    path = tmp_path / "c"
    with Checkpointer(path, block_bytes=4096) as checkpointer:
        for step in (10, 20, 30):
            checkpointer.save(state(step), step=step).wait(120)
    return path


def folder_of(directory: Path, step: int) -> Path:
    (found,) = directory.glob(f"step-{step:012d}.*")
    return found


def shard_of(directory: Path, step: int) -> Path:
    (found,) = folder_of(directory, step).glob("*.safetensors")
    return found


def flip(path: Path, offset: int = -5000) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


# --- every command --------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [(), *((each,) for each in COMMANDS)])
def test_help_has_an_example(command: tuple[str, ...]) -> None:
    for flag in ("--help", "-h"):
        result = invoke(*command, flag)
        assert result.exit_code == 0
        assert "Example:\n" in result.stdout and "  tradewind checkpoint " in result.stdout


def arguments_of(command: str, path: object, tmp_path: Path) -> list[object]:
    more: dict[str, list[object]] = {"diff": [path], "export": ["--to", tmp_path / "x"]}
    return [command, path, *more.get(command, [])]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("place", ["nowhere", "file", "strangers", "marked by others"])
def test_a_path_without_checkpoints_is_bad_usage(command: str, place: str, tmp_path: Path) -> None:
    path = tmp_path / "place"
    if place == "file":
        path.write_text("theirs")
    elif place != "nowhere":
        path.mkdir()
        name = "theirs.txt" if place == "strangers" else "tradewind-checkpoints.json"
        (path / name).write_text('{"format": "other"}')
    before = snapshot(tmp_path)
    for flags in ([], ["--json"]):
        result = invoke(*arguments_of(command, path, tmp_path), *flags)
        assert result.exit_code == 2 and result.stdout == "" and str(path) in result.stderr
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_a_step_that_is_not_there_is_bad_usage(
    command: str, directory: Path, tmp_path: Path
) -> None:
    result = invoke(*arguments_of(command, f"{directory}@15", tmp_path))
    assert result.exit_code == 2 and result.stdout == ""
    assert "of step 15" in result.stderr and "steps 10, 20, 30" in result.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_is_changed(command: str, directory: Path, tmp_path: Path) -> None:
    before = snapshot(directory)
    assert invoke(*arguments_of(command, directory, tmp_path)).exit_code == 0
    assert snapshot(directory) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_an_owner_that_saves_is_not_disturbed(
    command: str, directory: Path, tmp_path: Path
) -> None:
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(state(40), step=40).wait(120)
        assert invoke(*arguments_of(command, directory, tmp_path)).exit_code == 0
        checkpointer.save(state(50), step=50).wait(120)
    assert facts_of("show", directory)["step"] == 50


@pytest.mark.parametrize("command", ["list", "show", "verify", "export"])
def test_runs_and_folders_and_urls_mean_checkpoints_too(
    command: str, directory: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    shutil.copytree(directory, run / "checkpoints")
    for path in (run, folder_of(directory, 30), f"file://{directory}", f"file://{directory}@30"):
        (tmp_path / "x").unlink(missing_ok=True)
        found = facts_of(*arguments_of(command, path, tmp_path))
        newest = found["checkpoints"][0] if "checkpoints" in found else found
        assert newest["step"] == 30, path


def test_a_path_may_have_an_at(directory: Path, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path / "c@10")
    assert facts_of("show", tmp_path / "c@10")["step"] == 30
    assert facts_of("show", f"{tmp_path / 'c@10'}@20")["step"] == 20


def test_it_says_what_to_do_where_torch_is_broken(directory: Path, tmp_path: Path) -> None:
    package = tmp_path / "poison" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('poisoned torch')")
    paths = [str(package.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tradewind", "checkpoint", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)

    done = run("list", str(directory))
    assert done.returncode == 1 and done.stdout == "" and "Traceback" not in done.stderr
    assert "poisoned torch" in done.stderr and "tradewind doctor" in done.stderr
    assert run("list", "--help").returncode == 0


# --- list -----------------------------------------------------------------------------------------


def test_list_tells_steps_sizes_and_the_newest(directory: Path) -> None:
    found = facts_of("list", directory)
    assert found["directory"] == str(directory) and found["ignored"] == []
    rows = found["checkpoints"]
    assert [row["step"] for row in rows] == [30, 20, 10]
    assert [row["is_newest"] for row in rows] == [True, False, False]
    for row in rows:
        folder = folder_of(directory, row["step"])
        assert row["folder"] == folder.name and row["is_whole"] and row["problem"] is None
        assert row["size_bytes"] == sum(each.stat().st_size for each in folder.iterdir())
        manifest, tensors = reader_from_the_page.read(folder)
        assert row["created_s"] == manifest["created_s"] and row["age_s"] >= 0
        assert (row["world_size"], row["num_tensors"], row["attempt"]) == (1, len(tensors), 1)
    text = invoke("list", directory).stdout.splitlines()
    assert text[0].split() == ["step", "attempt", "age", "size", "ranks", "tensors"]
    assert text[1].split()[0] == "30" and text[1].endswith("whole, newest")


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("missing", "shard-00000-of-00001.safetensors is missing"),
        ("cut", "bytes, has 4096"),
        ("manifest", "CRC32C"),
    ],
)
def test_list_finds_damage_that_no_data_shows(damage: str, problem: str, directory: Path) -> None:
    shard = shard_of(directory, 30)
    if damage == "missing":
        shard.unlink()
    elif damage == "cut":
        shard.write_bytes(shard.read_bytes()[:4096])
    else:
        flip(folder_of(directory, 30) / MANIFEST, 40)
    rows = facts_of("list", directory)["checkpoints"]
    assert not rows[0]["is_whole"] and problem in rows[0]["problem"]
    assert [row["is_newest"] for row in rows] == [False, True, False]
    assert problem in invoke("list", directory).stdout


def test_list_says_what_is_ignored_and_why(directory: Path) -> None:
    unfinished = directory / CommitName(1, 35, "00000009" + "0" * 8).folder
    unfinished.mkdir()
    with Checkpointer(directory) as checkpointer:  # attempt 2, which keeps 3
        checkpointer.save(state(40), step=40).wait(120)
    zombie = directory / CommitName(1, 45, "0000000a" + "0" * 8).folder
    shutil.copytree(folder_of(directory, 40), zombie)
    unfinished.mkdir(exist_ok=True)
    found = facts_of("list", directory)
    assert [row["step"] for row in found["checkpoints"]] == [40, 30, 20]
    ignored = {each["folder"]: each["why"] for each in found["ignored"]}
    assert ignored.keys() == {unfinished.name, zombie.name}
    assert "no manifest" in ignored[unfinished.name]
    assert "a later attempt had taken the directory over" in ignored[zombie.name]
    assert f"ignored: {zombie.name}: " in invoke("list", directory).stdout


def test_list_of_an_empty_directory(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    assert facts_of("list", tmp_path / "c")["checkpoints"] == []
    assert "no checkpoints" in invoke("list", tmp_path / "c").stdout


# --- show -----------------------------------------------------------------------------------------


def test_show_tells_tensors_values_and_facts(directory: Path) -> None:
    found = facts_of("show", f"{directory}@20")
    manifest, tensors = reader_from_the_page.read(folder_of(directory, 20))
    for member in ("step", "attempt", "parent", "world_size", "facts", "created_s"):
        assert found[member] == manifest[member]
    assert {each["name"]: each for each in found["tensors"]} == {
        name: {"name": name, "dtype": dtype, "shape": list(shape), "size_bytes": len(data)}
        for name, (dtype, shape, data) in tensors.items()
    }
    assert found["state"] == {
        "model": {"weight": {"tensor": "model.weight"}, "bias": {"tensor": "model.bias"}},
        "lr": 0.005,
        "epoch": 3,
        "own": [{"seed": 7}],
    }
    (file,) = found["files"]
    assert file["size_bytes"] == shard_of(directory, 20).stat().st_size == found["size_bytes"]
    lines = [line.strip() for line in invoke("show", f"{directory}@20").stdout.splitlines()]
    for line in ("weight  F32 [30, 40]  4800 B", "lr = 0.005", "seed = 7"):
        assert line in lines


def test_show_tells_where_an_engine_stands_in_its_data(tmp_path: Path) -> None:
    engine = tw.Engine(
        torch.nn.Linear(2, 1), tw.SGD(lr=0.1), checkpoint=tw.Checkpoint(every=2), run=tmp_path / "r"
    )
    data = torch.utils.data.TensorDataset(torch.ones(12, 2))
    for (inputs,) in engine.batches(torch.utils.data.DataLoader(data, batch_size=2), epochs=1):
        engine.step(engine(inputs).mean())
    engine.close()
    found = facts_of("show", tmp_path / "r")
    assert found["step"] == 6 and found["state"]["progress"]["num_steps"] == 6
    assert found["state"]["progress"]["data"]
    names = {each["name"] for each in found["tensors"]}
    assert {"model.weight", "model.bias"} <= names


# --- verify ---------------------------------------------------------------------------------------


def test_verify_reads_all_and_names_what_is_damaged(directory: Path) -> None:
    result = invoke("verify", directory)
    assert result.exit_code == 0 and result.stdout.count(": whole") == 3
    flip(shard_of(directory, 20))
    found = facts_of("verify", directory, exit_code=1)
    assert [row["is_whole"] for row in found["checkpoints"]] == [True, False, True]
    (damage,) = found["checkpoints"][1]["damages"]
    assert str(shard_of(directory, 20)) in damage and DAMAGED in damage
    assert found["num_damaged"] == 1
    assert facts_of("verify", f"{directory}@30")["num_damaged"] == 0
    result = invoke("verify", f"{directory}@20")
    assert result.exit_code == 1 and "DAMAGED" in result.stdout and DAMAGED in result.stdout


@pytest.mark.parametrize("damage", ["missing", "manifest", "of another step"])
def test_verify_names_files_and_manifests(damage: str, directory: Path) -> None:
    if damage == "missing":
        shard_of(directory, 30).unlink()
        named = "shard-00000-of-00001.safetensors"
    elif damage == "manifest":
        flip(folder_of(directory, 30) / MANIFEST, 40)
        named = folder_of(directory, 30).name
    else:
        shutil.copy(shard_of(directory, 20), shard_of(directory, 30))
        named = str(shard_of(directory, 30))
    found = facts_of("verify", directory, exit_code=1)
    (damage_line,) = found["checkpoints"][0]["damages"]
    assert named in damage_line and found["num_damaged"] == 1


# --- diff -----------------------------------------------------------------------------------------


def test_diff_tells_tensors_and_values(directory: Path) -> None:
    found = facts_of("diff", f"{directory}@10", 20, exit_code=1)
    (change,) = found["tensors"]
    assert (change["name"], change["kind"], change["num_differing"]) == (
        "model.weight",
        "values",
        1200,
    )
    assert (change["max_abs"], change["max_relative"]) == (10.0, 0.5)
    assert found["values"] == [{"path": "lr", "before": "0.01", "after": "0.005"}]
    assert (found["before"]["step"], found["after"]["step"]) == (10, 20)
    assert not found["is_same"] and found["num_same_tensors"] == 1
    result = invoke("diff", f"{directory}@10", f"{directory}@20")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert "1200 of 1200 elements differ, by at most 10 (0.5 relative)" in lines[0]
    assert lines[1] == "! lr: 0.01 -> 0.005"


def test_diff_of_the_same_is_success(directory: Path, tmp_path: Path) -> None:
    assert facts_of("diff", directory, 30)["is_same"]
    with Checkpointer(tmp_path / "d") as checkpointer:
        checkpointer.save({**state(30), "lr": 5}, step=3).wait(120)
    assert facts_of("diff", directory, tmp_path / "d", exit_code=1)["tensors"] == []
    assert facts_of("diff", directory, tmp_path / "d", "--tensors-only")["is_same"]


def test_diff_of_a_damaged_one_is_no_difference(directory: Path) -> None:
    flip(shard_of(directory, 20))
    result = invoke("diff", f"{directory}@10", 20)
    assert result.exit_code == 1 and result.stdout == "" and DAMAGED in result.stderr


# --- export ---------------------------------------------------------------------------------------


def test_export_to_safetensors_and_torch(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    result = invoke("export", f"{directory}@10", "--to", path, "--only", "model.")
    assert result.exit_code == 0 and result.stdout == f"{path}\n" and "step 10" in result.stderr
    expected = state(10)["model"]
    found = safetensors.torch.load_file(path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)

    facts = facts_of("export", directory, "--to", tmp_path / "s.pt")
    assert (facts["format"], facts["step"], facts["num_tensors"]) == ("torch", 30, 2)
    assert facts["size_bytes"] == (tmp_path / "s.pt").stat().st_size
    loaded = torch.load(tmp_path / "s.pt", weights_only=True)
    assert torch.equal(loaded["model"]["weight"], torch.full((30, 40), 30.0))
    assert loaded["own"] == [{"seed": 7}]
    facts = facts_of("export", directory, "--to", tmp_path / "t.pt", "--format", "safetensors")
    assert len(safetensors.torch.load_file(tmp_path / "t.pt")) == facts["num_tensors"]


def test_export_replaces_only_by_force(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("theirs")
    result = invoke("export", directory, "--to", path)
    assert result.exit_code == 2 and "--force" in result.stderr and path.read_text() == "theirs"
    assert invoke("export", directory, "--to", path, "--force").exit_code == 0
    assert len(safetensors.torch.load_file(path)) == 2


def test_export_keeps_out_of_the_directory_of_checkpoints(directory: Path) -> None:
    before = snapshot(directory)
    for path in (directory / "x", folder_of(directory, 30) / "x.safetensors"):
        result = invoke("export", directory, "--to", path)
        assert result.exit_code == 2 and "somewhere else" in result.stderr
    assert snapshot(directory) == before


def test_export_that_fails_leaves_nothing(directory: Path, tmp_path: Path) -> None:
    flip(shard_of(directory, 30))
    before = sorted(each.name for each in tmp_path.iterdir())
    result = invoke("export", directory, "--to", tmp_path / "x")
    assert result.exit_code == 1 and DAMAGED in result.stderr and result.stdout == ""
    result = invoke("export", f"{directory}@20", "--to", tmp_path / "no" / "x")
    assert result.exit_code == 1 and "no" in result.stderr
    result = invoke("export", f"{directory}@20", "--to", tmp_path / "x", "--only", "net.")
    assert result.exit_code == 2 and "'net.'" in result.stderr
    assert sorted(each.name for each in tmp_path.iterdir()) == before


# --- the guide ------------------------------------------------------------------------------------


def test_the_commands_of_the_guide_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text()
    script = re.search(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert script is not None
    done = subprocess.run(
        [sys.executable, "-c", script[1]], capture_output=True, text=True, cwd=tmp_path, timeout=300
    )
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^tradewind checkpoint ([^#\n]+)", page, flags=re.MULTILINE)
    assert {command.split()[0] for command in commands} == set(COMMANDS)
    for command in commands:
        result = invoke(*shlex.split(command))
        assert result.exit_code == (1 if command.startswith("diff") else 0), result.output
    model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    model.load_state_dict(safetensors.torch.load_file("model.safetensors"))
