"""How every benchmark here measures: candidates interleaved in one process, medians and ratios, the
machine described beside them."""

from __future__ import annotations

import ctypes
import gc
import json
import platform
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

Figure = dict[str, float]


def summary(values: list[float]) -> Figure:
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "n": len(values),
    }


Run = Callable[[], object]


def interleave(
    candidates: Mapping[str, Run],
    repeats: int,
    warmups: int = 2,
    *,
    before: Mapping[str, Run] | None = None,
    after: Mapping[str, Run] | None = None,
) -> dict[str, list[float]]:
    """Seconds of each run of each candidate, in rounds A B C, C B A, so that drift is shared.

    A candidate's `before` and `after` run around it and are not timed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    before, after = before or {}, after or {}
    for turn in range(warmups + repeats):
        for name in names if turn % 2 == 0 else reversed(names):
            before.get(name, _nothing)()
            began = time.perf_counter()
            candidates[name]()
            taken = time.perf_counter() - began
            after.get(name, _nothing)()
            if turn >= warmups:
                seconds[name].append(taken)
    return seconds


def _nothing() -> None:
    pass


def ratios(numerator: list[float], denominator: list[float]) -> Figure:
    """Summary of the ratio, round by round."""
    return summary([a / b for a, b in zip(numerator, denominator, strict=True)])


def ratios_above_zero(numerator: list[float], denominator: list[float]) -> Figure | None:
    """As `ratios`, over the rounds in which the denominator, a difference of times, is above 0;
    None where there is no such round."""
    pairs = [(a, b) for a, b in zip(numerator, denominator, strict=True) if b > 0]
    return ratios(*map(list, zip(*pairs, strict=True))) if pairs else None


_LIBC = ctypes.CDLL(None)


def keep_freed_memory() -> None:
    """Have malloc keep what is freed, so that no candidate pays for fresh pages in its timed part.
    Who allocates most in a step gains most: torch's foreach and default paths."""
    if not hasattr(_LIBC, "mallopt"):  # not glibc
        return
    m_trim_threshold, m_mmap_max = -1, -4
    _LIBC.mallopt(m_trim_threshold, -1)
    _LIBC.mallopt(m_mmap_max, 0)


def free_memory() -> None:
    """Give what nothing holds any more back to the system."""
    gc.collect()
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)


def machine() -> dict[str, Any]:
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    from tradewind._core import native

    return {
        "cpu": model,
        "architecture": platform.machine(),
        "threads": torch.get_num_threads(),
        "isa": native.isa(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def compile_stream() -> ctypes.CDLL:
    """The loops of stream.cpp, compiled for this machine."""
    source = Path(__file__).with_name("stream.cpp")
    library = Path(tempfile.mkdtemp()) / "stream.so"
    flags = ["-O3", "-march=native", "-std=c++20", "-shared", "-fPIC", "-pthread", "-ffast-math"]
    subprocess.run(["g++", *flags, str(source), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.stream_read.restype = ctypes.c_double
    return loaded


class Stream:
    """The machine's own limit: `stream.cpp` over arrays of `num_elements` float32."""

    def __init__(self, loops: ctypes.CDLL, num_elements: int) -> None:
        self._loops = loops
        self._arrays = [torch.randn(num_elements) for _ in range(4)]
        self._pointers = [ctypes.c_void_p(array.data_ptr()) for array in self._arrays]
        self._count = ctypes.c_int64(num_elements)
        self._threads = torch.get_num_threads()
        self.update_bytes = 28 * num_elements  # four arrays read, three written
        self.read_bytes = 4 * num_elements

    def update(self) -> None:
        self._loops.stream_update(*self._pointers, self._count, self._threads)

    def read(self) -> None:
        self._loops.stream_read(self._pointers[1], self._count, self._threads)


def timing(seconds: list[float], num_bytes: float | None = None) -> dict[str, Any]:
    """A candidate's figures: its time and, where its bytes are known, their rate."""
    figures: dict[str, Any] = {"time_s": summary(seconds)}
    if num_bytes is not None:
        figures["moved_bytes"] = num_bytes
        figures["rate_GBps"] = summary([num_bytes / value / 1e9 for value in seconds])
    return figures


def table(rows: list[list[str]]) -> str:
    """Rows as a Markdown table; the first is the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def machine_line(facts: Mapping[str, Any]) -> str:
    return "machine: " + ", ".join(f"{key} {value}" for key, value in facts.items())


def fill(page: Path, blocks: Mapping[str, str]) -> None:
    """Write each block between its marks in the page; other text stays."""
    text = page.read_text()
    for name, block in blocks.items():
        mark = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not mark.search(text):
            raise SystemExit(f"{page}: expected a mark <!-- {name} -->, found none")
        text = mark.sub(lambda found, block=block: f"{found[1]}{block}\n{found[2]}", text)
    page.write_text(text)


def show(results: dict[str, Any], rows: list[list[str]], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(results, indent=2))
        return
    print(machine_line(results["machine"]))
    print()
    print(table(rows))


def text(figure: Figure | None, scale: float = 1.0, digits: int = 2) -> str:
    if figure is None:
        return "-"
    low, high = figure["min"] * scale, figure["max"] * scale
    return f"{figure['median'] * scale:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def figure_row(key: str, figures: list[Figure]) -> list[str]:
    """A row of a table; times, whose keys end in `_s`, in milliseconds."""
    is_time = key.endswith("_s")
    label = (f"{key[:-2]}, ms" if is_time else key).replace("_", " ")
    return [label, *(text(figure, 1e3 if is_time else 1, 3) for figure in figures)]
