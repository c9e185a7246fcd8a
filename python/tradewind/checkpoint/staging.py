"""Copies of what may change while a checkpoint is written: one buffer, kept from save to save and
grown when needed. Of tensors on a GPU the copies run on a stream of their own into pinned memory;
the stream that trains waits for them, the host does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

PAGE_BYTES = 4096


@dataclass(frozen=True)
class Copied:
    """Where a staged tensor lies: `offset_bytes` into the buffer."""

    offset_bytes: int
    size_bytes: int


def round_up(size: int, unit: int = PAGE_BYTES) -> int:
    return -(-size // unit) * unit


class Staging:
    """One save's copies at a time. Not thread-safe: the thread that saves calls `copy`; nobody may
    call it again before the memory was written."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None
        self._is_pinned = False
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @property
    def address(self) -> int:
        """Of the buffer's first byte; begins a page."""
        assert self._buffer is not None
        return _page_start(self._buffer)

    @property
    def capacity_bytes(self) -> int:
        return 0 if self._buffer is None else self._buffer.numel() - PAGE_BYTES

    def copy(
        self, tensors: Sequence[torch.Tensor], places: Sequence[Copied], size_bytes: int
    ) -> DeviceCopies:
        """Copy each tensor, in row-major order, to its place in the buffer of `size_bytes`.

        Returns what has to be waited for before the tensors on GPUs change, and before the bytes
        are read: nothing, where all are on the CPU.
        """
        devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
        self._reserve(size_bytes, pinned=bool(devices))
        assert self._buffer is not None
        start = self.address - self._buffer.data_ptr()
        for device in devices:
            self._stream(device).wait_stream(torch.cuda.current_stream(device))
        with torch.no_grad():
            for tensor, place in zip(tensors, places, strict=True):
                if not place.size_bytes:
                    continue
                begin = start + place.offset_bytes
                into = self._buffer[begin : begin + place.size_bytes]
                self._copy_one(tensor.detach(), into)
        return DeviceCopies([self._stream(device).record_event() for device in devices])

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        stream = self._streams.get(device)
        if stream is None:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._streams[device] = stream
        return stream

    def _copy_one(self, tensor: torch.Tensor, into: torch.Tensor) -> None:
        target = (
            into.view(tensor.dtype).view(tensor.shape)
            if tensor.dim()
            else (into.view(tensor.dtype)[0])
        )
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        if tensor.device.type != "cuda":
            target.copy_(tensor)
            return
        with torch.cuda.stream(self._stream(tensor.device)):
            target.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._stream(tensor.device))

    def _reserve(self, size_bytes: int, *, pinned: bool) -> None:
        enough = self.capacity_bytes >= size_bytes and self._buffer is not None
        if enough and (self._is_pinned or not pinned):
            return
        self._buffer = None  # the old memory goes before the new one comes
        room = round_up(max(size_bytes, PAGE_BYTES)) + PAGE_BYTES
        self._buffer = torch.empty(room, dtype=torch.uint8, pin_memory=pinned)
        self._is_pinned = pinned

    def release(self) -> None:
        """Give the memory back."""
        self._buffer = None


class DeviceCopies:
    """Copies from GPUs under way."""

    def __init__(self, events: Sequence[torch.cuda.Event] = ()) -> None:
        self._events = list(events)

    def hold_stream(self) -> None:
        """Work queued from now on, on each device's current stream, begins after the copies."""
        for event in self._events:
            torch.cuda.current_stream(event.device).wait_event(event)

    def synchronize(self) -> None:
        """Return once the bytes are there."""
        for event in self._events:
            event.synchronize()


def _page_start(buffer: torch.Tensor) -> int:
    return round_up(buffer.data_ptr())
