"""Sharing of gradients between hosts, against DistributedDataParallel and against the wire.

    python benchmarks/share.py [--json] [--sections link ...] [--rates 1 2 4] [--only 'ddp*' ...]
    python benchmarks/share.py --markdown RESULTS.json ... [--into docs/performance.md]
    python benchmarks/plot_share.py RESULTS.json OUT.svg

The hosts are network namespaces of this machine, joined by links kept to a rate (share_hosts.py);
making them needs root and iproute2, and what needs them is skipped where these are missing. One
step is forward, backward and update of a 10.5M-parameter net, back to back, one thread a rank.
Contenders take turns in one process per rank, in rounds A B C, C B A, each made anew for its turn.

  link          2 hosts of a rank each, at each rate
  one-rank      no wire at all: what hooks and buckets cost
  loopback      2 ranks on one host, not shaped
  hierarchical  2 hosts of 2 ranks, the computing slept: bytes between the hosts
  four-hosts    4 hosts of a rank each, the computing slept

"compute alone" shares nothing; "wire" all-reduces the gradients' bytes with nothing around it, in
pieces of a size; "wire beside compute" does so beside a step that does not depend on it; "sockets"
sends as many bytes over plain TCP. The floor of a step is the greater of compute alone and the best
wire. A star marks the best of a kind, which ratios refer to.
Time is taken in the steady state: what the last step leaves to the next is waited for after the
clock has stopped, as what the step before it left was waited for within.
"""

from __future__ import annotations

import os

# As in step.py: large tensors in huge pages, ours and everyone's.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from measuring import fill, machine, machine_line, table
from share_contenders import CONTENDERS
from share_hosts import why_unavailable
from share_launch import Measurement, run
from share_net import DEFAULT_SLEEPS, Sleeps
from share_report import reasons, rows, scenario

REFERENCES = ("compute alone", "wire *MB", "wire whole", "wire * compute")


@dataclass(frozen=True)
class Section:
    title: str
    names: tuple[str, ...]  # beside REFERENCES
    num_hosts: int = 1
    ranks_per_host: int = 1
    is_shaped: bool = False
    is_slept: bool = False
    without: tuple[str, ...] = ("engine alone", "* hierarchical *")


SECTIONS: dict[str, Section] = {
    "link": Section("2 hosts", ("*",), num_hosts=2, is_shaped=True),
    "one-rank": Section(
        "1 rank",
        ("compute alone", "engine *", "ddp*", "sharing *"),
        without=("* hierarchical *", "ddp powersgd"),
    ),
    "loopback": Section("2 ranks over loopback", ("*",), ranks_per_host=2),
    "hierarchical": Section(
        "2 hosts x 2 ranks",
        ("ddp", "ddp 4MB view", "* allreduce * none", "sharing allreduce none", "* hierarchical *"),
        num_hosts=2,
        ranks_per_host=2,
        is_shaped=True,
        is_slept=True,
        without=("wire fp16 *", "wire 1MB", "wire 2MB"),
    ),
    "four-hosts": Section(
        "4 hosts",
        ("ddp", "ddp 4MB view", "engine * none", "engine sharded * bf16", "engine sharded * int8"),
        num_hosts=4,
        is_shaped=True,
        is_slept=True,
        without=("* hierarchical *", "wire fp16 *", "wire 1MB", "wire 2MB"),
    ),
}


def matches(name: str, patterns: tuple[str, ...] | list[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def contenders_of(section: Section, only: list[str]) -> list[str]:
    """Those of the section that were asked for, and what they are compared with."""
    wanted = [*only, *REFERENCES]
    has_wire = section.num_hosts * section.ranks_per_host > 1
    names = (*section.names, *REFERENCES) if has_wire else section.names
    return [
        name
        for name in CONTENDERS
        if matches(name, names) and matches(name, wanted) and not matches(name, section.without)
    ]


def measurements(options: argparse.Namespace) -> Iterator[tuple[str, Measurement]]:
    for key in options.sections:
        section = SECTIONS[key]
        missing = why_unavailable() if section.is_shaped else None
        if missing:
            print(f"skipped: {key}: {missing}", file=sys.stderr)
            continue
        measurement = Measurement(
            contenders_of(section, options.only),
            options.steps,
            options.repeats,
            section.num_hosts,
            section.ranks_per_host,
            sleeps=DEFAULT_SLEEPS if section.is_slept else None,
        )
        if not section.is_shaped:
            yield section.title, measurement
            continue
        for rate in options.rates:
            yield f"{section.title}, {rate:g} Gb/s", replace(measurement, rate_Gbps=rate)


def measured_sleeps(figures: dict[str, Any]) -> Sleeps:
    """The computing that was measured on this machine, to be slept later in the run."""
    layers = figures["costs"]["layers"]
    return Sleeps(
        sum(layer["forward_s"]["median"] for layer in layers),
        sum(layer["backward_s"]["median"] for layer in layers),
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    scenarios: dict[str, Any] = {}
    ended: dict[str, str] = {}
    sleeps: Sleeps | None = None
    for title, measurement in measurements(options):
        # Who ended a process once is not let in again.
        names = [name for name in measurement.names if name not in ended]
        gone = {name: why for name, why in ended.items() if name in measurement.names}
        measurement = replace(measurement, names=names)
        if measurement.sleeps and sleeps:
            measurement = replace(measurement, sleeps=sleeps)
        print(f"{title}: {len(names)} contenders", file=sys.stderr, flush=True)
        began, load = time.perf_counter(), os.getloadavg()[0]
        documents, ended_here = run(measurement)
        ended |= ended_here
        figures = scenario(measurement, documents, {**gone, **ended_here}, load)
        figures["took_s"] = time.perf_counter() - began
        if not measurement.sleeps:
            sleeps = measured_sleeps(figures)
        scenarios[title] = figures
    torch.set_num_threads(1)
    facts = {**machine(), "cores": len(os.sched_getaffinity(0))}
    settings = {"steps": options.steps, "repeats": options.repeats}
    return {"machine": facts, "settings": settings, "scenarios": scenarios}


def markdown(title: str, figures: dict[str, Any]) -> str:
    return "\n\n".join([f"**{title}**", table(rows(figures)), *reasons(figures)])


def show(results: dict[str, Any]) -> None:
    print(machine_line(results["machine"]))
    for title, figures in results["scenarios"].items():
        print(f"\n{markdown(title, figures)}")


def read(paths: list[Path]) -> dict[str, Any]:
    """One document of several runs on the same machine."""
    documents = [json.loads(path.read_text()) for path in paths]
    if any(document["machine"] != documents[0]["machine"] for document in documents):
        raise SystemExit("expected results of one machine, got several")
    scenarios = {title: x for document in documents for title, x in document["scenarios"].items()}
    return {**documents[0], "scenarios": scenarios}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--rates", nargs="+", type=float, default=[1, 2, 4], metavar="GBPS")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=10, help="steps timed in a turn")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN")
    parser.add_argument("--markdown", nargs="+", type=Path, metavar="RESULTS.json")
    parser.add_argument("--into", type=Path, metavar="PAGE.md")
    options = parser.parse_args()
    # So that hosts are removed by whatever ends the run.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = read(options.markdown) if options.markdown else measure(options)
    if options.into:
        scenarios = results["scenarios"].items()
        blocks = {f"sharing, {title}": markdown(title, figures) for title, figures in scenarios}
        fill(options.into, {**blocks, "sharing": machine_line(results["machine"])})
    elif options.json:
        print(json.dumps(results, indent=2))
    else:
        show(results)


if __name__ == "__main__":
    main()
