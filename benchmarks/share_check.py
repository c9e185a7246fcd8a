"""The model's prediction beside what share.py measured of the same: two hosts of a rank each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from measuring import table
from share_step import Cluster, Costs, Layer, Plan, step_seconds

MIB = 2**20


def median(figures: dict[str, Any], name: str) -> float:
    return float(figures[name]["median"])


def costs_of(scenario: dict[str, Any], codec: str) -> Costs:
    """The parts as they were measured in the scenario. Of sharing, they have the all-reduce alone
    and the all-reduce beside computing that does not depend on it; the rest is the model's."""
    found, contenders = scenario["costs"], scenario["contenders"]
    suffix = "" if codec == "none" else " fp16"
    layers = tuple(
        Layer(layer["bytes"], median(layer, "forward_s"), median(layer, "backward_s"))
        for layer in found["layers"]
    )
    beside = contenders[f"wire{suffix} beside compute"]
    compute = contenders["compute alone"]
    cpu_s = median(beside, "cpu_s") - median(compute, "cpu_s")
    costs = Costs(
        layers,
        update_s_per_byte=median(found, "update_s_per_byte"),
        # Within what the all-reduce costs the core.
        sum_s_per_byte=0.0,
        latency_s=median(found, "latency_s"),
        message_s=0.0,
        wire_cpu_s_per_byte=cpu_s / median(beside, "sent_bytes_per_step"),
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


def hooks_of(results: dict[str, Any], name: str, gradient_bytes: float) -> float:
    """What a contender's hooks, copies and codec cost the core, by byte: its step without a wire
    less that of computing; 0 where the section one-rank was not measured."""
    contenders = results["scenarios"].get("1 rank", {"contenders": {}})["contenders"]
    if name not in contenders:
        return 0.0
    cpu_s = median(contenders[name], "cpu_s") - median(contenders["compute alone"], "cpu_s")
    return max(0.0, cpu_s) / gradient_bytes


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
    compared = []
    for scenario in results["scenarios"].values():
        if (scenario["num_hosts"], scenario["num_ranks"]) != (2, 2):
            continue
        wire = scenario["contenders"][scenario["best"]["wire"]]
        rate = scenario["ring_bytes_per_step"] / median(wire, "step_s")
        for name, contender in scenario["contenders"].items():
            plan = plan_of(contender)
            if plan is None:
                continue
            hooks = hooks_of(results, name, scenario["gradient_bytes"])
            costs = costs_of(scenario, plan.codec)
            costs = replace(costs, codec_s_per_byte={plan.codec: hooks})
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
        raise SystemExit("expected results of share.py's section link, found none")
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
