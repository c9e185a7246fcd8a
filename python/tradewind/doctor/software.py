"""Findings about Python, torch, the native module, the CUDA compiler and NCCL."""

from __future__ import annotations

import ast
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from tradewind.doctor.findings import Finding
from tradewind.doctor.torch_probe import TorchAnswers

_PYTHONS = ((3, 10), (3, 13))
_TORCHES = ((2, 11), (2, 13))
_MIN_NVCC = (12, 8)
_NVCC_DEADLINE_S = 10.0
_REBUILD = "in the checkout, run: pip install --no-build-isolation ."


def python_finding(
    version: tuple[int, int] = sys.version_info[:2],
    has_gil: bool = not sysconfig.get_config_var("Py_GIL_DISABLED"),
) -> Finding:
    """Whether this Python is one that tradewind supports."""
    facts = {"version": platform.python_version(), "executable": sys.executable}
    found = f"{platform.python_implementation()} {platform.python_version()}"
    low, high = (".".join(map(str, each)) for each in _PYTHONS)
    if not has_gil:
        return Finding(
            "Python",
            "warning",
            f"{found}, free-threaded",
            "tradewind refuses to load in free-threaded Python",
            f"use a build of Python {low} to {high} with the GIL",
            facts,
        )
    if not _PYTHONS[0] <= version <= _PYTHONS[1]:
        return Finding(
            "Python",
            "warning",
            found,
            "untested: torch may have no wheels for it",
            f"use Python {low} to {high}",
            facts,
        )
    return Finding("Python", "ok", found, facts=facts)


def torch_finding(answers: TorchAnswers) -> Finding:
    """Whether torch loads, and in a supported version."""
    low, high = (".".join(map(str, each)) for each in _TORCHES)
    install = f"pip install 'torch>={low},<{_TORCHES[1][0]}.{_TORCHES[1][1] + 1}'"
    if answers.is_absent:
        return Finding(
            "torch",
            "missing",
            "not installed",
            "no training; reports, the record and this command work",
            install,
        )
    trouble = answers.trouble("import")
    if trouble is not None:
        return Finding(
            "torch",
            "missing",
            f"installed, but it does not load: {trouble}",
            "no training; reports, the record and this command work",
            f"try: {sys.executable} -c 'import torch'; reinstall it: {install} --force-reinstall",
        )
    facts = answers.facts["import"]
    version = str(facts["version"])
    cuda = facts.get("built_for_cuda")
    found = f"{version}, {f'built for CUDA {cuda}' if cuda else 'CPU only'}"
    if not _TORCHES[0] <= _minor(version) <= _TORCHES[1]:
        return Finding(
            "torch", "warning", found, f"unsupported: expected {low} to {high}", install, facts
        )
    return Finding("torch", "ok", found, facts=facts)


def native_finding(answers: TorchAnswers, build: dict[str, object] | None) -> Finding:
    """Whether the native module is there, made for this torch, and loads."""
    title, cost = "native module", "no optimizers and no Engine; reports and the record work"
    if build is None:
        return Finding(title, "missing", "not built", cost, _REBUILD)
    made_for = str(build.get("TORCH_VERSION"))
    facts = {"torch": made_for, "cuda": build.get("CUDA")}
    found = f"built for torch {made_for}, {'with' if build.get('CUDA') else 'without'} CUDA"
    loaded = answers.facts.get("import")
    if loaded is None:
        return Finding(
            title, "warning", found, "untried, since torch does not load", "repair torch", facts
        )
    installed = str(loaded["version"])
    if _minor(installed) != _minor(made_for):
        return Finding(
            title,
            "missing",
            f"{found}, but torch {installed} is installed",
            f"it refuses to load (C++ interfaces differ between torch minors): {cost}",
            f"{_REBUILD} (or: pip install torch=={made_for.split('+')[0]})",
            facts,
        )
    trouble = answers.trouble("native")
    if trouble is not None:
        return Finding(title, "missing", f"{found}; it fails to load: {trouble}", cost, _REBUILD,
                       facts)  # fmt: skip
    return Finding(title, "ok", f"{found}; loads", facts=facts)


def nccl_finding(answers: TorchAnswers, num_gpus: int) -> Finding:
    """The NCCL that torch brings, which matters from two GPUs on."""
    version = answers.facts.get("nccl", {}).get("version")
    if version:
        return Finding("NCCL", "ok", f"{version}, torch's", facts={"version": version})
    reason = answers.errors.get("nccl")
    found = f"none in torch{f' ({reason})' if reason else ''}"
    if num_gpus < 2:
        return Finding("NCCL", "ok", f"{found}; needed from two GPUs on")
    return Finding(
        "NCCL",
        "missing",
        found,
        f"{num_gpus} GPUs cannot share gradients directly",
        "install a torch built for CUDA",
    )


def nvcc_finding(num_gpus: int) -> Finding:
    """The CUDA compiler, which only building the CUDA library needs."""
    title, needed = "CUDA compiler", ".".join(map(str, _MIN_NVCC))
    path = _nvcc_path()
    remedy = f"install CUDA Toolkit {needed} or newer and put nvcc on the PATH, then rebuild"
    if path is None:
        if not num_gpus:
            return Finding(title, "ok", "nvcc not found; needed only to build for GPUs")
        return Finding(
            title, "missing", "nvcc not found", "the CUDA library cannot be built here", remedy
        )
    version = _nvcc_version(path)
    if version is None:
        return Finding(title, "warning", f"{path}, which does not answer", None, remedy)
    text = ".".join(map(str, version))
    facts = {"path": path, "version": text}
    if version < _MIN_NVCC:
        return Finding(
            title, "warning", f"{text} ({path})", f"too old to build: needs {needed}", remedy, facts
        )
    return Finding(title, "ok", f"nvcc {text} ({path})", facts=facts)


def build_info() -> dict[str, object] | None:
    """The constants of the module that the build writes, or None where nothing was built. Read as
    text: nothing of the build is run."""
    try:
        spec = importlib.util.find_spec("tradewind._build_info")
        if spec is None or spec.origin is None:
            return None
        return constants_of(Path(spec.origin).read_text("utf-8"))
    except (OSError, ImportError, ValueError, SyntaxError):
        return None


def constants_of(source: str) -> dict[str, object]:
    """Names and values of the literal assignments in a module's source."""
    found: dict[str, object] = {}
    for node in ast.parse(source).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        target = node.target if isinstance(node, ast.AnnAssign) else target
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
            found[target.id] = value.value
    return found


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(each) for each in re.findall(r"\d+", version)[:2])


def _nvcc_path() -> str | None:
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    folders = [f"{home}/bin" for home in (*homes, "/usr/local/cuda") if home]
    return shutil.which("nvcc") or shutil.which("nvcc", path=os.pathsep.join(folders))


def _nvcc_version(path: str) -> tuple[int, ...] | None:
    try:
        answer = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_NVCC_DEADLINE_S,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(rb"release (\d+)\.(\d+)", answer.stdout)
    return (int(match[1]), int(match[2])) if match else None
