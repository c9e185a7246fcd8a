"""The model's prediction beside what share.py measured of the same: two hosts of a rank each."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean
from typing import Any

from measuring import table
from share_step import Cluster, Costs, Layer, Plan, step_seconds

MIB = 2**20


def median(figures: dict[str, Any], name: str) -> float:
    return float(figures[name]["median"])


def costs_of(scenario: dict[str, Any], cpu_s_per_byte: float) -> Costs:
    """The parts as they were measured in the scenario, and what a sent byte costs the core."""
    found, compute = scenario["costs"], scenario["contenders"]["compute alone"]
    layers = tuple(
        Layer(layer["bytes"], median(layer, "forward_s"), median(layer, "backward_s"))
        for layer in found["layers"]
    )
    costs = Costs(
        layers,
        update_s_per_byte=median(found, "update_s_per_byte"),
        # Within what a byte costs.
        sum_s_per_byte=0.0,
        codec_s_per_byte=dict.fromkeys(Costs().codec_s_per_byte, 0.0),
        latency_s=median(found, "latency_s"),
        message_s=0.0,
        wire_cpu_s_per_byte=cpu_s_per_byte,
        name="measured",
    )
    # The parts were timed one by one, under clocks of their own. One thread computes, so the core's
    # time is the step's, but for what others do on the machine.
    stretch = median(compute, "cpu_s") / costs.compute_s
    stretched = tuple(
        Layer(layer.bytes, layer.forward_s * stretch, layer.backward_s * stretch)
        for layer in layers
    )
    update = costs.update_s_per_byte * stretch
    return replace(costs, layers=stretched, update_s_per_byte=update)


def sharing_cpu_s(scenario: dict[str, Any], name: str) -> float:
    """What a contender's hooks, codec, sums and messages cost the core in a step."""
    contenders = scenario["contenders"]
    return median(contenders[name], "cpu_s") - median(contenders["compute alone"], "cpu_s")


def plan_of(contender: dict[str, Any]) -> Plan | None:
    """What the contender does, in the model's words; None where the model has none."""
    settings = contender["settings"]
    if contender["kind"].startswith("ddp"):
        codec = {None: "none", "fp16": "bf16"}.get(settings["hook"])  # as many bytes
        megabytes = settings.get("bucket_cap_mb")
        if codec is None:
            return None
        if megabytes is None:
            return Plan("ring", "backward", codec, 25 * MIB, first_bucket_bytes=MIB)
        return Plan("ring", "backward", codec, megabytes * MIB)
    if contender["kind"].startswith("ours"):
        strategy = {"allreduce": "ring", "sharded": "direct"}.get(settings["strategy"])
        if strategy is None or settings["codec"] == "powersgd":
            return None
        return Plan(strategy, settings["overlap"], settings["codec"])
    return None


def check(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Each step predicted from its parts, and from what the contender cost the core at the other
    rates."""
    scenarios = [
        scenario
        for scenario in results["scenarios"].values()
        if (scenario["num_hosts"], scenario["num_ranks"]) == (2, 2)
    ]
    compared = []
    for scenario in scenarios:
        wire = scenario["contenders"][scenario["best"]["wire"]]
        rate = scenario["ring_bytes_per_step"] / median(wire, "step_s")
        for name, contender in scenario["contenders"].items():
            plan = plan_of(contender)
            others = [s for s in scenarios if s is not scenario and name in s["contenders"]]
            if plan is None or not others:
                continue
            cpu_s = mean(sharing_cpu_s(other, name) for other in others)
            costs = costs_of(scenario, cpu_s / median(contender, "sent_bytes_per_step"))
            predicted = step_seconds(costs, Cluster(2, rate), plan)
            measured = median(contender, "step_s")
            compared.append(
                {
                    "rate_Gbps": scenario["rate_Gbps"],
                    "contender": name,
                    "predicted_s": predicted,
                    "measured_s": measured,
                    "deviation_percent": 100 * (predicted / measured - 1),
                }
            )
    if not compared:
        raise SystemExit("expected results of share.py's section link at several rates, found none")
    return compared


def tell(compared: list[dict[str, Any]]) -> str:
    rows = [["Gb/s", "", "predicted, ms", "measured, ms", "deviation, %"]]
    rows += [
        [
            f"{case['rate_Gbps']:g}",
            case["contender"],
            f"{case['predicted_s'] * 1e3:.1f}",
            f"{case['measured_s'] * 1e3:.1f}",
            f"{case['deviation_percent']:+.1f}",
        ]
        for case in compared
    ]
    worst = max(abs(case["deviation_percent"]) for case in compared)
    return f"{table(rows)}\n\nfarthest off: {worst:.1f}%"
