"""The claims of a local directory: taking the next attempt, and being fenced by a later one."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence

from tradewind._core import native
from tradewind.checkpoint import owner
from tradewind.checkpoint.claims import (
    MAX_LIST_BYTES,
    Acceptance,
    acceptance,
    encode_list,
    newest_claim,
)
from tradewind.checkpoint.errors import CheckpointError, FencedError
from tradewind.checkpoint.names import (
    ATTEMPTS,
    CommitName,
    accepted_file,
    claim_file,
    parse_accepted,
    parse_claim,
)

_MAX_TRIES = 100
_KEPT_CLAIMS = 8  # the newest decides; the others tell people what happened
_MAX_CLAIM_BYTES = 4096
_TEMPORARY = ".tmp"


class Attempts:
    """The claims in the directory `path`. Readers use `files` and `decide` alone."""

    def __init__(self, env: native.Env, path: str) -> None:
        self._env = env
        self._path = path
        self._folder = os.path.join(path, ATTEMPTS)

    def files(self) -> list[str]:
        """Names in the folder; none where it is not there."""
        try:
            return self._env.list_directory(self._folder)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def decide(self, files: Sequence[str]) -> Acceptance:
        """What the newest list among `files` says. FileNotFoundError: it was taken away since."""
        return acceptance(files, self._read)

    def claim(self, at_least: int = 1) -> int:
        """Take the next attempt, durably: from now on no earlier one can commit. `at_least`: the
        lowest number to take."""
        if self._env.status(self._folder) is None:
            with contextlib.suppress(FileExistsError):
                self._env.make_directory(self._folder)
            self._env.sync_directory(self._path)
        facts = json.dumps(owner.facts()).encode() + b"\n"
        for _ in range(_MAX_TRIES):
            attempt = max(newest_claim(self.files()) + 1, at_least)
            try:
                self._env.write_file(self._of(claim_file(attempt)), facts, exclusive=True)
                self._env.sync_directory(self._folder)
            except FileExistsError:
                continue  # another owner was faster
            except BaseException:
                self.withdraw(attempt)
                raise
            return attempt
        raise CheckpointError(
            f"checkpoint directory {self._path!r}: {_MAX_TRIES} attempts were claimed by others "
            "while this process tried; too many jobs use one directory"
        )

    def accept(self, attempt: int, names: Sequence[CommitName]) -> Acceptance:
        """Let the commits `names` of earlier attempts, and no other ones, count from now on."""
        final = self._of(accepted_file(attempt))
        self._env.write_file(final + _TEMPORARY, encode_list(names))
        self._env.rename(final + _TEMPORARY, final)
        self._env.sync_directory(self._folder)
        return Acceptance(attempt, frozenset(name.folder for name in names))

    def withdraw(self, attempt: int) -> None:
        """Give a claim up that nothing was done with, so that whom it fenced may go on."""
        for name in (accepted_file(attempt) + _TEMPORARY, claim_file(attempt)):
            with contextlib.suppress(OSError):
                self._env.remove(self._of(name))

    def prune(self, attempt: int) -> None:
        """Remove claims long before `attempt`, which has its list, and what killed owners left."""
        names = self.files()
        attempts = sorted({parse_claim(name) or parse_accepted(name) or 0 for name in names} - {0})
        old = set(attempts[:-_KEPT_CLAIMS])
        for name in names:
            number = parse_claim(name.removesuffix(_TEMPORARY)) or parse_accepted(
                name.removesuffix(_TEMPORARY)
            )
            if number is None or number >= attempt:
                continue
            if number in old or name.endswith(_TEMPORARY):
                with contextlib.suppress(OSError):
                    self._env.remove(self._of(name))

    def check(self, attempt: int) -> bool:
        """Whether the claim of `attempt` still stands; False: the directory was emptied.

        Raises FencedError where there is a newer one."""
        files = self.files()
        newest = newest_claim(files)
        if newest > attempt:
            raise FencedError(
                f"checkpoint directory {self._path!r}: this process is attempt {attempt}, and "
                f"attempt {newest} ({self._describe(newest)}) owns the directory since; nothing "
                "of this process is committed there any more: end it, or save elsewhere"
            )
        return claim_file(attempt) in files

    def _describe(self, attempt: int) -> str:
        try:
            facts = self._env.read_file(self._of(claim_file(attempt)), _MAX_CLAIM_BYTES)
        except OSError:
            facts = b""
        return owner.describe(owner.parse(facts))

    def _read(self, file_name: str) -> bytes:
        return self._env.read_file(self._of(file_name), MAX_LIST_BYTES)

    def _of(self, file_name: str) -> str:
        return os.path.join(self._folder, file_name)
