"""The file that marks a directory of checkpoints: nothing is ever written beside strangers."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets

from tradewind._core import native
from tradewind.checkpoint import strict_json
from tradewind.checkpoint.errors import (
    DamagedCheckpointError,
    NewerVersionError,
    NotACheckpointDirectoryError,
)
from tradewind.checkpoint.names import MARKER, CommitName

FORMAT = "tradewind-checkpoints"
VERSION = 1

CONTENT = json.dumps({"format": FORMAT, "version": VERSION}).encode() + b"\n"
MAX_BYTES = 4096
_TEMPORARY = ".tmp"
# A file system's own, in the root of a disk that was mounted for the checkpoints alone.
_NOBODYS = {"lost+found"}


def check(env: native.Env, path: str) -> None:
    """Whether `path` is a directory of checkpoints, empty, or not there yet. Touches nothing.

    Folders of commits alone, without a marker, are a copy that somebody made: as good as ours.
    Raises NotACheckpointDirectoryError, NewerVersionError, OSError.
    """
    status = env.status(path)
    if status is None:
        return
    if not status.is_directory:
        raise NotACheckpointDirectoryError(
            f"checkpoint directory {path!r}: expected a directory, got a file; choose another path"
        )
    content = _read(env, path)
    if content is None:
        strangers = _strangers(env, path)
        if not strangers:
            return
        content = _read(env, path)  # whoever has made it in between marked it first
        if content is None:
            more = f" and {len(strangers) - 1} more" if len(strangers) > 1 else ""
            raise not_ours(path, f"it has no {MARKER}, but {strangers[0]!r}{more}")
    check_content(path, content)


def _read(env: native.Env, path: str) -> bytes | None:
    """What the marker says; None: there is none."""
    try:
        return env.read_file(os.path.join(path, MARKER), MAX_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in (errno.EFBIG, errno.EISDIR):
            raise
        raise not_ours(path, f"its {MARKER} is none of ours") from error


def prepare(env: native.Env, path: str) -> None:
    """Make the directory and mark it, durably, where that is not done. Raises as `check`."""
    check(env, path)
    env.make_directories(path)
    marker = os.path.join(path, MARKER)
    if env.status(marker) is not None:
        return
    temporary = os.path.join(path, f"{MARKER}.{secrets.token_hex(4)}{_TEMPORARY}")
    env.write_file(temporary, CONTENT, exclusive=True, sync=True)
    env.rename(temporary, marker)
    env.sync_directory(path)


def remove_leftovers(env: native.Env, path: str, names: list[str]) -> None:
    """Remove what an owner that was killed in `prepare` left among `names` of `path`."""
    for name in names:
        if _is_temporary(name):
            with contextlib.suppress(OSError):
                env.remove(os.path.join(path, name))


def _strangers(env: native.Env, path: str) -> list[str]:
    """What stands there that nobody could have put there who uses it without a marker."""
    return [
        name
        for name in env.list_directory(path)
        if name not in _NOBODYS and not _is_temporary(name) and CommitName.parse(name) is None
    ]


def check_content(path: str, content: bytes) -> None:
    """Whether the marker of `path` (or of a URL) is ours; raises as `check`."""
    try:
        value = strict_json.loads(content, MARKER)
    except DamagedCheckpointError as error:
        raise not_ours(path, f"its {MARKER} cannot be read ({error})") from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise not_ours(path, f"its {MARKER} says {strict_json.excerpt(value)}")
    version = value.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise not_ours(path, f"its {MARKER} says version {strict_json.excerpt(version)}")
    if version > VERSION:
        raise NewerVersionError(
            f"checkpoint directory {path!r} is of version {version}; this tradewind reads and "
            f"writes version {VERSION}: use a newer one, or choose another directory"
        )


def _is_temporary(name: str) -> bool:
    return name.startswith(MARKER + ".") and name.endswith(_TEMPORARY)


def not_ours(path: str, why: str) -> NotACheckpointDirectoryError:
    """The refusal of `path`, which is taken."""
    return NotACheckpointDirectoryError(
        f"{path!r} is not a directory of checkpoints: {why}; nothing was touched, choose an empty "
        "directory or one that tradewind made"
    )
