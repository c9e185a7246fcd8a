"""Draw the time of a step against the speed of the link between two hosts.

    python benchmarks/plot_share.py RESULTS.json OUT.svg

Points are medians, bars reach from the fastest turn to the slowest. Left the gradients travel as
float32, right compressed. Of each family the best contender at each speed is drawn, DDP's default
beside it; grey is what no step that waits for its gradients goes below.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from error_bars import draw_error_bars

plt.rcParams["svg.fonttype"] = "none"

Scenario = dict[str, Any]
Pick = Callable[[str, dict[str, Any]], bool]

DDP, DDP_BEST, BACKWARD, NEXT_FORWARD = "#e0a07a", "#d1622b", "#7fb2dd", "#1f6fb4"


def ours(kind: str, overlap: str) -> Pick:
    return lambda _, x: x["kind"] == kind and x["settings"]["overlap"] == overlap


def of_kind(kind: str) -> Pick:
    return lambda _, x: x["kind"] == kind


def named(name: str) -> Pick:
    return lambda given, _: given == name


# Title of a panel: label, colour, marker and who belongs to it.
PANELS: dict[str, list[tuple[str, str, str, Pick]]] = {
    "float32 on the wire": [
        ("DDP, default", DDP, "v", named("ddp")),
        ("DDP, best options", DDP_BEST, "s", of_kind("ddp")),
        ("Tradewind, overlap backward", BACKWARD, "o", ours("ours", "backward")),
        ("Tradewind, overlap next forward", NEXT_FORWARD, "D", ours("ours", "next-forward")),
    ],
    "compressed": [
        ("DDP, fp16 hook", DDP, "v", named("ddp fp16")),
        ("DDP, fp16 hook, best options", DDP_BEST, "s", of_kind("ddp-compressed")),
        ("Tradewind, overlap backward", BACKWARD, "o", ours("ours-compressed", "backward")),
        (
            "Tradewind, overlap next forward",
            NEXT_FORWARD,
            "D",
            ours("ours-compressed", "next-forward"),
        ),
    ],
}


def links(results: dict[str, Any]) -> list[Scenario]:
    """Those of two hosts of a rank each, by rate."""
    found = [x for x in results["scenarios"].values() if (x["num_hosts"], x["num_ranks"]) == (2, 2)]
    if not found:
        raise SystemExit("expected results of share.py's section link, found none")
    return sorted(found, key=lambda scenario: scenario["rate_Gbps"])


def best(scenario: Scenario, pick: Pick) -> dict[str, float] | None:
    """The time of a step of the fastest that is picked."""
    contenders = scenario["contenders"].items()
    figures = [x["step_s"] for name, x in contenders if pick(name, x)]
    return min(figures, key=lambda figure: figure["median"], default=None)


def draw_line(
    axes: Axes, scenarios: list[Scenario], label: str, color: str, marker: str, pick: Pick
) -> None:
    found = [(scenario["rate_Gbps"], best(scenario, pick)) for scenario in scenarios]
    points = [(rate, figure) for rate, figure in found if figure is not None]
    draw_error_bars(axes, points, label, color, marker, scale=1e3)


def draw_floor(axes: Axes, scenarios: list[Scenario], wire_kinds: tuple[str, ...]) -> None:
    rates = [scenario["rate_Gbps"] for scenario in scenarios]
    compute = [best(scenario, named("compute alone")) for scenario in scenarios]
    wire = [
        best(scenario, lambda _, x, kinds=wire_kinds: x["kind"] in kinds) for scenario in scenarios
    ]
    for figures, style, label in ((compute, ":", "compute alone"), (wire, "--", "wire alone")):
        if None not in figures:
            medians = [figure["median"] * 1e3 for figure in figures if figure]
            axes.plot(rates, medians, style, color="0.45", linewidth=1.3, label=label)


def draw_panel(axes: Axes, scenarios: list[Scenario], title: str) -> None:
    is_compressed = title == "compressed"
    draw_floor(axes, scenarios, ("wire-fp16",) if is_compressed else ("wire",))
    for line in PANELS[title]:
        draw_line(axes, scenarios, *line)
    rates = [scenario["rate_Gbps"] for scenario in scenarios]
    axes.set_xscale("log", base=2)
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.set_xlim(min(rates) / 1.25, max(rates) * 1.25)
    axes.set_title(title)
    axes.set_xlabel("link, Gb/s each way")
    axes.grid(color="0.92")
    axes.legend(fontsize=9, frameon=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    results = json.loads(options.results.read_text())
    scenarios = links(results)
    figure, grid = plt.subplots(1, 2, figsize=(11, 5), sharey=True, layout="constrained")
    for axes, title in zip(grid, PANELS, strict=True):
        draw_panel(axes, scenarios, title)
    grid[0].set_ylabel("one training step, ms")
    grid[0].set_ylim(bottom=0)
    megabytes = scenarios[0]["gradient_bytes"] / 1e6
    figure.suptitle(
        f"Two hosts, {megabytes:.0f} MB of gradients a step ({results['machine']['cpu']})"
    )
    plt.rcParams["svg.hashsalt"] = "tradewind"  # the same picture for the same results
    dated = {"Date": None} if options.picture.suffix == ".svg" else {}
    figure.savefig(options.picture, metadata=dated)


if __name__ == "__main__":
    main()
