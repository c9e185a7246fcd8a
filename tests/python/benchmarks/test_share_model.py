"""The model of shared gradients: closed forms, and what must be so whatever the costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from share_step import Cluster, Costs, Layer, Plan, step_seconds  # noqa: E402

sys.path.remove(str(BENCHMARKS))  # whose share.py would hide the tests' folder of that name

# 1 MB a layer; backward takes twice the forward.
LAYERS = tuple(Layer(1e6, 0.001, 0.002) for _ in range(8))
FREE = {"sum_s_per_byte": 0.0, "wire_cpu_s_per_byte": 0.0, "update_s_per_byte": 0.0}
COSTS = Costs(LAYERS, latency_s=0.0, message_s=0.0, **FREE)


def test_closed_forms() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "share_model.py"), "--self-test"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_fast_wire_leaves_the_last_bucket_exposed() -> None:
    rate = 1e9  # a bucket of one layer takes 1 ms, half of what its backward does
    plan = Plan("ring", "backward", bucket_bytes=1e6)
    last_bucket = 1e6 / rate
    found = step_seconds(COSTS, Cluster(2, rate), plan)
    assert found == pytest.approx(COSTS.compute_s + last_bucket)


@pytest.mark.parametrize("strategy", ["ring", "direct"])
def test_a_slow_wire_is_hidden_under_the_next_forward(strategy: str) -> None:
    rate = 1e8  # the wire takes 80 ms, computing 24
    wire = 8e6 / rate
    lazy = step_seconds(COSTS, Cluster(2, rate), Plan(strategy, "next-forward", bucket_bytes=1e6))
    waits = step_seconds(COSTS, Cluster(2, rate), Plan(strategy, "backward", bucket_bytes=1e6))
    assert wire <= lazy < waits
    # Nothing flows before the first bucket of a step is there: one forward and one backward.
    assert waits == pytest.approx(wire + 8 * 0.001 + 0.002)


def test_a_codec_shortens_the_wire() -> None:
    rate = 1e8
    plans = [Plan("direct", "backward", codec, bucket_bytes=1e6) for codec in ("none", "bf16")]
    none, bf16 = (step_seconds(COSTS, Cluster(2, rate), plan) for plan in plans)
    assert bf16 < 0.6 * none
