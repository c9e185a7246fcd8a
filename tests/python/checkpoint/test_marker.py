"""The marker of a directory, looked for while its owner makes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tradewind._core import native
from tradewind.checkpoint import marker
from tradewind.checkpoint.errors import NotACheckpointDirectoryError


class Overtaken:
    """The file system, in which `does` happens right after the marker was not found."""

    def __init__(self, does: Any) -> None:
        self._env = native.posix_env()
        self._does = does

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def read_file(self, path: str, max_bytes: int) -> bytes:
        try:
            return self._env.read_file(path, max_bytes)
        except FileNotFoundError:
            does, self._does = self._does, lambda: None
            does()
            raise


def test_a_directory_that_is_marked_meanwhile_is_ours(tmp_path: Path) -> None:
    def own() -> None:
        marker.prepare(native.posix_env(), str(tmp_path))
        (tmp_path / "attempts").mkdir()

    marker.check(Overtaken(own), str(tmp_path))


def test_one_that_somebody_else_takes_meanwhile_is_not(tmp_path: Path) -> None:
    env = Overtaken(lambda: (tmp_path / "notes.txt").write_text("mine"))
    with pytest.raises(NotACheckpointDirectoryError, match=r"but 'notes\.txt'"):
        marker.check(env, str(tmp_path))
