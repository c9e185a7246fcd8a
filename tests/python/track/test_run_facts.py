"""What a record says about its surroundings, and what it must not say."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tradewind.place import place
from tradewind.track.facts import gather_facts, git_state, json_safe
from tradewind.track.redact import redact_command, redact_text


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--token=abc"], ["--token=[redacted]"]),
        (["--api-key", "abc", "--lr", "1"], ["--api-key", "[redacted]", "--lr", "1"]),
        (["--api_key", "-abc"], ["--api_key", "[redacted]"]),
        (["PASSWORD=a b c"], ["PASSWORD=[redacted]"]),
        (["AWS_SECRET_ACCESS_KEY=abc", "x"], ["AWS_SECRET_ACCESS_KEY=[redacted]", "x"]),
        (["--hfToken=abc"], ["--hfToken=[redacted]"]),
        (["--use-auth", "--lr", "1"], ["--use-auth", "--lr", "1"]),
        (["s3://me:pass@host/x"], ["s3://[redacted]@host/x"]),
        (["--db=postgres://me:p@ss@h/x"], ["--db=postgres://[redacted]@h/x"]),
        (["http://h/x?a=1&token=abc&b=2"], ["http://h/x?a=1&token=[redacted]&b=2"]),
        (['{"api_key": "abc", "lr": 1}'], ['{"api_key": "[redacted]", "lr": 1}']),
        (["Authorization: Bearer abc"], ["Authorization: [redacted]"]),
        (["hf_" + "a" * 30], ["[redacted]"]),
        (["--note=AKIAABCDEFGHIJKLMNOP"], ["--note=[redacted]"]),
    ],
)
def test_secrets_are_hidden(arguments: list[str], shown: list[str]) -> None:
    assert redact_command(arguments) == shown


@pytest.mark.parametrize(
    "arguments",
    [
        ["python", "train.py", "--lr=0.1", "--max-tokens=100", "--tokenizer=gpt2"],
        ["--pad-token=<pad>", "--num_tokens", "3", "--key=value", "--keyboard=us"],
        ["--data=s3://bucket/path", "--time=12:30", "user@host.com", "a=b"],
        ["--eos-token", "</s>"],
    ],
)
def test_what_is_no_secret_stays(arguments: list[str]) -> None:
    assert redact_command(arguments) == arguments


def test_the_command_of_this_process_is_redacted(tmp_path: Path) -> None:
    code = "import json; from tradewind.track.facts import gather_facts\n"
    code += "from tradewind.place import place\nprint(json.dumps(gather_facts(place({}))))"
    script = tmp_path / "train.py"
    script.write_text(code)
    command = [sys.executable, str(script), "--password", "swordfish", "--lr=0.1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    facts = json.loads(done.stdout)
    assert facts["command"][1:] == [str(script), "--password", "[redacted]", "--lr=0.1"]
    assert facts["working_directory"] == str(tmp_path)
    assert facts["versions"]["torch"] == torch.__version__  # by metadata: it was not loaded
    assert facts["machine"]["gpus"] == []


@dataclasses.dataclass
class Options:
    lr: float
    password: str


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError


def test_any_configuration_becomes_json() -> None:
    loop: dict[str, object] = {}
    loop["self"] = loop
    config = {
        "none": None,
        "nan": math.nan,
        "inf": -math.inf,
        "path": Path("/data/x"),
        "tuple": (1, 2.5, "x"),
        "set": {3, 1, 2},
        "numpy": np.float32(0.5),
        "array": np.zeros((2, 3)),
        "tensor": torch.zeros(4),
        "options": Options(0.1, "swordfish"),
        "broken": Broken(),
        "api_key": "swordfish",
        "url": "https://me:swordfish@host/",
        "nested": {"token": "swordfish", 3: {"deep": ["--secret=swordfish"]}},
        "max_tokens": 100,
        "loop": loop,
        "callable": print,
    }
    text = json.dumps(json_safe(config), allow_nan=False)
    found = json.loads(text)
    assert "swordfish" not in text
    assert found["nan"] == "NaN" and found["inf"] == "-Infinity" and found["none"] is None
    assert found["path"] == "/data/x" and found["tuple"] == [1, 2.5, "x"]
    assert found["set"] == [1, 2, 3] and found["numpy"] == 0.5
    assert found["array"] == "ndarray(shape=[2, 3], dtype=float64)"
    assert found["tensor"] == "Tensor(shape=[4], dtype=torch.float32)"
    assert found["options"] == {"lr": 0.1, "password": "[redacted]"}
    assert "Broken" in found["broken"] and found["max_tokens"] == 100
    assert found["nested"]["3"] == {"deep": ["--secret=[redacted]"]}


def test_redacting_text_leaves_the_rest() -> None:
    assert redact_text("lr=0.1 token=abc steps=5") == "lr=0.1 token=[redacted] steps=5"


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def test_git_state(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    git(tmp_path, "init", "-b", "trunk")
    assert git_state(tmp_path) == {"commit": None, "branch": "trunk", "dirty": False}
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD").strip()
    assert git_state(tmp_path) == {"commit": commit, "branch": "trunk", "dirty": False}
    (tmp_path / "untracked").write_text("2")
    assert git_state(tmp_path) == {"commit": commit, "branch": "trunk", "dirty": False}
    (tmp_path / "file").write_text("3")
    assert git_state(tmp_path) == {"commit": commit, "branch": "trunk", "dirty": True}
    git(tmp_path, "checkout", "--detach", "-q")
    assert git_state(tmp_path) == {"commit": commit, "branch": None, "dirty": True}


def test_without_git_there_is_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state() is None


def test_gpus_are_asked_of_a_loaded_torch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda idx: f"GPU {idx}")
    machine = gather_facts(place({}))["machine"]
    assert isinstance(machine, dict) and machine["gpus"] == ["GPU 0", "GPU 1"]
    monkeypatch.delitem(sys.modules, "torch")
    machine = gather_facts(place({}))["machine"]
    assert isinstance(machine, dict) and machine["gpus"] == []


def test_the_run_directory_needs_no_torch(tmp_path: Path) -> None:
    code = """
import sys
from tradewind import track
from tradewind.report import write_report
with track.Run.open(sys.argv[1], config={}) as run:
    run.log(1, {"loss": 1.0, "note": "x", "h": track.Histogram([1, 2])})
track.open_metrics(sys.argv[1]).series("loss")
write_report(sys.argv[1])
print(sorted({"torch", "tensorflow", "matplotlib.pyplot"} & set(sys.modules)))
"""
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
