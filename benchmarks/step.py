"""The optimizer step against its peers, on the CPU.

    python benchmarks/step.py [--json] [--repeats 15] [--only SECTION ...]
    python benchmarks/step.py --markdown RESULTS.json [--into docs/performance.md]

The first form measures, one section after another; each section's module says what. The second
prints the tables of a run that was kept (of several: `--json` runs of single sections may be given
together), or writes them between the marks of a page.
"""

from __future__ import annotations

import os

# Large tensors in huge pages, ours and everyone's (torch's own switch, read at its first
# allocation): torch is faster with it, and ours then gains nothing by its arenas' pages alone.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import argparse
import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import step_allocations
import step_backward
import step_deepspeed
import step_formats
import step_in_backward
import step_rules
import step_sweep
import step_whole
from measuring import (
    compile_stream,
    fill,
    free_memory,
    keep_freed_memory,
    machine,
    machine_line,
    table,
)

SECTIONS: dict[str, ModuleType] = {
    "sweep": step_sweep,
    "backward": step_backward,
    "formats": step_formats,
    "rules": step_rules,
    "in-backward": step_in_backward,
    "whole": step_whole,
    "allocations": step_allocations,
    "deepspeed": step_deepspeed,
}


def measure(names: list[str], repeats: int) -> dict[str, Any]:
    keep_freed_memory()
    loops = compile_stream()
    sections: dict[str, Any] = {}
    for name in names:
        began = time.perf_counter()
        load = os.getloadavg()[0]
        figures = SECTIONS[name].measure(repeats, loops)
        free_memory()
        seconds = time.perf_counter() - began
        sections[name] = {"cases": figures, "took_s": seconds, "load_before": load}
        print(f"{name}: {seconds:.0f} s", file=sys.stderr)
    return {"machine": machine(), "sections": sections}


def markdown(section: str, results: dict[str, Any]) -> str:
    """The tables of one section."""
    module = SECTIONS[section]
    tables = module.tables(results["sections"][section]["cases"])
    return "\n\n".join([f"**{module.TITLE}**", *map(table, tables)])


def show(results: dict[str, Any]) -> None:
    print(machine_line(results["machine"]))
    for section in results["sections"]:
        print(f"\n{markdown(section, results)}")


def read(paths: list[Path]) -> dict[str, Any]:
    """One document of several runs on the same machine; a later one replaces sections."""
    documents = [json.loads(path.read_text()) for path in paths]
    if any(document["machine"] != documents[0]["machine"] for document in documents):
        raise SystemExit("expected results of one machine, got several")
    sections = {name: x for document in documents for name, x in document["sections"].items()}
    return {"machine": documents[0]["machine"], "sections": sections}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--markdown", nargs="+", type=Path, metavar="RESULTS.json")
    parser.add_argument("--into", type=Path, metavar="PAGE.md")
    options = parser.parse_args()
    results = read(options.markdown) if options.markdown else measure(options.only, options.repeats)
    if options.into:
        blocks = {section: markdown(section, results) for section in results["sections"]}
        fill(options.into, {**blocks, "machine": machine_line(results["machine"])})
    elif options.json:
        print(json.dumps(results, indent=2))
    else:
        show(results)


if __name__ == "__main__":
    main()
