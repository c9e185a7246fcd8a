"""Draw what every candidate moves against the time it takes, the machine's stream as the roofline.

    python benchmarks/plot_roofline.py RESULTS.json [MORE.json ...] OUT.svg

The stream's lines are its rate beside the fastest case of a panel (dashed) and beside the slowest
(dotted). A candidate on a line moves its bytes at that rate, one above it is slower. On top of
backward the time is the cost: a norm taken in backward is no traffic of the step's.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib

from step import read

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

plt.rcParams["svg.fonttype"] = "none"

PANELS = {
    "sweep": "AdamW with clipping, gradients given",
    "backward": "on top of backward",
    "formats": "formats of parameters and state",
    "rules": "other rules",
}
MARKERS = "osD^vP*Xh<>pd"
OURS = ("tradewind", "sweep", "norm")


def is_ours(section: str, name: str) -> bool:
    return not name.startswith("torch") if section == "formats" else name.startswith(OURS)


def points(section: str, cases: dict[str, Any]) -> list[tuple[str, str, float, float]]:
    """(case, candidate, GB moved, milliseconds) of each that can be drawn on logarithmic axes."""
    found = []
    for case, figures in cases.items():
        for name, candidate in figures["candidates"].items():
            seconds = candidate.get("cost_s", candidate["time_s"])["median"]
            if not name.startswith("stream") and seconds > 0:
                found.append((case, name, candidate["moved_bytes"] / 1e9, seconds * 1e3))
    return found


def stream_rate(figures: dict[str, Any]) -> float:
    """GB/s of the stream that ran beside a case's candidates."""
    if "stream_update_s" in figures:
        return 28 * figures["num_elements"] / figures["stream_update_s"]["median"] / 1e9
    return float(figures["candidates"]["stream_update"]["rate_GBps"]["median"])


def draw_panel(axes: Axes, section: str, cases: dict[str, Any]) -> None:
    found = points(section, cases)
    # In "rules" a candidate is ours or the peer and the rule is the shape; elsewhere the candidate
    # is the shape, and cases are told apart by the bytes they move.
    by_rule = section == "rules"
    names = list(dict.fromkeys(c.split(":")[0] if by_rule else n for c, n, *_ in found))
    seen = set()
    for case, name, gigabytes, milliseconds in found:
        shape = case.split(":")[0] if by_rule else name
        index = names.index(shape)
        ours = is_ours(section, name)
        label = f"{shape}, {'ours' if ours else 'peer'}" if by_rule else name.replace("_", " ")
        axes.scatter(
            gigabytes,
            milliseconds,
            marker=MARKERS[index % len(MARKERS)],
            s=46,
            color="#1f6fb4" if ours else "#d1622b",
            edgecolors="white",
            linewidths=0.6,
            alpha=0.6 + 0.4 * (index < len(MARKERS)),
            label=None if label in seen else label,
            zorder=3,
        )
        seen.add(label)
    low, high = min(x for *_, x, _ in found) / 1.6, max(x for *_, x, _ in found) * 1.6
    rates = [stream_rate(figures) for figures in cases.values()]
    for number, rate in enumerate(sorted({min(rates), max(rates)})):
        axes.plot(
            [low, high],
            [low / rate * 1e3, high / rate * 1e3],
            linestyle="--" if number else ":",
            color="0.35",
            linewidth=1.2,
            label=f"stream, {rate:.0f} GB/s",
        )
    axes.set(xscale="log", yscale="log", xlim=(low, high), title=PANELS[section])
    axes.set_xlabel("bytes moved, GB")
    axes.set_ylabel("time, ms")
    axes.grid(which="major", color="0.9")
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    results = read(options.results)
    sections = [name for name in PANELS if name in results["sections"]]
    if not sections:
        raise SystemExit(f"expected one of the sections {', '.join(PANELS)}, found none")
    figure, grid = plt.subplots(
        (len(sections) + 1) // 2, 2, figsize=(15, 10), squeeze=False, layout="constrained"
    )
    for axes, section in zip(grid.flat, sections, strict=False):
        draw_panel(axes, section, results["sections"][section]["cases"])
    for axes in list(grid.flat)[len(sections) :]:
        axes.remove()
    facts = results["machine"]
    figure.suptitle(
        f"{facts['cpu']}, {facts['threads']} threads: bytes moved against time (medians)"
    )
    plt.rcParams["svg.hashsalt"] = "tradewind"  # the same picture for the same results
    dated = {"Date": None} if options.picture.suffix == ".svg" else {}
    figure.savefig(options.picture, metadata=dated)


if __name__ == "__main__":
    main()
