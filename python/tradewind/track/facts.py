"""What a run's record says about its surroundings: command, versions, machine, git, place.

Nothing here imports torch: its version comes from the installed metadata, and GPUs are asked for
only where the program has loaded torch itself.
"""

from __future__ import annotations

import math
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tradewind import machine
from tradewind.place import Place
from tradewind.track.redact import HIDDEN, is_secret_name, redact_command, redact_text

_GIT_DEADLINE_S = 5.0
_MAX_DEPTH = 20
_MAX_REPR = 500


def utc_now() -> str:
    """Now in ISO 8601, UTC, to the millisecond."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def gather_facts(place: Place) -> dict[str, object]:
    """The surroundings of this process, JSON-safe. Takes one git call (at most 5 s)."""
    arguments = getattr(sys, "orig_argv", sys.argv)
    return {
        "command": redact_command(arguments),
        "working_directory": _working_directory(),
        "versions": _versions(),
        "machine": _machine(),
        "git": git_state(),
        "place": {"kind": place.kind, "rank": place.rank, "world_size": place.world_size},
    }


def tradewind_version() -> str:
    """The installed version, or "0.0.0+source" for a checkout that was not installed."""
    return _installed("tradewind") or "0.0.0+source"


def git_state(folder: Path | None = None) -> dict[str, object] | None:
    """Commit, branch (None when detached) and whether tracked files differ from the commit.

    None outside a work tree, without git, or where git gives no answer in time.
    """
    command = ["git", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        answer = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_DEADLINE_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = answer.stdout.decode(errors="replace").splitlines()
    heads = dict(line[2:].partition(" ")[::2] for line in lines if line.startswith("# branch."))
    commit, branch = heads.get("branch.oid"), heads.get("branch.head")
    return {
        "commit": None if commit == "(initial)" else commit,
        "branch": None if branch == "(detached)" else branch,
        "dirty": any(not line.startswith("#") for line in lines),
    }


def json_safe(value: object, *, depth: int = 0) -> object:
    """`value` as plain JSON: secrets hidden, non-finite floats and unknown objects as text,
    arrays and tensors by shape only (their values stay where they are)."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else non_finite_name(value)
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, os.PathLike):
        return redact_text(os.fsdecode(value))
    if depth >= _MAX_DEPTH:
        return "…"
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name, None) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _safe_item(str(key), item, depth) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((json_safe(item, depth=depth + 1) for item in value), key=repr)
    if isinstance(value, (list, tuple)):
        return [json_safe(item, depth=depth + 1) for item in value]
    return _described(value, depth)


def non_finite_name(value: float) -> str:
    """The text that stands for a non-finite float in JSON."""
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _safe_item(key: str, item: object, depth: int) -> object:
    if isinstance(item, str) and item and is_secret_name(key):
        return HIDDEN
    return json_safe(item, depth=depth + 1)


def _described(value: object, depth: int) -> object:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None:
        if not hasattr(value, "detach") and tuple(shape) == () and hasattr(value, "item"):
            return json_safe(value.item(), depth=depth + 1)  # a numpy scalar
        return f"{type(value).__name__}(shape={list(shape)}, dtype={dtype})"
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__qualname__}, whose repr fails>"
    return redact_text(text[:_MAX_REPR])


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _versions() -> dict[str, str | None]:
    torch = sys.modules.get("torch")
    return {
        "tradewind": tradewind_version(),
        "python": platform.python_version(),
        "torch": _installed("torch"),
        "numpy": _installed("numpy"),
        "cuda": getattr(getattr(torch, "version", None), "cuda", None),
    }


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _machine() -> dict[str, object]:
    return {
        "hostname": socket.gethostname(),
        "cpu": machine.cpu_model(),
        "cores": machine.usable_cores(),
        "memory_bytes": machine.memory_bytes(),
        "gpus": _gpus(),
    }


def _gpus() -> list[str]:
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    try:
        if not torch.cuda.is_available():
            return []
        return [torch.cuda.get_device_name(idx) for idx in range(torch.cuda.device_count())]
    except Exception:  # a half-loaded or broken torch must not stop a run from being recorded
        return []
