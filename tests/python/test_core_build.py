"""The core builds without torch and Python, warns of nothing, and its GoogleTests pass: plain, and
under the sanitizers. The builds are kept in build/, so that only what changed is built again;
.ci/build_ahead.py has them built while other tests run."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 1800
# Tools that pip installed lie beside this Python, which need not be on the PATH.
SEARCH_PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
PACKAGES = {"cmake": "cmake", "ctest": "cmake", "ninja": "ninja", "g++": "g++"}
# Printed where the kernel places memory in more ways than this ThreadSanitizer knows.
TSAN_REFUSES = "ThreadSanitizer: unexpected memory mapping"


@dataclass(frozen=True)
class Config:
    name: str
    options: tuple[str, ...]


CONFIGS = [
    # One GPU's code is enough to build and load the CUDA library; the package has all.
    Config("plain", ("-DCMAKE_CXX_FLAGS_RELEASE=-O2", "-DCMAKE_CUDA_ARCHITECTURES=90-real")),
    Config(
        "address-undefined",
        (
            "-DTRADEWIND_SANITIZE=address,undefined",
            "-DCMAKE_CXX_FLAGS_RELEASE=-O1",
            "-DTRADEWIND_CUDA=OFF",
        ),
    ),
    Config(
        "thread",
        (
            "-DTRADEWIND_SANITIZE=thread",
            "-DCMAKE_CXX_FLAGS_RELEASE=-O1",
            "-DTRADEWIND_CUDA=OFF",
        ),
    ),
]


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": SEARCH_PATH}
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=TIMEOUT_S
    )


def tail(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stdout + done.stderr)[-8000:]


def require_tools() -> None:
    for tool, package in PACKAGES.items():
        if shutil.which(tool, path=SEARCH_PATH) is None:
            pytest.skip(f"{tool} was not found; install the package {package}")


@contextmanager
def locked(build: Path) -> Iterator[None]:
    """One build at a time in a folder: ninja does not look for a second one."""
    build.mkdir(parents=True, exist_ok=True)
    with (build / "pytest.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def configure(build: Path, options: Sequence[str]) -> None:
    done = run(
        *("cmake", "-S", ROOT, "-B", build, "-G", "Ninja", "-DCMAKE_CXX_COMPILER=g++"),
        *("-DTRADEWIND_BUILD_EXTENSION=OFF", "-DTRADEWIND_BUILD_TESTS=ON"),
        *("-DTRADEWIND_WERROR=ON", "-DTRADEWIND_FETCH_GTEST=OFF"),
        *options,
    )
    if "GoogleTest was not found" in done.stderr:
        pytest.skip("GoogleTest was not found; install the package libgtest-dev")
    assert done.returncode == 0, tail(done)


def run_tests(build: Path) -> subprocess.CompletedProcess[str]:
    jobs = str(os.cpu_count() or 1)
    ctest = ("ctest", "--test-dir", build, "--output-on-failure", "--no-tests=error", "-j", jobs)
    done = run(*ctest)
    if done.returncode != 0 and TSAN_REFUSES in done.stdout:
        if shutil.which("setarch", path=SEARCH_PATH) is None:
            pytest.skip(f"{TSAN_REFUSES}; install setarch (util-linux) to run without ASLR")
        done = run("setarch", "-R", *ctest)
        if TSAN_REFUSES in done.stdout or "failed to set personality" in done.stderr:
            pytest.skip(f"{TSAN_REFUSES}; allow personality(2), or lower vm.mmap_rnd_bits to 28")
    return done


@contextmanager
def built(config: Config) -> Iterator[Path]:
    """The folder with the configuration's tests, up to date and locked."""
    build = ROOT / "build" / f"cpp-tests-{config.name}"
    with locked(build):
        configure(build, config.options)
        done = run("ninja", "-C", build)
        assert done.returncode == 0, tail(done)
        yield build


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_core(config: Config) -> None:
    require_tools()
    with built(config) as build:
        tested = run_tests(build)
        assert tested.returncode == 0, tail(tested)
