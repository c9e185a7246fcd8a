"""Draws what `step.py --json` measured: bytes moved by a step against its time, with the machine's
stream as the line that nothing can be left of.

    python benchmarks/plot_roofline.py RESULTS.json OUT.svg
"""

from __future__ import annotations

import json
import sys
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# A point: (label, bytes, seconds).
Points = list[tuple[str, float, float]]


def points_of(sections: dict[str, Any]) -> dict[str, Points]:
    """By series."""
    limit = sections["limit"]
    series: dict[str, Points] = {
        "AdamW float32, sweep": [
            (layout, f["moved_bytes"], f["sweep_s"]["median"]) for layout, f in limit.items()
        ],
        "torch AdamW fused": [
            (layout, f["moved_bytes"], f["torch_fused_s"]["median"]) for layout, f in limit.items()
        ],
    }
    series["by storage, 64M"] = [
        (name, f["moved_bytes"], f["step_s"]["median"])
        for name, f in sections["storages"].items()
        if "kept_bytes_per_parameter" in f and name != "fp32"
    ]
    series["by rule"] = [
        (name, f["moved_bytes"], f["step_s"]["median"])
        for layout in sections["rules"].values()
        for name, f in layout.items()
    ]
    return series


def main() -> None:
    source, target = sys.argv[1:3]
    with open(source) as file:
        document = json.load(file)
    sections = document["sections"]
    figure, axes = plt.subplots(figsize=(9, 6), layout="constrained")
    markers = ["o", "x", "s", "^"]
    for (name, points), marker in zip(points_of(sections).items(), markers, strict=True):
        xs, ys = [p[1] / 1e6 for p in points], [p[2] * 1e3 for p in points]
        axes.scatter(xs, ys, marker=marker, s=36, label=name, zorder=3)
        if name != "torch AdamW fused":
            for text, x, y in zip([p[0] for p in points], xs, ys, strict=True):
                axes.annotate(text, (x, y), xytext=(5, -9), textcoords="offset points", fontsize=6)
    largest = sections["limit"]["one 64M"]
    rate = largest["stream_rate_GBps"]["median"]
    ends = [50.0, 6000.0]
    axes.plot(ends, [x / rate for x in ends], color="black", linewidth=1, zorder=1)
    axes.annotate(
        f"stream of the same reads and writes, {rate:.0f} GB/s",
        (ends[0] * 1.1, ends[0] * 1.1 / rate),
        xytext=(0, -16),
        textcoords="offset points",
        fontsize=8,
    )
    axes.set(xscale="log", yscale="log", xlabel="MB moved by a step", ylabel="milliseconds")
    axes.set_title(f"One optimizer step, {document['machine']['cpu']}", fontsize=10)
    axes.grid(True, which="both", linewidth=0.3)
    axes.legend(loc="upper left", fontsize=8)
    figure.savefig(target)


if __name__ == "__main__":
    main()
