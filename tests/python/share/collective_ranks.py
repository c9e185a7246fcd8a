"""Runs what ranks do with gradients that travel by collective calls, as they do on a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

SWITCH = "TRADEWIND_SHARE_COLLECTIVE"


@contextmanager
def collectives() -> Iterator[None]:
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SWITCH]
        else:
            os.environ[SWITCH] = before


def by_collectives(rank: int, module: str, name: str, *args: Any) -> Any:
    """`module.name(rank, *args)`, which is written for messages between ranks."""
    with collectives():
        return getattr(import_module(module), name)(rank, *args)
