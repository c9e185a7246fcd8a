"""Print "torch's folder;its version" of this Python, or say on stderr what is missing.

Reads torch/version.py instead of importing torch: fast, and free of what torch needs to load.
"""

import ast
import importlib.util
import pathlib
import sys
import sysconfig

SUPPORTED_MINORS = ("2.11", "2.12", "2.13")
COMMAND = (
    "pip install torch==2.13.0 scikit-build-core cmake ninja && pip install --no-build-isolation ."
)


def main() -> None:
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        sys.exit("tradewind: free-threaded Python is not supported; use a build with the GIL.")
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit(
            f"tradewind: the build needs the torch that you train with, and {sys.executable} has "
            f"none. An isolated build never sees it. Run:\n    {COMMAND}"
        )
    root = pathlib.Path(spec.origin).parent
    version = read_version(root / "version.py")
    if not version.startswith(tuple(minor + "." for minor in SUPPORTED_MINORS)):
        sys.exit(
            f"tradewind: expected torch {' or '.join(SUPPORTED_MINORS)}, found {version} in "
            f"{root}. Run:\n    {COMMAND}"
        )
    print(f"{root};{version}", end="")


def read_version(path: pathlib.Path) -> str:
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__version__")], value=ast.Constant(value=value)):
                return str(value)
    sys.exit(f"tradewind: {path} does not say torch's version; reinstall torch.")


if __name__ == "__main__":
    main()
