"""Building in the wrong place fails in seconds with the command that works."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import venv

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def find_torch(python: str, path: pathlib.Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(path)} if path else {}
    script = ROOT / "cmake" / "find_torch.py"
    return subprocess.run([python, str(script)], capture_output=True, text=True, env=environment)


def test_finds_this_torch() -> None:
    import torch

    done = find_torch(sys.executable)
    root, version = done.stdout.split(";")
    assert version == torch.__version__ and pathlib.Path(root, "version.py").exists()


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    return folder / "bin" / "python"


def test_without_torch_it_names_the_command(bare_python: pathlib.Path) -> None:
    done = find_torch(str(bare_python))
    assert done.returncode != 0
    assert "pip install --no-build-isolation ." in done.stderr and "has none" in done.stderr


def test_unsupported_minors_are_named(bare_python: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.9.1+cpu'\n")
    done = find_torch(str(bare_python), tmp_path)
    assert done.returncode != 0
    assert "expected torch 2.11 or 2.12 or 2.13, found 2.9.1+cpu" in done.stderr


def test_the_first_hook_that_pip_calls_refuses(bare_python: pathlib.Path) -> None:
    """pip asks for this before it resolves dependencies, that is, before it would fetch a torch."""
    code = f"""
import sys, types
package = types.ModuleType("scikit_build_core")
package.build = types.ModuleType("scikit_build_core.build")
sys.modules.update({{"scikit_build_core": package, "scikit_build_core.build": package.build}})
sys.path.insert(0, {str(ROOT / "cmake")!r})
import build_backend
try:
    build_backend.get_requires_for_build_wheel()
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run([str(bare_python), "-c", code], capture_output=True, text=True)
    assert "pip install --no-build-isolation ." in done.stdout, done.stderr


def test_wheel_holds_no_libtorch() -> None:
    import tradewind._native as native

    linked = subprocess.run(
        ["readelf", "-d", str(native.__file__)], capture_output=True, text=True, check=True
    ).stdout
    assert "$ORIGIN/../torch/lib" in linked
    package = pathlib.Path(str(native.__file__)).parent
    assert not [p.name for p in package.iterdir() if p.name.startswith(("libtorch", "libgomp"))]
