"""Parameters and buffers from one rank to all, over connections of their own: a rank that is gone
or late ends the wait by the deadline of sharing, whatever the user's process group allows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from tradewind._core import native
from tradewind.share.collective import device_group
from tradewind.share.rendezvous import Meeting

_CHUNK_BYTES = 250 * 1024 * 1024  # as DistributedDataParallel


class ValueBroadcast:
    """Made on every rank of the meeting at once. One thread: the step's."""

    def __init__(self, meeting: Meeting, device: torch.device) -> None:
        self._meeting = meeting
        self._group: dist.ProcessGroup | None = None
        if meeting.size > 1:
            self._group = device_group(meeting, "values", device)

    def __call__(self, what: str, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        """Every rank's `tensors` are those of `source` afterwards.

        Raises SharingError where a rank did not take part by the deadline; `what` names the values.
        """
        if self._group is None or not tensors:
            return
        meeting = self._meeting
        try:
            with torch.no_grad():
                dist._broadcast_coalesced(  # type: ignore[attr-defined]
                    self._group, list(tensors), _CHUNK_BYTES, source
                )
        except RuntimeError as error:
            # Closes the connections: who waits for this rank learns at once.
            self._group = meeting.gpu_group = None
            whose = "the other ranks to take" if meeting.rank == source else f"rank {source}'s"
            raise native.SharingError(
                f"rank {meeting.rank}: lost a rank, or waited "
                f"{meeting.timeout.total_seconds():g} s, for {whose} {what}; "
                f"{meeting.last_words()} ({str(error)[:200]})"
            ) from error
