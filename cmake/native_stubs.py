"""Print the type stubs of the native module, as python/tradewind/_native.pyi has them.

python cmake/native_stubs.py > python/tradewind/_native.pyi
"""

import contextlib
import io
import pathlib
import re
import subprocess
import sys
import tempfile

import pybind11_stubgen

import tradewind._core  # noqa: F401  (loads torch first, so that Tensor has a name)

EXCEPTIONS = {
    "SharingError": "RuntimeError",
    "CheckpointError": "RuntimeError",
    "DamagedCheckpointError": "CheckpointError",
}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(io.StringIO()):
            pybind11_stubgen.main(["tradewind._native", "-o", folder])
        stubs = (pathlib.Path(folder) / "tradewind" / "_native.pyi").read_text()
    # They bear the package's name, where users find them, and are made here.
    stubs = re.sub(rf"from tradewind import (?:{'|'.join(EXCEPTIONS)})\n", "", stubs)
    classes = "".join(f"class {name}({base}): ...\n\n" for name, base in EXCEPTIONS.items())
    stubs = stubs.replace("\nclass ", f"\n{classes}class ", 1)
    for command in (["check", "--fix-only", "--quiet"], ["format"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--stdin-filename", "_native.pyi", "-"],
            input=stubs,
            capture_output=True,
            text=True,
            check=True,
            cwd=pathlib.Path(__file__).parents[1],
        )
        stubs = done.stdout
    sys.stdout.write(stubs)


if __name__ == "__main__":
    main()
