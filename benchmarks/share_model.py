"""How long a step with shared gradients takes where no one has the machines: a simulation.

    python benchmarks/share_model.py [--json] [--ranks 16 64 ...] [--rates 25 100 ...]
    python benchmarks/share_model.py --check RESULTS.json     prediction against share.py's steps
    python benchmarks/share_model.py --plot OUT.svg
    python benchmarks/share_model.py --self-test              against closed forms

It prints what a step takes beyond its computing: waiting for the wire, and the core's time that
sharing took. All ranks are alike; a host's ranks share its link. `--costs COSTS.json` replaces the
measured defaults (share_step.py), and `--offloaded` has the network move and sum bytes without the
core. Latency is for a message and its answer to be acted on, so a ring pays it 2(N-1) times.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from measuring import table
from share_check import check, tell
from share_step import Cluster, Costs, Layer, Model, Plan, read_costs, step_seconds

GBPS = 1e9 / 8  # bytes a second
STRATEGIES = ("ring", "direct", "hierarchical")
OVERLAPS = ("backward", "next-forward")


def simulate(costs: Costs, options: argparse.Namespace) -> list[dict[str, Any]]:
    cases = []
    for ranks, rate in product(options.ranks, options.rates):
        cluster = Cluster(ranks, rate * GBPS, options.ranks_per_host)
        for strategy, overlap in product(STRATEGIES, OVERLAPS):
            seconds = step_seconds(costs, cluster, Plan(strategy, overlap, options.codec))
            cases.append(
                {
                    "num_ranks": ranks,
                    "rate_Gbps": rate,
                    "strategy": strategy,
                    "overlap": overlap,
                    "step_s": seconds,
                    "exposed_s": seconds - costs.compute_s,
                }
            )
    return cases


def rows(cases: list[dict[str, Any]]) -> list[list[str]]:
    columns = list(product(STRATEGIES, OVERLAPS))
    lines: dict[tuple[int, float], dict[tuple[str, str], str]] = {}
    for case in cases:
        line = lines.setdefault((case["num_ranks"], case["rate_Gbps"]), {})
        line[case["strategy"], case["overlap"]] = f"{case['exposed_s'] * 1e3:.1f}"
    return [
        ["ranks", "Gb/s", *(f"{strategy}, {overlap}" for strategy, overlap in columns)],
        *(
            [str(ranks), f"{rate:g}", *(line[column] for column in columns)]
            for (ranks, rate), line in lines.items()
        ),
    ]


def plot(cases: list[dict[str, Any]], costs: Costs, picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.fonttype"] = "none"
    plt.rcParams["svg.hashsalt"] = "tradewind"
    rates = sorted({case["rate_Gbps"] for case in cases})
    figure, grid = plt.subplots(
        1, len(rates), figsize=(3.4 * len(rates), 4), sharey=True, squeeze=False
    )
    colors = dict(zip(STRATEGIES, ("#d1622b", "#1f6fb4", "#3a8f4d"), strict=True))
    for axes, rate in zip(grid.flat, rates, strict=True):
        for strategy, overlap in product(STRATEGIES, OVERLAPS):
            mine = [
                (case["num_ranks"], case["exposed_s"] * 1e3)
                for case in cases
                if (case["rate_Gbps"], case["strategy"], case["overlap"])
                == (rate, strategy, overlap)
            ]
            axes.plot(
                *zip(*mine, strict=True),
                color=colors[strategy],
                linestyle="-" if overlap == "next-forward" else "--",
                marker="o",
                markersize=3,
                label=f"{strategy}, {overlap}",
            )
        axes.set(xscale="log", yscale="symlog", title=f"{rate:g} Gb/s a host", xlabel="ranks")
        axes.set_xscale("log", base=2)
        axes.grid(color="0.9")
    grid[0, 0].set_ylabel(f"beyond {costs.compute_s * 1e3:.0f} ms of computing, ms")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.set_layout_engine("constrained")
    figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else {})


def self_test() -> None:
    """One bucket, nothing but the wire: the closed forms of the strategies."""
    num_bytes, rate, latency = 1e6, 1e9, 1e-5
    costs = Costs(
        (Layer(num_bytes, 0.0, 0.0),),
        update_s_per_byte=0.0,
        sum_s_per_byte=0.0,
        wire_cpu_s_per_byte=0.0,
        latency_s=latency,
        message_s=0.0,
        local_Bps=float("inf"),
    )
    for ranks, per_host in product((8, 16, 64), (1, 8)):
        hosts, outside = ranks // per_host, ranks - per_host
        flat = 2 * (ranks - 1)
        expected = {
            "ring": flat / ranks * num_bytes / rate + flat * latency,
            "direct": 2 * (per_host * outside / ranks * num_bytes / rate + latency),
            "hierarchical": 2 * (hosts - 1) * (num_bytes / hosts / rate + latency),
        }
        for strategy, seconds in expected.items():
            found = Model(costs, Cluster(ranks, rate, per_host), Plan(strategy)).run()[0]
            if abs(found - seconds) > 1e-9 * max(seconds, 1e-6):  # rounding of sums of times
                raise SystemExit(f"{strategy}, {ranks} ranks: expected {seconds} s, got {found} s")
    print("the closed forms hold")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--ranks", nargs="+", type=int, default=[16, 64, 256, 1024, 4096])
    parser.add_argument("--rates", nargs="+", type=float, default=[25, 50, 100, 200, 400])
    parser.add_argument("--ranks-per-host", type=int, default=8)
    parser.add_argument("--codec", choices=["none", "bf16", "int8"], default="none")
    parser.add_argument("--costs", type=Path, metavar="COSTS.json")
    parser.add_argument("--offloaded", action="store_true")
    parser.add_argument("--check", type=Path, metavar="RESULTS.json")
    parser.add_argument("--plot", type=Path, metavar="OUT.svg")
    parser.add_argument("--self-test", action="store_true")
    options = parser.parse_args()
    if options.self_test:
        self_test()
        return
    if options.check:
        compared = check(json.loads(options.check.read_text()))
        print(json.dumps(compared, indent=2) if options.json else tell(compared))
        return
    costs = read_costs(options.costs) if options.costs else Costs()
    if options.offloaded:
        costs = replace(costs, sum_s_per_byte=0.0, wire_cpu_s_per_byte=0.0)
    cases = simulate(costs, options)
    if options.plot:
        plot(cases, costs, options.plot)
    if options.json:
        print(json.dumps({"costs": costs.name, "compute_s": costs.compute_s, "cases": cases}))
    else:
        print(f"milliseconds a step takes beyond its computing ({costs.compute_s * 1e3:.1f} ms)\n")
        print(table(rows(cases)))


if __name__ == "__main__":
    main()
