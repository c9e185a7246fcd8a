"""The demo: train examples/digits.py, then once more with a SIGKILL half way, and compare the ends.

python scripts/demo.py [--runs runs]
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import tradewind as tw

EXAMPLE = Path(__file__).parents[1] / "examples" / "digits.py"
LAST_STEP = 440  # of 20 epochs
DEADLINE_S = 300.0


def start(run: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, str(EXAMPLE), "--run", str(run), "--every", "40 steps"]
    )


def finish(process: subprocess.Popen[bytes]) -> None:
    if process.wait(DEADLINE_S) != 0:
        sys.exit(f"demo: the training ended with exit code {process.returncode}")


def steps_of(run: Path) -> list[int]:
    return tw.Checkpointer(run / "checkpoints").steps()


def kill_half_way(process: subprocess.Popen[bytes], run: Path) -> None:
    until = time.monotonic() + DEADLINE_S
    while not (steps := steps_of(run)) or steps[-1] < LAST_STEP // 2:
        if process.poll() is not None or time.monotonic() > until:
            sys.exit("demo: the training ended before it could be killed")
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait(DEADLINE_S)
    print(f"demo: killed; the newest checkpoint is of step {steps_of(run)[-1]} of {LAST_STEP}")


def end_of(run: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """Step and every tensor of the end of the run: model, optimizer, and torch's random numbers,
    which alone the example seeds."""
    loaded = tw.Checkpointer(run / "checkpoints").load()
    assert loaded is not None
    step, state = loaded
    found: dict[str, torch.Tensor] = {}
    parts = {name: state[name] for name in ("model", "optimizer", "tracked")}
    _gather({**parts, "random": state["own"].value["random"]["torch"]}, "", found)
    return step, found


def _gather(value: Any, name: str, found: dict[str, torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found[name] = value
    elif isinstance(value, dict):
        for key, each in value.items():
            _gather(each, f"{name}.{key}", found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    folder = parser.parse_args().runs
    stamp = time.strftime("%Y%m%d-%H%M%S")
    whole, killed = folder / f"digits-{stamp}", folder / f"digits-{stamp}-killed"

    finish(start(whole))
    print("\ndemo: the same again, killed half way", flush=True)
    process = start(killed)
    try:
        kill_half_way(process, killed)
    finally:
        process.kill()
    print("demo: started again with the same command", flush=True)
    finish(start(killed))

    (step, expected), (other_step, found) = end_of(whole), end_of(killed)
    other = [
        name
        for name in expected
        if name not in found or not torch.equal(found[name], expected[name])
    ]
    num_bytes = sum(value.numel() * value.element_size() for value in expected.values())
    if other or step != other_step or set(found) != set(expected):
        sys.exit(f"demo: the ends differ, at steps {step} and {other_step}: {', '.join(other)}")
    print(
        f"demo: both runs ended at step {step} with the same bits: {len(expected)} tensors, "
        f"{num_bytes:,} bytes"
    )


if __name__ == "__main__":
    main()
