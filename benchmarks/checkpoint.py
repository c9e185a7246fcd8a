"""Checkpoints of AdamW state, ours and every peer's, on one disk in one run.

python benchmarks/checkpoint.py --directory DISK [--json] [--sizes 1 2.5 5] [--saves 3]
                                [--turns 1] [--batch 192] [--only NAME ...] [--small]
python benchmarks/checkpoint.py --markdown RESULTS.json [--into PAGE]

Each candidate trains a net of linear layers on the CPU in a process of its own and saves while
it trains; turns go through the candidates forwards and backwards. `limit` is a raw loop of direct
writes and reads from memory in huge pages, into files of the same state (new or overwritten), with
the better of two numbers of threads. `--small` measures commits of 4 KB and 10 MB beside SQLite's.

  stall_s        training is held: the call, and what the next update waits for
  cost_s         everything a save costs training: stall and slowed compute, until it is durable
  durable_s      from the call until it is on stable storage, while training goes on
  idle_s         the same while nothing else runs
  memory_bytes   more memory at the peak than before the save
  restore_s      into memory that is there, page cache dropped
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from checkpoint_small import measure_small
from measuring import Figure, fill, machine, machine_line, summary, table, text

CANDIDATES = ("engine", "torch.save", "safetensors", "dcp", "dcp-async")
PEERS = CANDIDATES[1:]
HERE = Path(__file__).parent


def run_part(script: str, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{script} {' '.join(arguments)} failed:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure_size(
    gigabytes: float, names: list[str], folder: Path, saves: int, turns: int, batch: int
) -> dict[str, Any]:
    found: dict[str, dict[str, list[float]]] = {}
    for turn in range(turns):
        order = ["limit", *names] if turn % 2 == 0 else [*reversed(names), "limit"]
        for name in order:
            with tempfile.TemporaryDirectory(dir=folder) as own:
                script = "checkpoint_limit.py" if name == "limit" else "checkpoint_candidate.py"
                arguments = [own, str(gigabytes), str(saves)]
                if name != "limit":
                    arguments = [name, *arguments, str(batch)]
                part = run_part(script, *arguments)
            for key, values in part.items():
                found.setdefault(name, {}).setdefault(key, []).extend(values)
            print(f"{gigabytes:g} GB, {name}: {part}", file=sys.stderr)
    figures = {
        name: {key: summary(values) for key, values in keys.items() if values}
        for name, keys in found.items()
    }
    return {"candidates": figures, **compare(figures)}


def compare(figures: dict[str, dict[str, Figure]]) -> dict[str, Any]:
    """Ours against the limit, and against the best peer, by medians."""
    if "engine" not in figures or "limit" not in figures:
        return {}
    ours, limit = figures["engine"], figures["limit"]

    def median(of: dict[str, Figure], key: str) -> float:
        return of[key]["median"]

    ratios = {
        "durable_of_limit": median(limit, "write_reused_s") / median(ours, "durable_s"),
        "idle_of_limit": median(limit, "write_reused_s") / median(ours, "idle_s"),
        "restore_of_limit": median(limit, "read_s") / median(ours, "restore_s"),
    }
    peers = [figures[name] for name in PEERS if name in figures]
    for key in ("stall_s", "cost_s", "durable_s", "restore_s"):
        if peers:
            best = min(median(peer, key) for peer in peers)
            ratios[f"{key[:-2]}_of_best_peer"] = median(ours, key) / best
    return {"ratios": ratios}


def size_table(gigabytes: float, case: dict[str, Any]) -> str:
    keys = ("stall_s", "cost_s", "durable_s", "idle_s", "memory_bytes", "restore_s")
    rows = [
        [
            f"{gigabytes:g} GB",
            *(f"{key[:-2]}, s" if key.endswith("_s") else "memory, MB" for key in keys),
        ]
    ]
    for name, figures in case["candidates"].items():
        if name == "limit":
            shown = [
                f"write {text(figures['write_fresh_s'])} new, "
                f"{text(figures['write_reused_s'])} overwritten"
            ]
            rows.append([name, "", "", *shown, "", "", text(figures["read_s"])])
            continue
        rows.append(
            [
                name,
                *(
                    text(
                        figures.get(key),
                        1e-6 if key == "memory_bytes" else 1.0,
                        0 if key == "memory_bytes" else 3,
                    )
                    for key in keys
                ),
            ]
        )
    lines = [table(rows), ""]
    lines += [
        f"{key.replace('_', ' ')}: {value:.2f}" for key, value in case.get("ratios", {}).items()
    ]
    return "\n".join(lines)


def blocks_of(results: dict[str, Any]) -> dict[str, str]:
    """Tables by the mark that they stand behind in a page."""
    blocks = {"checkpoint": machine_line(results["machine"])}
    for size, case in results["sizes_GB"].items():
        blocks[f"checkpoint, {size} GB"] = size_table(float(size), case)
    rows = [["commit, ms", *next(iter(results["small"].values()))]]
    for size, figures in results["small"].items():
        rows.append([size, *(text(figure, 1e3, 2) for figure in figures.values())])
    blocks["checkpoint, small"] = table(rows)
    return blocks


def measure(options: argparse.Namespace) -> dict[str, Any]:
    options.directory.mkdir(parents=True, exist_ok=True)
    facts = {**machine(), "cores": os.cpu_count(), "load_before": os.getloadavg()[0]}
    folder, names = options.directory, options.only
    cases = {
        f"{size:g}": measure_size(size, names, folder, options.saves, options.turns, options.batch)
        for size in ([] if options.small else options.sizes)
    }
    small = measure_small(folder)
    return {"benchmark": "checkpoint", "machine": facts, "sizes_GB": cases, "small": small}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, help="a folder on the disk to be measured")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--sizes", type=float, nargs="*", default=[1.0, 2.5, 5.0], help="in GB")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--batch", type=int, default=192, help="samples of a training step")
    parser.add_argument("--only", nargs="*", default=list(CANDIDATES), choices=CANDIDATES)
    parser.add_argument("--small", action="store_true", help="commits of 4 KB and 10 MB alone")
    parser.add_argument("--markdown", type=Path, metavar="RESULTS", help="tables of a kept run")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="put them at a page's marks")
    options = parser.parse_args()
    if options.markdown is None and options.directory is None:
        parser.error("--directory: expected a folder on the disk to be measured")
    if options.markdown is not None:
        results = json.loads(options.markdown.read_text())
    else:
        results = measure(options)
    blocks = blocks_of(results)
    if options.into is not None:
        fill(options.into, blocks)
    elif options.json:
        print(json.dumps(results, indent=2))
    else:
        print("\n\n".join(blocks.values()))


if __name__ == "__main__":
    main()
