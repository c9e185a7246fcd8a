"""Who may include whom under csrc, as data, and the check of a tree against it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

# room: the other rooms that it may include. A new folder of csrc is entered here.
ROOMS: dict[str, tuple[str, ...]] = {
    "base": (),
    "arena": ("base",),
    "step": ("base", "arena"),
    "share": ("base", "arena"),
    "checkpoint": ("base", "arena"),
    "watch": ("base", "arena"),
    "torch": ("base", "arena", "step", "share", "checkpoint", "watch"),
    "bindings": ("base", "arena", "step", "share", "checkpoint", "watch", "torch"),
}
# How headers of others begin: the rooms that may include them.
FOREIGN_HEADERS: dict[str, tuple[str, ...]] = {
    "torch/": ("torch", "bindings"),
    "ATen/": ("torch", "bindings"),
    "c10/": ("torch", "bindings"),
    "caffe2/": ("torch", "bindings"),
    "pybind11/": ("bindings",),
    "Python.h": ("bindings",),
    "numpy/": (),
    "gtest/": (),
}
# Headers of CUDA: files of these kinds alone, so that nothing else needs a toolkit.
CUDA_HEADERS = ("cuda", "cub/", "thrust/", "cooperative_groups")
CUDA_SUFFIXES = (".cu", ".cuh")
# OpenMP, and torch's headers that need it: the bridge unit alone.
BRIDGE_UNIT = "torch/parallel.cpp"
BRIDGE_HEADERS = ("omp.h", "ATen/Parallel")
BRIDGE_TEXT = re.compile(r"#\s*pragma\s+omp|_Pragma\(\s*\"omp|\bomp_\w+\s*\(|\bat::parallel_for\b")

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*(?:include|include_next|import)\b[ \t]*(.*)$", re.MULTILINE)


def violations(csrc: Path) -> list[str]:
    """One line for each include under `csrc` that the tables do not have."""
    found = [
        f"{folder.name}: not a room of the table in cpp_arrows.py"
        for folder in sorted(csrc.iterdir())
        if folder.name not in ROOMS
    ]
    for path in sorted(csrc.rglob("*")):
        unit = path.relative_to(csrc).as_posix()
        if path.is_file() and unit.split("/")[0] in ROOMS:
            found += [f"{unit}: {complaint}" for complaint in _complaints(csrc, unit)]
    return found


def _complaints(csrc: Path, unit: str) -> Iterator[str]:
    text = _COMMENT.sub(" ", (csrc / unit).read_text())
    for target in _INCLUDE.findall(text):
        yield from _judge(csrc, unit, target.strip())
    if unit != BRIDGE_UNIT:
        for match in BRIDGE_TEXT.findall(text):
            yield f"{match}: OpenMP belongs to {BRIDGE_UNIT}"


def _judge(csrc: Path, unit: str, target: str) -> Iterator[str]:
    """What is wrong with `#include target` in `unit`."""
    room = unit.split("/")[0]
    if len(target) < 3 or (target[0], target[-1]) not in (('"', '"'), ("<", ">")):
        yield f"include of {target}: write the header's path, no macro"
        return
    path = target[1:-1]
    # torch/ is libtorch's folder and the name of our room: ours are the files that are there.
    is_ours = (csrc / path).is_file()
    if (
        is_ours
        or ".." in path
        or (target[0] == '"' and not path.startswith(tuple(FOREIGN_HEADERS)))
    ):
        first, _, rest = path.partition("/")
        if first not in ROOMS or not rest or ".." in path:
            yield f"include of {target}: expected room/file.h"
        elif first != room and first not in ROOMS[room]:
            yield f"include of {target}: {room} may not include {first}"
        return
    for prefix, rooms in FOREIGN_HEADERS.items():
        if path.startswith(prefix) and room not in rooms:
            yield f"include of {target}: not in {room}"
    if path.startswith(CUDA_HEADERS) and Path(unit).suffix not in CUDA_SUFFIXES:
        yield f"include of {target}: CUDA's headers belong to {' and '.join(CUDA_SUFFIXES)} files"
    if path.startswith(BRIDGE_HEADERS) and unit != BRIDGE_UNIT:
        yield f"include of {target}: OpenMP belongs to {BRIDGE_UNIT}"
