"""One test per row of the exception table in csrc/bindings/exceptions.cpp."""

from __future__ import annotations

import errno
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tradewind as tw
from tradewind import checkpoint
from tradewind._core import native


def test_bad_value_is_value_error() -> None:
    with pytest.raises(ValueError, match=r"update rule 'adamm': expected one of adamw, .*sgd"):
        native.rule("adamm")


def test_bad_type_is_type_error() -> None:
    with pytest.raises(TypeError, match=r"parameter 'count': expected float32.*got int64"):
        native.OptimizerTable().add_group("sgd", [torch.arange(3)], ["count"])


def test_bad_state_is_runtime_error() -> None:
    parameter = torch.zeros(3, requires_grad=True)
    table = native.OptimizerTable()
    table.add_group("sgd", [parameter], ["weight"])
    parameter.grad = torch.zeros(3).to_sparse()
    with pytest.raises(
        RuntimeError,
        match=r"parameter 'weight': sparse gradients are not supported; use sparse=False",
    ):
        table.collect()


def test_out_of_memory_is_memory_error() -> None:
    code = """
import resource, torch
from tradewind._core import native
parameter = torch.zeros(1 << 26)
resource.setrlimit(resource.RLIMIT_AS, (resource.getpagesize() * 4096, -1))
try:
    native.ParameterArena([parameter], ["weight"])
except MemoryError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "the system refused 268435456 bytes" in done.stdout, done.stderr


def test_peer_lost_is_sharing_error() -> None:
    parameter = torch.zeros(3, requires_grad=True)
    store = dist.HashStore()
    backend = dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=5))
    shared = native.SharedGradients(
        [parameter], ["weight"], backend, store, "alone", native.ShareOptions()
    )
    shared.fail("rank 1 raised ValueError in forward")
    with pytest.raises(tw.SharingError, match=r"^rank 1 raised ValueError in forward$"):
        shared.finish_backward()
    assert issubclass(tw.SharingError, RuntimeError)


def test_system_failure_is_the_oserror_of_its_errno(tmp_path: Path) -> None:
    path = str(tmp_path / "none")
    with pytest.raises(
        FileNotFoundError, match=r"could not be opened: No such file or directory: '.*/none'"
    ) as caught:
        native.posix_env().read_file(path, 10)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, path)
    assert type(caught.value) is FileNotFoundError


def test_damaged_is_damaged_checkpoint_error(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(b"")
    with pytest.raises(native.DamagedCheckpointError, match=r"shard.*4096"):
        native.read_shard(native.posix_env(), str(path), 4096, 4096, b"\0\0\0\0", [])
    assert checkpoint.DamagedCheckpointError is native.DamagedCheckpointError
    assert checkpoint.CheckpointError is native.CheckpointError
    assert issubclass(native.DamagedCheckpointError, native.CheckpointError)
    assert issubclass(native.CheckpointError, RuntimeError)
    assert native.CheckpointError.__module__ == "tradewind"
