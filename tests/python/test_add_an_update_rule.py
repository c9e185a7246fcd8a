"""docs/add-an-update-rule.md, followed to the letter on a copy of the checkout: what it tells to
write is compiled, and the tests it tells to add pass. The copy and its build are kept in build/, so
that only what changed is built again."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "add-an-update-rule.md"
COPIED = ("CMakeLists.txt", "pyproject.toml", "cmake", "csrc", "python", "tests")
NOT_COPIED = (".pyc", ".so")
TIMEOUT_S = 1200
NINJA = ("ninja", "-j", str(os.cpu_count() or 1))
# Tools that pip installed lie beside this Python, which need not be on the PATH.
SEARCH_PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
# `import tradewind` means the copy, also where an editable install has a hook of its own.
RUN_PYTEST = """
import sys
sys.meta_path = [f for f in sys.meta_path if type(f).__name__ != "ScikitBuildRedirectingFinder"]
sys.path.insert(0, "python")
import pytest, tradewind
assert tradewind.__file__.startswith(sys.argv[1]), tradewind.__file__
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


@dataclass(frozen=True)
class Block:
    """A piece of code of the page and the file that it is for."""

    file: str
    language: str
    text: str

    def applied(self, before: str | None) -> str:
        """What the file reads afterwards: a new file whole, a diff at the one place it fits."""
        if self.language != "diff":
            assert before is None, f"{self.file}: expected a new file, but there is one"
            return self.text
        assert before is not None, f"{self.file}: expected a file to change, found none"
        lines = self.text.splitlines(keepends=True)
        assert all(line[0] in " +-" for line in lines), f"{self.file}: expected ' ', '+' or '-'"
        old = "".join(line[1:] for line in lines if line[0] != "+")
        new = "".join(line[1:] for line in lines if line[0] != "-")
        count = f"\n{before}".count(f"\n{old}")
        assert count == 1, f"{self.file}: expected these lines once, found {count} times:\n{old}"
        return f"\n{before}".replace(f"\n{old}", f"\n{new}")[1:]


def blocks() -> list[Block]:
    pattern = r"^`([\w./]+)`\n\n```(\w+)\n(.*?)^```$"
    found = re.findall(pattern, PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [Block(*parts) for parts in found]


def followed() -> dict[str, bytes]:
    """The files of this checkout as they are after following the page, by path."""
    files = {
        path.relative_to(ROOT).as_posix(): path.read_bytes()
        for name in COPIED
        for path in ([ROOT / name] if (ROOT / name).is_file() else sorted((ROOT / name).rglob("*")))
        if path.is_file() and path.suffix not in NOT_COPIED
    }
    for block in blocks():
        before = files.get(block.file)
        files[block.file] = block.applied(before and before.decode()).encode()
    return files


def test_the_page_fits_this_checkout() -> None:
    pieces = blocks()
    assert len(pieces) == PAGE.read_text().count("\n```") // 2 - 1, "a block without its file"
    written = [block.file for block in pieces]
    assert "csrc/step/rules/all.h" in written and "tests/python/optim/test_rules.py" in written
    files = followed()
    for block in pieces:
        if block.language != "diff":
            assert files[block.file].decode() == block.text


def write(files: dict[str, bytes], folder: Path) -> None:
    """Bring `folder` to hold these files, touching only what differs."""
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        if path.relative_to(folder).as_posix() not in files:
            path.unlink()
    for name, content in files.items():
        path = folder / name
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            path.chmod((ROOT / name).stat().st_mode if (ROOT / name).exists() else 0o644)


def run(*command: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PATH": SEARCH_PATH},
        timeout=TIMEOUT_S,
    )


def succeed(*command: str | Path, cwd: Path = ROOT) -> None:
    done = run(*command, cwd=cwd)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]


@dataclass(frozen=True)
class Copy:
    source: Path
    build: Path
    has_googletest: bool


def configure(source: Path, build: Path) -> bool:
    """Whether GoogleTest was found; it is not fetched for this."""
    for tests in ("ON", "OFF"):
        done = run(
            *("cmake", "-S", source, "-B", build, "-G", "Ninja", "-DTRADEWIND_CUDA=OFF"),
            *(f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_CXX_FLAGS_RELEASE=-O1"),
            *(f"-DTRADEWIND_BUILD_TESTS={tests}", "-DTRADEWIND_FETCH_GTEST=OFF"),
        )
        if "GoogleTest was not found" not in done.stderr:
            break
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return tests == "ON"


# The tests of the core that the page speaks of.
CPP_TESTS = ("step_rule_table_test", "step_kernels_test")


@contextmanager
def built() -> Iterator[Copy]:
    """The checkout after following the page, with its extension built in place, locked."""
    folder = ROOT / "build" / "add-an-update-rule"
    source, build = folder / "source", folder / "build"
    source.mkdir(parents=True, exist_ok=True)
    with (folder / "pytest.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        write(followed(), source)
        has_googletest = configure(source, build)
        succeed(*NINJA, "-C", build, "_native")
        for built in (*build.glob("_native*.so"), build / "_build_info.py"):
            shutil.copy2(built, source / "python" / "tradewind")
        yield Copy(source, build, has_googletest)


@pytest.fixture(scope="module")
def copy() -> Iterator[Copy]:
    for tool in ("cmake", "ninja", "c++"):
        if shutil.which(tool, path=SEARCH_PATH) is None:
            pytest.skip(f"{tool} was not found; install a C++ compiler, cmake and ninja")
    with built() as copy:
        yield copy


def test_the_new_rule_passes_the_tests_that_the_page_adds(copy: Copy) -> None:
    command = (sys.executable, "-c", RUN_PYTEST, str(copy.source))
    succeed(*command, "-k", "same_as_the_paper and Signum", "tests/python/optim", cwd=copy.source)


def test_the_new_rule_has_a_recipe_and_trains_in_every_storage(copy: Copy) -> None:
    code = """
import torch, tradewind as tw
x = torch.randn(256, 8)
for options in ({}, {"state_dtype": "8bit"}, {"state_dtype": "bf16", "clip_norm": 1.0}):
    model = torch.nn.Linear(8, 1)
    engine = tw.Engine(model, tw.Signum(lr=1e-2, **options))
    losses = []
    for _ in range(60):
        loss = (engine(x) - x.sum(1, keepdim=True)).square().mean()
        losses.append(float(loss))
        engine.step(loss)
    engine.close()
    assert losses[-1] < losses[0] / 2, (options, losses)
"""
    script = RUN_PYTEST.rpartition("sys.exit")[0] + code
    succeed(sys.executable, "-c", script, str(copy.source), cwd=copy.source)


def test_the_kernels_of_the_new_rule_agree_with_the_oracle(copy: Copy) -> None:
    if not copy.has_googletest:
        pytest.skip("GoogleTest was not found; install the package libgtest-dev")
    succeed(*NINJA, "-C", copy.build, *CPP_TESTS)
    tests = copy.build / "tests" / "cpp"
    succeed(tests / "step_rule_table_test")
    done = run(tests / "step_kernels_test", "--gtest_filter=*signum*")
    assert done.returncode == 0 and " 0 tests" not in done.stdout, done.stdout[-8000:]
