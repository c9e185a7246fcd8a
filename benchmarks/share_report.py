"""What the ranks saw, as figures and ratios, and as tables."""

from __future__ import annotations

from typing import Any

from measuring import Figure, ratios, summary, text
from share_contenders import CONTENDERS
from share_launch import Measurement
from share_net import GRADIENT_BYTES

Turns = dict[str, dict[str, list[float]]]


def ring_bytes(num_ranks: int) -> float:
    """What each rank must send, and receive, in an all-reduce by a ring."""
    return 2 * (num_ranks - 1) / num_ranks * GRADIENT_BYTES


def slowest(documents: list[dict[str, Any]]) -> Turns:
    """Turn by turn, the rank that took longest, and sent and received most."""
    every = [document["figures"] for document in documents]
    return {
        name: {
            figure: [max(turn) for turn in zip(*(x[name][figure] for x in every), strict=True)]
            for figure in figures
        }
        for name, figures in every[0].items()
    }


def best(turns: Turns, kind: str) -> str | None:
    """The contender of a kind with the least median time."""
    names = [name for name in turns if CONTENDERS[name].kind == kind]
    return min(names, key=lambda name: summary(turns[name]["step_s"])["median"], default=None)


def figures_of(turns: Turns, measurement: Measurement) -> dict[str, Any]:
    """Every contender's figures; ratios are taken turn by turn."""
    winners = {kind: best(turns, kind) for kind in ("wire", "ddp", "ddp-compressed")}
    seconds = {name: figures["step_s"] for name, figures in turns.items()}
    compute = seconds["compute alone"]
    wire = seconds[winners["wire"]] if winners["wire"] else [0.0] * len(compute)
    floor = [max(pair) for pair in zip(compute, wire, strict=True)]
    contenders = {}
    for name, figures in turns.items():
        contender = CONTENDERS[name]
        found: dict[str, Any] = {"kind": contender.kind, "settings": contender.settings}
        found["step_s"] = summary(seconds[name])
        found["cpu_s"] = summary(figures["cpu_s"])
        found["ratio_to_floor"] = ratios(seconds[name], floor)
        over = [a - b for a, b in zip(seconds[name], compute, strict=True)]
        found["over_compute_s"] = summary(over)
        for kind in ("ddp", "ddp-compressed"):
            winner = winners[kind]
            if winner:
                key = f"ratio_to_{kind.replace('-', '_')}_best"
                found[key] = ratios(seconds[name], seconds[winner])
        if "sent_bytes" in figures:
            _add_bytes(found, figures, measurement.num_ranks)
        contenders[name] = found
    return {"best": winners, "contenders": contenders}


def _add_bytes(found: dict[str, Any], figures: dict[str, list[float]], num_ranks: int) -> None:
    sent = figures["sent_bytes"]
    found["sent_bytes_per_step"] = summary(sent)
    found["received_bytes_per_step"] = summary(figures["received_bytes"])
    found["ratio_to_ring_bytes"] = summary([x / ring_bytes(num_ranks) for x in sent])
    if found["kind"] in ("wire", "sockets"):
        times = figures["step_s"]
        rates = [8 * a / b / 1e9 for a, b in zip(sent, times, strict=True)]
        found["rate_Gbps"] = summary(rates)


def scenario(
    measurement: Measurement, documents: list[dict[str, Any]], ended: dict[str, str], load: float
) -> dict[str, Any]:
    return {
        "num_hosts": measurement.num_hosts,
        "num_ranks": measurement.num_ranks,
        "rate_Gbps": measurement.rate_Gbps,
        "compute": "slept" if measurement.sleeps else "computed",
        "load_before": load,
        "gradient_bytes": GRADIENT_BYTES,
        "ring_bytes_per_step": ring_bytes(measurement.num_ranks),
        "costs": documents[0]["costs"],
        **figures_of(slowest(documents), measurement),
        "unavailable": {**ended, **documents[0]["unavailable"]},
    }


# Head: figure, scale, digits, with its range.
COLUMNS: dict[str, tuple[str, float, int, bool]] = {
    "step, ms": ("step_s", 1e3, 1, True),
    "x max(compute, wire)": ("ratio_to_floor", 1, 3, False),
    "x best DDP": ("ratio_to_ddp_best", 1, 3, True),
    "x best DDP, fp16 hook": ("ratio_to_ddp_compressed_best", 1, 3, False),
    "over compute, ms": ("over_compute_s", 1e3, 1, True),
    "CPU, ms": ("cpu_s", 1e3, 1, False),
    "sent, MB": ("sent_bytes_per_step", 1e-6, 2, False),
    "x ring's bytes": ("ratio_to_ring_bytes", 1, 3, False),
    "Gb/s": ("rate_Gbps", 1, 2, False),
}


def rows(figures: dict[str, Any]) -> list[list[str]]:
    """A scenario's table; columns that nobody has are left out."""
    contenders = figures["contenders"]
    columns = {
        head: column
        for head, column in COLUMNS.items()
        if any(column[0] in found for found in contenders.values())
    }
    winners = set(figures["best"].values())
    order = [name for name in CONTENDERS if name in contenders]
    return [
        ["", *columns],
        *(
            [f"{name} *" if name in winners else name, *_cells(contenders[name], columns.values())]
            for name in order
        ),
    ]


def _cells(found: dict[str, Any], columns: Any) -> list[str]:
    return [_cell(found.get(key), *form) for key, *form in columns]


def _cell(figure: Figure | None, scale: float, digits: int, has_range: bool) -> str:
    if figure is None or has_range:
        return text(figure, scale, digits)
    return f"{figure['median'] * scale:.{digits}f}"


def reasons(figures: dict[str, Any]) -> list[str]:
    """Who was not measured, and why, those of one reason in one line."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in figures["unavailable"].items():
        by_reason.setdefault(reason, []).append(name)
    return [f"not available: {', '.join(names)}: {why[:160]}" for why, names in by_reason.items()]
