"""Where a process runs, from environments as torchrun and the services set them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tradewind.place import Place, place

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "5",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def test_an_empty_environment_is_a_laptop() -> None:
    here = place({})
    assert here == Place(kind="laptop")
    assert (here.rank, here.world_size, here.num_nodes, here.is_main) == (0, 1, 1, True)
    assert here.master_addr is None
    assert here.channels == {}
    assert here.model_dir is None


def test_torchrun_is_read_whole() -> None:
    here = place(TORCHRUN)
    assert here.kind == "torchrun"
    assert (here.rank, here.local_rank, here.node_rank) == (5, 1, 1)
    assert (here.world_size, here.local_world_size, here.num_nodes) == (8, 4, 2)
    assert (here.master_addr, here.master_port) == ("10.0.0.1", 29500)
    assert not here.is_main


def test_rank_world_and_master_are_enough() -> None:
    here = place({"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost"})
    assert (here.kind, here.local_rank, here.local_world_size) == ("torchrun", 3, 4)
    assert (here.node_rank, here.num_nodes, here.master_port) == (0, 1, None)


def test_node_is_derived_from_local_world_size() -> None:
    here = place(
        {"RANK": "5", "WORLD_SIZE": "6", "MASTER_ADDR": "a", "LOCAL_WORLD_SIZE": "2"},
    )
    assert (here.node_rank, here.num_nodes, here.local_rank) == (2, 3, 1)


def test_one_process_of_one_needs_no_master() -> None:
    assert place({"RANK": "0", "WORLD_SIZE": "1"}).kind == "laptop"
    assert place({"WORLD_SIZE": "1"}).kind == "laptop"


@pytest.mark.parametrize(
    ("changes", "variable", "words"),
    [
        ({"RANK": "two"}, "RANK", "integer"),
        ({"RANK": "-1"}, "RANK", "at least 0"),
        ({"RANK": "8"}, "RANK", "below WORLD_SIZE, which is 8"),
        ({"RANK": ""}, "RANK", "not set"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE", "not set"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE", "at least 1"),
        ({"WORLD_SIZE": "8.0"}, "WORLD_SIZE", "'8.0'"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK", "below LOCAL_WORLD_SIZE"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE", "at most WORLD_SIZE"),
        ({"GROUP_RANK": "2"}, "GROUP_RANK", "below GROUP_WORLD_SIZE"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT", "65535"),
        ({"SM_HPS": "[1]"}, "SM_HPS", "JSON object"),
        ({"SM_HPS": "{lr: 1}"}, "SM_HPS", "JSON object"),
    ],
)
def test_a_malformed_environment_is_named(
    changes: dict[str, str], variable: str, words: str
) -> None:
    with pytest.raises(ValueError, match=f"environment variable {variable}: ") as caught:
        place({**TORCHRUN, **changes})
    assert words in str(caught.value)
    assert "torchrun" in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "variable"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({"RANK": "1", "WORLD_SIZE": "1"}, "RANK"),
    ],
)
def test_half_an_environment_never_trains_alone(environ: dict[str, str], variable: str) -> None:
    with pytest.raises(ValueError, match=f"environment variable {variable}: "):
        place(environ)


def test_what_a_service_told() -> None:
    here = place(
        {
            "SM_CHANNEL_TRAINING": "/opt/ml/input/data/training",
            "SM_CHANNEL_Val_2": "/data/val",
            "SM_CHANNELS": '["training", "val_2"]',
            "SM_HPS": '{"lr": 0.1, "layers": [1, 2]}',
            "SM_MODEL_DIR": "/opt/ml/model",
            "TRADEWIND_CHECKPOINT_DIR": "/opt/ml/checkpoints",
            "TRADEWIND_RUN": "runs/x",
        }
    )
    assert here.channels == {
        "training": Path("/opt/ml/input/data/training"),
        "val_2": Path("/data/val"),
    }
    assert here.hyperparameters == {"lr": 0.1, "layers": [1, 2]}
    assert here.model_dir == Path("/opt/ml/model")
    assert here.checkpoint_dir == Path("/opt/ml/checkpoints")
    assert here.run_dir == Path("runs/x")


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM_HPS", '{"steps": 3}')
    assert place().hyperparameters == {"steps": 3}


@pytest.mark.parametrize(
    ("num_gpus", "local_rank", "visible", "expected"),
    [
        (0, 1, None, "cpu"),
        (4, 2, None, "cuda:2"),
        (1, 0, None, "cuda:0"),
        (1, 3, "3", "cuda:0"),  # the launcher shows each rank its own
    ],
)
def test_device(
    monkeypatch: pytest.MonkeyPatch,
    num_gpus: int,
    local_rank: int,
    visible: str | None,
    expected: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    here = Place("torchrun", local_rank=local_rank, local_world_size=8, visible_devices=visible)
    assert here.device == torch.device(expected)


def test_more_ranks_than_gpus_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(RuntimeError, match="below the 2 GPU"):
        _ = Place("torchrun", local_rank=2, local_world_size=3).device


def test_place_loads_no_torch() -> None:
    code = "import sys, tradewind.place as p; p.place({}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def test_the_public_name_is_callable_whoever_imports_the_module_first():
    code = "import tradewind.place, tradewind as tw; print(tw.place().kind, tw.place({}).rank)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.split()[1] == "0", result.stderr
