"""Sharing by collective calls of torch's process groups: for parameters on a GPU, and on the CPU
where TRADEWIND_SHARE_COLLECTIVE=1 asks for it. With the value "always" a rank that is alone calls
too: what sharing costs on one GPU."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.distributed import distributed_c10d as c10d

from tradewind._core import native
from tradewind.share.options import Share
from tradewind.share.rendezvous import Meeting

SWITCH = "TRADEWIND_SHARE_COLLECTIVE"

# What collective calls do not do, and what to use instead.
_REFUSED = (
    ("strategy", "sharded", "strategy='allreduce', and state_dtype='8bit' where memory is short"),
    ("codec", "powersgd", "codec='int8' or 'bf16'"),
    ("overlap", "next-forward", "overlap='backward' or 'auto'"),
)


def device_of(named: Iterable[tuple[str, torch.Tensor]]) -> torch.device:
    """The device that all of these lie on.

    Raises NotImplementedError for one that gradients cannot be shared on, ValueError for several.
    """
    first: tuple[str, torch.device] | None = None
    for name, parameter in named:
        if parameter.device.type not in ("cpu", "cuda"):
            raise NotImplementedError(
                f"parameter {name!r}: is on {parameter.device}; gradients are shared on the CPU "
                "and on CUDA"
            )
        if first is None:
            first = (name, parameter.device)
        elif parameter.device != first[1]:
            raise ValueError(
                f"parameter {name!r}: is on {parameter.device}, but {first[0]!r} is on {first[1]}; "
                "expected a module on one device for each rank: move it with module.to(device)"
            )
    return first[1] if first is not None else torch.device("cpu")


def check_device_ids(device_ids: Any, device: torch.device) -> None:
    """As DistributedDataParallel: none, or the one device of the module."""
    if not device_ids:
        return
    if device.type == "cpu":
        raise ValueError(
            f"device_ids: expected device_ids=None for a module on the CPU, got {device_ids!r}"
        )
    if len(device_ids) != 1:
        raise ValueError(
            f"device_ids: expected one device for each process, got {device_ids!r}; start a "
            "process for each GPU (torchrun --nproc-per-node)"
        )
    given = device_ids[0]
    given = torch.device("cuda", given) if isinstance(given, int) else torch.device(given)
    if given != device:
        raise ValueError(
            f"device_ids: expected the module's own device {device}, got {given}; move the module "
            "with module.to(device) before"
        )


def uses_collectives(device: torch.device) -> bool:
    return device.type != "cpu" or os.environ.get(SWITCH, "") not in ("", "0")


def calls_alone() -> bool:
    return os.environ.get(SWITCH, "") == "always"


def resolve(share: Share, device: torch.device) -> Share:
    """`share` as it is carried out on this device.

    Raises NotImplementedError for what collective calls do not do, with what to use instead.
    """
    if not uses_collectives(device):
        return share
    for option, refused, instead in _REFUSED:
        if getattr(share, option) == refused:
            where = "CUDA" if device.type == "cuda" else f"{SWITCH}={os.environ[SWITCH]}"
            raise NotImplementedError(
                f"{option}={refused!r} with {where}: built for the CPU's direct exchange alone so "
                f"far; use {instead}"
            )
    # NCCL sums within hosts first by itself.
    strategy = "allreduce" if share.strategy == "hierarchical" else share.strategy
    return replace(share, strategy=strategy, overlap="backward")


def host_group(meeting: Meeting, purpose: str) -> dist.ProcessGroup:
    """Connections of this exchange and purpose alone for tensors on the CPU. All ranks call it at
    once. Whoever holds it last closes them.

    Raises SharingError where ranks are missing.
    """
    group = dist.ProcessGroup(meeting.store, meeting.rank, meeting.size)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, meeting.connect(purpose))
    return group


def device_group(meeting: Meeting, purpose: str, device: torch.device) -> dist.ProcessGroup:
    """As `host_group`, for tensors on `device` and on the CPU. On a GPU it is one for all purposes
    of the meeting: two communicators of NCCL could wait for each other.

    Raises RuntimeError where torch has no NCCL.
    """
    if device.type == "cpu":
        return host_group(meeting, purpose)
    if meeting.gpu_group is None:
        group = host_group(meeting, "gpu")
        backend = _connect_nccl(meeting)
        group._register_backend(device, dist.ProcessGroup.BackendType.NCCL, backend)
        # In the messages of NCCL's watchdog.
        group._set_group_name(c10d.GroupName(f"{meeting.prefix}/gpu"))
        meeting.gpu_group = group
    return meeting.gpu_group


def _connect_nccl(meeting: Meeting) -> Backend:
    if not dist.is_nccl_available():
        raise RuntimeError(
            "sharing on CUDA: this torch was built without NCCL; install one with it (the CUDA "
            "wheels of Linux have it), or train on the CPU"
        )
    from torch._C._distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = meeting.timeout
    options.is_high_priority_stream = True  # what other ranks wait for goes first
    store = c10d.PrefixStore(f"{meeting.prefix}/nccl", meeting.store)
    return ProcessGroupNCCL(store, meeting.rank, meeting.size, options)


def make_collective(
    meeting: Meeting,
    named: Iterable[tuple[str, torch.Tensor]],
    options: native.CollectiveOptions,
) -> native.CollectiveGradients:
    names, parameters = zip(*named, strict=True)
    device = parameters[0].device
    options.cuda_library = _cuda_library()
    # Two sets of connections: what ranks say of a round need not queue behind its gradients.
    return native.CollectiveGradients(
        list(parameters),
        list(names),
        device_group(meeting, "gradients", device) if meeting.size > 1 or calls_alone() else None,
        host_group(meeting, "facts"),
        meeting.store,
        meeting.prefix,
        options,
    )


def _cuda_library() -> str:
    """The library lies beside this package, or, in an editable install, beside the native module;
    opened only where a codec or an ordered sum needs it."""
    name = "libtradewind_cuda.so"
    beside = Path(__file__).parent.parent / name
    return str(beside if beside.exists() else Path(str(native.__file__)).parent / name)
