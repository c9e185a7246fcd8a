"""One rank of test_hierarchical.py: trains a little and prints what it found as JSON.

python hierarchical_rank.py RANK WORLD_SIZE FOLDER CASE
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tradewind as tw

STEPS = 5
TIMEOUT = timedelta(seconds=20)


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    # Weights of more and of less than a bucket, and biases of a few elements.
    return torch.nn.Sequential(
        torch.nn.Linear(64, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 600), torch.nn.ReLU(),
        torch.nn.Linear(600, 10),
    )  # fmt: skip


def loss_of(model: Any, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(8, 64, generator=generator)
    return model(inputs).square().mean()


def digest(model: torch.nn.Module) -> str:
    values = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(values).hexdigest()


def share_gradients(rank: int, strategy: str, **options: Any) -> dict[str, Any]:
    model = make_model()
    sharing = tw.GradientSharing(
        model, strategy=strategy, bucket_cap_mb=0.5, timeout=TIMEOUT, **options
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        loss_of(sharing, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    found = sharing._native.statistics()
    return {
        "digest": digest(model),
        "sent": found.sent_bytes,
        "between_hosts": found.between_hosts_bytes,
        "is_mapped": "memfd:tradewind" in Path("/proc/self/maps").read_text(),
    }


def use_engine(rank: int, codec: Any) -> dict[str, Any]:
    engine = tw.Engine(
        make_model(),
        tw.AdamW(lr=1e-3),
        clip_norm=1.0,
        accumulate=2,
        share=tw.Share(strategy="hierarchical", codec=codec, bucket_mb=0.5, timeout=TIMEOUT),
    )
    for step in range(20):
        engine.step(loss_of(engine, rank, step))
    engine.settle()
    return {"digest": digest(engine.model)}


def die(rank: int, victim: int) -> dict[str, Any]:
    model = make_model()
    sharing = tw.GradientSharing(model, strategy="hierarchical", timeout=TIMEOUT)
    try:
        for step in range(STEPS):
            if rank == victim and step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            loss_of(sharing, rank, step).backward()
    except RuntimeError as error:  # what autograd makes of a SharingError in a backward
        return {"error": str(error)}
    return {"error": ""}


def main() -> None:
    rank, world_size, folder, case = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size,
        timeout=TIMEOUT,
    )  # fmt: skip
    name, _, value = case.partition(":")
    if name == "share":
        found = share_gradients(rank, value)
    elif name == "codec":
        found = share_gradients(rank, "hierarchical", codec=value)
    elif name == "engine":
        found = use_engine(rank, value)
    else:
        found = die(rank, int(value))
    print(json.dumps(found), flush=True)
    # A group that has lost a rank waits for it when it is destroyed.
    os._exit(0)


if __name__ == "__main__":
    main()
