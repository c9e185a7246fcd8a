"""What sharing costs on a GPU when there is nobody to wait for: one rank whose gradients go through
buckets and NCCL as those of many do. Steps (forward, backward, AdamW) of a GPT under autocast:
  alone        no sharing
  tradewind    tw.GradientSharing, every bucket through NCCL
  int8         the same with codec="int8": encoded, traded, summed, encoded again
  torch        DistributedDataParallel over NCCL with gradient_as_bucket_view=True

    python benchmarks/gpu_share.py [--json] [--repeats 20]

Times are of the device, by CUDA events, and of the host. Prints "not measured" where no GPU
answers.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from gpu_step import timed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tradewind as tw
from measuring import figure_row, machine, ratios, show, summary
from models import Task, loss_of, transformer_task

SIZE = {"layers": 12, "width": 768, "vocabulary": 32_000, "context": 512, "batch": 8}


def stepper(model: nn.Module, task: Task) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    inputs, targets = task.inputs.cuda(), task.targets.cuda()

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()

    return step


def measure(repeats: int) -> dict[str, Any]:
    task = transformer_task(**SIZE)
    os.environ["TRADEWIND_SHARE_COLLECTIVE"] = "always"
    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    models = {
        "alone": copy.deepcopy(task.model).cuda(),
        "tradewind": tw.GradientSharing(copy.deepcopy(task.model).cuda()),
        "int8": tw.GradientSharing(copy.deepcopy(task.model).cuda(), codec="int8"),
        "torch": DistributedDataParallel(
            copy.deepcopy(task.model).cuda(), device_ids=[0], gradient_as_bucket_view=True
        ),
    }
    device, host = timed({name: stepper(model, task) for name, model in models.items()}, repeats)
    figures: dict[str, Any] = {f"{name}_s": summary(values) for name, values in device.items()}
    figures |= {f"{name}_host_s": summary(values) for name, values in host.items()}
    for name in ("tradewind", "int8", "torch"):
        figures[f"{name}_ratio_to_alone"] = ratios(device[name], device["alone"])
    figures["ratio_to_ddp"] = ratios(device["tradewind"], device["torch"])
    figures["gradient_bytes"] = sum(4 * p.numel() for p in task.model.parameters())
    dist.destroy_process_group()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    missing = not torch.cuda.is_available() or not dist.is_nccl_available()
    if missing:
        print(json.dumps({"gpu": "not measured"}) if options.json else "GPU: not measured")
        return
    figures = measure(options.repeats)
    facts = {**machine(), "gpu": torch.cuda.get_device_name(0)}
    rows = [["sharing on one GPU", "GPT"]]
    for key, figure in figures.items():
        is_measured = isinstance(figure, dict)
        row = figure_row(key, [figure]) if is_measured else [key.replace("_", " "), str(figure)]
        rows.append(row)
    show({"machine": facts, "figures": figures}, rows, as_json=options.json)


if __name__ == "__main__":
    main()
