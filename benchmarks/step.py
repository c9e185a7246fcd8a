"""The optimizer step against its peers, on the CPU. Sections:

  limit        AdamW float32 against a stream of the same bytes
  cost         AdamW float32 with clipping, on top of backward, against torch with clipping, with a
               GradScaler, and against DeepSpeed's CPUAdam where it is installed
  storages     masters and states by storage: time, and bytes kept per parameter
  rules        the other rules against torch's fastest or a foreach version of their paper
  in_backward  the update inside backward: time and peak of gradient memory
  training     whole steps of three small models against a plain loop
  statistics   what engine.stats() costs
  memory       page faults of a steady step

Candidates take turns in one process over equal parameters and gradients (measuring.py).

    python benchmarks/step.py [--json] [--repeats 15] [--only cost,rules]
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable
from typing import Any

from step_backward import measure_cost, measure_in_backward
from step_sweep import measure_limit, measure_rules, measure_storages
from step_training import measure_memory, measure_statistics, measure_training

from measuring import keep_freed_memory, machine, table, text

SECTIONS: dict[str, Callable[[int], dict[str, Any]]] = {
    "limit": measure_limit,
    "cost": measure_cost,
    "storages": measure_storages,
    "rules": measure_rules,
    "in_backward": measure_in_backward,
    "training": measure_training,
    "statistics": measure_statistics,
    "memory": measure_memory,
}


def cell(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return text(value, 1e3, 2) if name.endswith("_s") else text(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def label(name: str) -> str:
    return f"{name[:-2]}, ms" if name.endswith("_s") else name.replace("_", " ")


def rows_of(results: dict[str, Any]) -> list[list[str]]:
    """Figures downwards, cases (layouts, storages …) across; one column where there are none."""
    is_nested = all(isinstance(value, dict) and "median" not in value for value in results.values())
    columns = results if is_nested else {"": results}
    names = list(dict.fromkeys(name for figures in columns.values() for name in figures))
    return [
        ["median (min to max)", *columns],
        *(
            [label(name), *(cell(name, f[name]) if name in f else "" for f in columns.values())]
            for name in names
        ),
    ]


def tables_of(section: str, results: dict[str, Any]) -> list[tuple[str, list[list[str]]]]:
    if section == "rules":
        return [(f"rules, {layout}", rows_of(figures)) for layout, figures in results.items()]
    return [(section, rows_of(results))]


def as_text(document: dict[str, Any]) -> str:
    facts = ", ".join(f"{key} {value}" for key, value in document["machine"].items())
    parts = [f"machine: {facts}"]
    for section, results in document["sections"].items():
        for title, rows in tables_of(section, results):
            parts.append(f"## {title}\n\n{table(rows)}")
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--repeats", type=int, default=15, help="rounds of each section")
    parser.add_argument("--only", default="", help="sections, separated by commas")
    parser.add_argument("--markdown", metavar="RESULTS", help="print the tables of a --json file")
    options = parser.parse_args()
    if options.markdown:
        with open(options.markdown) as file:
            print(as_text(json.load(file)))
        return
    chosen = [name for name in options.only.split(",") if name] or list(SECTIONS)
    unknown = sorted(set(chosen) - set(SECTIONS))
    if unknown:
        parser.error(f"--only: expected some of {', '.join(SECTIONS)}, got {', '.join(unknown)}")
    keep_freed_memory()
    document: dict[str, Any] = {"machine": machine(), "sections": {}}
    for name in chosen:
        print(f"{name} ...", file=sys.stderr, flush=True)
        document["sections"][name] = SECTIONS[name](options.repeats)
        gc.collect()  # the next section needs the memory
    print(json.dumps(document, indent=2) if options.json else as_text(document))


if __name__ == "__main__":
    main()
