"""run.json: what a run is and what each of its attempts was. Written by the owner only, whole.

One attempt is one process that owned the directory; a resumed or repeated run adds an attempt and
changes none of the earlier ones, except that one which never closed gets its end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tradewind.track.atomic import write_atomically
from tradewind.track.facts import utc_now
from tradewind.track.lock import is_owned

SCHEMA = 1
ENDED_WITHOUT_CLOSING = "ended without closing"
CLOSING_STATUSES = ("finished", "failed", "stopped")
_FILE_NAME = "run.json"


class RunRecordError(ValueError):
    """The directory is not a run directory, or its run.json cannot be read."""


@dataclass(frozen=True)
class RunRecord:
    """A run's record as read: `attempts` as run.json has them, oldest first; `status` is
    "running", "finished", "failed", "stopped" or "ended without closing"."""

    path: Path
    name: str
    schema: int
    attempts: tuple[Mapping[str, Any], ...]
    status: str

    @property
    def latest(self) -> Mapping[str, Any]:
        """The newest attempt."""
        return self.attempts[-1]


def read_run(path: str | Path) -> RunRecord:
    """Read the record of a run directory, live or ended.

    Raises RunRecordError (a ValueError) where `path` holds no readable record.
    """
    folder = Path(path)
    content = _load(folder)
    attempts = tuple(content["attempts"])
    status = str(attempts[-1].get("status", "running"))
    if status == "running" and not is_owned(folder):
        # The owner may have closed between the two looks: its last word decides.
        attempts = tuple(_load(folder)["attempts"])
        status = str(attempts[-1].get("status", "running"))
        status = ENDED_WITHOUT_CLOSING if status == "running" else status
    return RunRecord(folder, str(content["name"]), int(content["schema"]), attempts, status)


def run_status(path: str | Path) -> str:
    """The status of a run directory, as in `read_run(path).status`."""
    return read_run(path).status


class RunJournal:
    """The owner's hand on run.json: adds an attempt, later ends it. Needs the run's lock."""

    def __init__(self, folder: Path, facts: Mapping[str, object], started: str) -> None:
        """Append an attempt. Raises RunRecordError with nothing changed for a foreign run.json."""
        self._path = folder / _FILE_NAME
        if self._path.exists():
            self._content = _load(folder)
        else:
            name = folder.resolve().name
            self._content = {"schema": SCHEMA, "name": name, "attempts": []}
        attempts = self._content["attempts"]
        self.attempt = 1 + max((int(each.get("attempt", 0)) for each in attempts), default=0)
        for each in attempts:
            if each.get("status") == "running":
                each.update(status=ENDED_WITHOUT_CLOSING)
        head = {"attempt": self.attempt, "started": started, "ended": None}
        attempts.append({**head, "status": "running", "error": None, **facts})
        self._write()

    def end(self, status: str, error: str | None) -> None:
        """Record how the attempt ended. Raises OSError where the file cannot be written."""
        self._content["attempts"][-1].update(ended=utc_now(), status=status, error=error)
        self._write()

    def _write(self) -> None:
        text = json.dumps(self._content, indent=1, ensure_ascii=False, allow_nan=False)
        write_atomically(self._path, text.encode("utf-8", "backslashreplace") + b"\n")


def _load(folder: Path) -> dict[str, Any]:
    path = folder / _FILE_NAME
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise RunRecordError(
            f"{str(folder)!r}: expected a run directory (a folder with {_FILE_NAME}), "
            f"found {'none there' if folder.exists() else 'no such path'}; give the directory "
            "that was named in Run.open or run="
        ) from None
    except (OSError, ValueError) as error:
        raise RunRecordError(
            f"{str(path)!r}: expected a run's record in JSON, but it cannot be read ({error}); "
            "restore it from a copy, or move it away"
        ) from error
    _check(path, content)
    return dict(content)


def _check(path: Path, content: object) -> None:
    attempts = content.get("attempts") if isinstance(content, dict) else None
    known = (
        isinstance(content, dict)
        and isinstance(content.get("schema"), int)
        and isinstance(attempts, list)
        and attempts
        and all(isinstance(each, dict) for each in attempts)
    )
    if not known:
        raise RunRecordError(
            f"{str(path)!r}: expected a run's record (an object with schema, name and attempts), "
            "found other JSON; move that file away or choose another directory"
        )
    assert isinstance(content, dict)
    if content["schema"] > SCHEMA:
        raise RunRecordError(
            f"{str(path)!r}: written by a newer tradewind (schema {content['schema']}, this one "
            f"reads up to {SCHEMA}); upgrade tradewind to read it"
        )
    content.setdefault("name", path.parent.name)
