"""A CheckpointDirectory on an object store: claims, reading, and the protocol of remote_commits.py.

For processes that train or read; the upload process runs `RemoteCommits` alone.
"""

from __future__ import annotations

import json
import secrets
import threading
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress

from tradewind.checkpoint import marker, owner
from tradewind.checkpoint.claims import (
    MAX_LIST_BYTES,
    Acceptance,
    acceptance,
    encode_list,
    newest_claim,
)
from tradewind.checkpoint.directory import CheckpointDirectory
from tradewind.checkpoint.errors import (
    CheckpointError,
    FencedError,
    VanishedCheckpointError,
)
from tradewind.checkpoint.manifest import MAX_MANIFEST_BYTES
from tradewind.checkpoint.names import (
    ATTEMPTS,
    MANIFEST,
    MARKER,
    CommitName,
    accepted_file,
    claim_file,
)
from tradewind.checkpoint.stores.patience import Deadline, StoreError
from tradewind.checkpoint.stores.remote_commits import (
    FencedStoreError,
    RemoteCommits,
    folders_of,
    key_of,
)
from tradewind.checkpoint.stores.store import Contents, Entry, Store

_MAX_CLAIMS = 100
_MAX_LOOKS = 20


class RemoteDirectory(CheckpointDirectory):
    """See CheckpointDirectory. `where` is the store's URL."""

    def __init__(self, store: Store) -> None:
        """Asks nothing of the store yet."""
        self.where = store.url
        self.store = store
        self._lock = threading.RLock()
        self._attempt: int | None = None
        self._acceptance = Acceptance()
        self._commits: RemoteCommits | None = None

    # --- reading --------------------------------------------------------------------------------

    def check(self) -> None:
        """Also whether the bucket is there and may be read, by StoreError."""
        content = self.store.read(MARKER, marker.MAX_BYTES)
        if content is not None:
            marker.check_content(self.where, content)
            return
        entries = self.store.entries()
        known = folders_of(entries)
        strangers = [
            entry.key
            for entry in entries
            if CommitName.parse(entry.key.partition("/")[0]) not in known
            and not entry.key.startswith(f"{ATTEMPTS}/")
        ]
        if strangers:
            more = f" and {len(strangers) - 1} more" if len(strangers) > 1 else ""
            raise marker.not_ours(self.where, f"it has no {MARKER}, but {strangers[0]!r}{more}")

    def committed(self) -> list[CommitName]:
        # One listing is not one instant: pages, and the lists that are read after it. It stands
        # where the claims are the same when looked at again.
        for _ in range(_MAX_LOOKS):
            entries = self.store.entries()
            claims = _claims(entries)
            decides = self._decide(claims)
            if decides is not None and self._claims() == claims:
                found = folders_of(entries)
                names = [n for n, files in found.items() if MANIFEST in files and decides.counts(n)]
                return sorted(names, reverse=True)
        raise CheckpointError(
            f"{self.where}: its owner changed {_MAX_LOOKS} times while the commits were listed; "
            "too many jobs use one URL"
        )

    def acceptance(self) -> Acceptance:
        """What decides now which commits count, here and in the local tier before it."""
        for _ in range(_MAX_LOOKS):
            decides = self._decide(self._claims())
            if decides is not None:
                return decides
        raise CheckpointError(
            f"{self.where}: its lists of accepted commits vanish as they are read"
        )

    def read_manifest(self, name: CommitName) -> bytes:
        data = self.store.read(key_of(name, MANIFEST), MAX_MANIFEST_BYTES)
        if data is None:
            raise VanishedCheckpointError(
                f"checkpoint {self.where}/{name.folder} is not there any more: its owner retired "
                "it, or somebody removed it; take another step"
            )
        return data

    def _claims(self) -> list[str]:
        return _claims(self.store.entries(f"{ATTEMPTS}/"))

    def _decide(self, claims: Sequence[str]) -> Acceptance | None:
        """None: a list was taken away between its listing and its reading."""

        def read(file_name: str) -> bytes:
            data = self.store.read(f"{ATTEMPTS}/{file_name}", MAX_LIST_BYTES)
            if data is None:
                raise FileNotFoundError(file_name)
            return data

        try:
            return acceptance(claims, read)
        except FileNotFoundError:
            return None

    # --- owning ---------------------------------------------------------------------------------

    @property
    def attempt(self) -> int | None:
        """This owner's number, once it has claimed."""
        return self._attempt

    @property
    def accepted(self) -> Acceptance:
        """What this owner goes on from."""
        return self._acceptance

    def claim(self, at_least: int = 1, also: Iterable[CommitName] = ()) -> int:
        """Become the owner.

        Args:
            at_least: the attempt's lowest number: those of the local tier before this store go on.
            also: commits of the local tier, which count too although they may not be here yet.
        """
        with self._lock:
            if self._attempt is None:
                self._prepare()
                attempt = self._take_next(at_least)
                try:
                    names = {*self.committed(), *also}
                    listed = encode_list(names)
                    self.store.replace(f"{ATTEMPTS}/{accepted_file(attempt)}", listed)
                except BaseException:
                    with suppress(StoreError):  # whom it fenced may go on
                        self.store.delete([f"{ATTEMPTS}/{claim_file(attempt)}"])
                    raise
                self._acceptance = Acceptance(attempt, frozenset(n.folder for n in names))
                self._commits = RemoteCommits(self.store, attempt, self._acceptance)
                self._attempt = attempt
            return self._attempt

    def _prepare(self) -> None:
        self.check()
        if not self.store.create(MARKER, marker.CONTENT):
            self.check()

    def _take_next(self, at_least: int) -> int:
        for _ in range(_MAX_CLAIMS):
            attempt = max(newest_claim(self._claims()) + 1, at_least)
            key = f"{ATTEMPTS}/{claim_file(attempt)}"
            if self.store.create(key, self._claim_content()):
                self._prove_exclusive(key)
                return attempt
        raise CheckpointError(
            f"{self.where}: {_MAX_CLAIMS} attempts were claimed by others while this process "
            "tried; too many jobs use one URL"
        )

    def _claim_content(self) -> bytes:
        """Unlike any other, so that a claim whose answer was lost is known again."""
        return json.dumps({**owner.facts(), "nonce": secrets.token_hex(8)}).encode() + b"\n"

    def _prove_exclusive(self, key: str) -> None:
        """A store that ignores the condition would let two owners have one attempt."""
        if not self.store.is_exclusive:
            warnings.warn(
                f"{self.where}: this store cannot create an object only if it is not there; of two "
                "jobs that start on this URL in the same instant, both may take it for theirs",
                stacklevel=2,
            )
        elif self.store.create(key, self._claim_content()):
            raise CheckpointError(
                f"{self.where}: this store overwrites objects although told not to "
                "(If-None-Match): two jobs could not be told apart; use one that has conditional "
                "writes"
            )

    # --- saving ---------------------------------------------------------------------------------

    def begin(self, step: int) -> CommitName:
        """Nothing is made: objects have no folders."""
        name = CommitName.new(self.claim(), step)
        with _fencing():
            self._owned().check_fence()
        return name

    def upload(
        self, name: CommitName, files: Sequence[tuple[Contents, int]], deadline: Deadline
    ) -> None:
        """Bring files (what they hold, and their descriptors) to the store, checked and durable."""
        with _fencing():
            self._owned().upload(name, files, deadline)

    def publish(self, name: CommitName, manifest: bytes) -> None:
        with self._lock, _fencing():
            self._owned().publish(name, manifest)
            self._owned().tell_latest(name)

    def abandon(self, name: CommitName) -> None:
        """Not where a later attempt owns the store: it may have accepted the commit."""
        with self._lock, suppress(StoreError):
            self._owned().check_fence()
            self.store.delete([key_of(name, MANIFEST)])
            self.store.delete([entry.key for entry in self.store.entries(f"{name.folder}/")])

    def retain(
        self, keep: int, keep_every: int | None = None, verified: CommitName | None = None
    ) -> list[CommitName]:
        """`verified` is not looked at: every upload was checked by the store, and the newest one
        always stays."""
        with self._lock, _fencing():
            return self._owned().retain(keep, keep_every)

    def take_spare(self, name: CommitName, file_name: str, size_bytes: int) -> bool:
        """Objects are never overwritten."""
        return False

    def _owned(self) -> RemoteCommits:
        if self._commits is None:
            raise CheckpointError(f"{self.where}: not claimed by this process; call claim() first")
        return self._commits

    def close(self) -> None:
        self.store.close()


class _fencing:
    """Raises FencedError for the FencedStoreError of modules without torch."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, FencedStoreError):
            raise FencedError(str(error)) from error


def _claims(entries: Iterable[Entry]) -> list[str]:
    prefix = f"{ATTEMPTS}/"
    return [e.key.removeprefix(prefix) for e in entries if e.key.startswith(prefix)]
