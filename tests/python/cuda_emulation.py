"""The CUDA library compiled for the host, as tests/cpp builds it: kernels step CPU tensors."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tradewind._core import native

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "cuda-emulated"
TARGET = "tradewind_cuda_emulated"
# Tools that pip installed lie beside this Python, which need not be on the PATH.
SEARCH_PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


class _Counts(ctypes.Structure):
    _fields_ = (
        ("loaded_bytes", ctypes.c_int64),
        ("stored_bytes", ctypes.c_int64),
        ("launches", ctypes.c_int64),
    )


class _String(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("size", ctypes.c_size_t))


class Emulation:
    """The library, and what the emulated grid (tests/cpp/cuda_emulation) has counted and found."""

    def __init__(self, path: Path) -> None:
        self.library = native.CudaLibrary(str(path))
        loaded = ctypes.CDLL(str(path))
        self._counts = loaded["_ZN14cuda_emulation6countsEv"]
        self._counts.restype = ctypes.POINTER(_Counts)
        self._failure = loaded["_ZN14cuda_emulation7failureB5cxx11Ev"]
        self._failure.restype = ctypes.POINTER(_String)

    @property
    def num_launches(self) -> int:
        return int(self._counts().contents.launches)

    @property
    def failure(self) -> str:
        text = self._failure().contents
        return ctypes.string_at(text.data, text.size).decode()


def build() -> Emulation:
    """Builds the library in build/, where only what changed is built again. Skips without tools."""
    for tool in ("cmake", "ninja", "g++"):
        if shutil.which(tool, path=SEARCH_PATH) is None:
            pytest.skip(f"{tool} was not found, so the CUDA kernels cannot be emulated")
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "pytest.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _run(
            *("cmake", "-S", ROOT, "-B", BUILD, "-G", "Ninja", "-DCMAKE_CXX_COMPILER=g++"),
            *("-DTRADEWIND_BUILD_EXTENSION=OFF", "-DTRADEWIND_BUILD_TESTS=ON"),
            *("-DTRADEWIND_FETCH_GTEST=OFF", "-DTRADEWIND_CUDA=OFF"),
        )
        _run("cmake", "--build", BUILD, "--target", TARGET)
    return Emulation(BUILD / "tests" / "cpp" / "cuda_emulation" / f"lib{TARGET}.so")


def _run(*command: str | Path) -> None:
    environment = {**os.environ, "PATH": SEARCH_PATH}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800)
    if "GoogleTest was not found" in done.stderr:
        pytest.skip("GoogleTest was not found; install the package libgtest-dev")
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
