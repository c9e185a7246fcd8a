"""The native half of sharing: what carries gradients, made as `tw.Share` describes it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tradewind._core import native
from tradewind.share.collective import device_of, make_collective, uses_collectives
from tradewind.share.departure import watch_over
from tradewind.share.hosts import meet_on_hosts
from tradewind.share.options import Codec, Share
from tradewind.share.rendezvous import Meeting


def describe(
    named: Iterable[tuple[str, torch.nn.Parameter]],
    share: Share,
    buffers: Iterable[tuple[str, torch.Tensor]],
) -> dict[str, Any]:
    """What all ranks must have alike."""
    named = list(named)
    device = device_of(named)
    return {
        "parameters": [[*_describe_tensor(name, p), p.requires_grad] for name, p in named],
        "buffers": [_describe_tensor(name, buffer) for name, buffer in buffers],
        "carried": [device.type, "collectives" if uses_collectives(device) else "messages"],
        "options": share.described(),
    }


def _describe_tensor(name: str, tensor: torch.Tensor) -> list[Any]:
    return [name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]


def make_rounds(
    meeting: Meeting,
    named: Iterable[tuple[str, torch.Tensor]],
    share: Share,
    *,
    settles_itself: bool = False,
    sums_microbatches: bool = False,
    measures: bool = False,
    shards_update: bool = False,
    buffers: Sequence[torch.Tensor] = (),
) -> native.GradientRounds:
    """What carries the gradients of these parameters between the ranks that meet.

    Raises TypeError for a parameter that the codec cannot take, SharingError for missing ranks.
    """
    named = list(named)
    _check_codec(share.codec, named)  # before anyone connects: who leaves then is lost to the rest
    device = device_of(named)

    def fill(options: native.RoundOptions) -> None:
        if share.codec != "powersgd":
            options.codec = share.codec
        options.bucket_bytes = share.bucket_bytes(device.type)
        options.end_bucket_bytes = max(1, options.bucket_bytes // 4)
        options.patience_s = share.patience.total_seconds()
        options.deadline_s = share.timeout.total_seconds()
        options.settles_itself = settles_itself
        options.sums_microbatches = sums_microbatches
        options.buffers = list(buffers)

    if uses_collectives(device):
        collective_options = native.CollectiveOptions()
        fill(collective_options)
        collective_options.is_deterministic = share.deterministic
        collective = make_collective(meeting, named, collective_options)
        watch_over(collective, meeting)
        return collective
    options = native.ShareOptions()
    fill(options)
    if share.codec == "powersgd":
        options.low_rank = share.powersgd_rank
    options.piece_bytes = max(1, min(options.piece_bytes, options.bucket_bytes))
    options.measures = measures
    options.shards_update = shards_update
    if share.strategy == "hierarchical" and meeting.size > 1:
        options.hosts, options.sockets = meet_on_hosts(meeting)
    names, parameters = zip(*named, strict=True)
    backend = meeting.connect()
    shared = native.SharedGradients(
        list(parameters), list(names), backend, meeting.store, meeting.prefix, options
    )
    watch_over(shared, meeting)
    return shared


def _check_codec(codec: Codec, named: Sequence[tuple[str, torch.Tensor]]) -> None:
    for name, parameter in named:
        if codec == "none" or not parameter.requires_grad:
            continue
        if parameter.dtype in (torch.float64, torch.complex128):
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise TypeError(
                f"codec '{codec}': expected gradients of float32, bfloat16 or float16, got {dtype} "
                f"of parameter '{name}'; use codec='none'"
            )


def statistics_of(shared: native.GradientRounds) -> dict[str, float]:
    found = shared.statistics()
    names = ("num_rounds", "sent_bytes", "between_hosts_bytes", "waited_s", "busy_s")
    return {name: getattr(found, name) for name in names}


def feedback_of(shared: native.GradientRounds, meeting: Meeting) -> dict[str, Any]:
    """Of this rank, between rounds."""
    return {"rank": meeting.rank, "world_size": meeting.size, "values": shared.feedback()}


def load_feedback(shared: native.GradientRounds, meeting: Meeting, state: dict[str, Any]) -> None:
    here = {"rank": meeting.rank, "world_size": meeting.size}
    given = {name: state.get(name) for name in here}
    try:
        if given != here:
            raise ValueError(f"expected the state of {here}, got that of {given}")
        shared.load_feedback(state["values"])
    except ValueError as error:
        warnings.warn(f"error feedback starts from zero: {error}", RuntimeWarning, stacklevel=3)
