"""tw.Checkpointer, from the tensor to the disk, as the crash tests drive it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from checkpoint.crash.savers import PAYLOAD_BYTES, payload

from tradewind.checkpoint.checkpointer import Checkpointer


class CheckpointerSaver:
    """tw.Checkpointer with a state of three tensors and two values, all made of payload(step)."""

    def __init__(self, path: Path, env: Any, keep: int = 2, keep_every: int | None = None) -> None:
        self._events: list[str] = []
        self._checkpointer = Checkpointer(
            path,
            keep=keep,
            keep_every=keep_every,
            env=env,
            block_bytes=4096,
            num_threads=2,
            deadline=timedelta(seconds=90),
            on_event=lambda kind, text: self._events.append(f"{kind}: {text}"),
        )

    def save(self, step: int) -> None:
        self._checkpointer.save(_state(payload(step), step), step=step).wait(90)

    def restore(self) -> tuple[int, bytes] | None:
        return self._restore(None)

    def restore_step(self, step: int) -> bytes:
        found = self._restore(step)
        assert found is not None
        return found[1]

    def _restore(self, step: int | None) -> tuple[int, bytes] | None:
        state = _state(bytes(PAYLOAD_BYTES), -1)
        found = self._checkpointer.restore(state, step)
        if found is None:
            return None
        assert state["values"] == {"step": found, "nested": [found, None, str(found)]}
        tensors = (state["first"], state["model"]["second"], state["model"]["third"])
        return found, b"".join(bytes(each.view(torch.uint8).numpy()) for each in tensors)

    def steps(self) -> list[int]:
        return self._checkpointer.steps()[::-1]

    def close(self) -> None:
        self._checkpointer.close()


def _state(data: bytes, step: int) -> dict[str, Any]:
    whole = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    first, second, third = whole[:4000], whole[4000:8192], whole[8192:]
    return {
        "first": first.view(torch.float32),
        "model": {"second": second.view(torch.int32), "third": third},
        "values": {"step": step, "nested": [step, None, str(step)]},
    }
