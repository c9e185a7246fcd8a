"""Draw what a save holds training up, and when it is durable, against the size of the state.

    python benchmarks/plot_checkpoint.py RESULTS.json OUT.svg

Points are medians, bars reach from the best save to the worst; grey is the disk's own limit.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from error_bars import draw_error_bars

plt.rcParams["svg.fonttype"] = "none"
plt.rcParams["svg.hashsalt"] = "tradewind"

# Name in the results: label, colour, marker.
LINES = {
    "torch.save": ("torch.save + fsync", "#d1622b", "s"),
    "safetensors": ("safetensors + fsync", "#c9a227", "^"),
    "dcp": ("DCP save", "#8a6fb0", "v"),
    "dcp-async": ("DCP async_save", "#4f9a6b", "P"),
    "engine": ("Tradewind Engine", "#1f6fb4", "D"),
}
PANELS = {
    "stall_s": "training is held, s",
    "durable_s": "until durable, training going on, s",
}
LIMIT = "write_reused_s"


def draw(axes: Axes, sizes: dict[str, Any], key: str) -> None:
    for name, (label, color, marker) in LINES.items():
        points = [
            (float(size), case["candidates"][name][key])
            for size, case in sizes.items()
            if name in case["candidates"]
        ]
        draw_error_bars(axes, points, label, color, marker)
    if key == "durable_s":
        limits = [
            (float(size), case["candidates"]["limit"][LIMIT])
            for size, case in sizes.items()
            if "limit" in case["candidates"]
        ]
        draw_error_bars(axes, limits, "the disk's limit", "#999999", "x")
    axes.set_title(PANELS[key], fontsize=11)
    axes.set_xlabel("AdamW state, GB")
    axes.set_yscale("log")
    axes.grid(True, which="both", color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    sizes = json.loads(options.results.read_text())["sizes_GB"]
    if not sizes:
        raise SystemExit(f"{options.results}: expected sizes of checkpoint.py, found none")
    figure, panels = plt.subplots(1, len(PANELS), figsize=(10, 4.2))
    for axes, key in zip(panels, PANELS, strict=True):
        draw(axes, sizes, key)
    panels[0].legend(frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(options.out, metadata={"Date": None})


if __name__ == "__main__":
    main()
