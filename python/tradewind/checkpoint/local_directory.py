"""Checkpoints in a directory of a file system: the commit protocol, one durable step after another.

    begin     a folder of a name that nothing had before
    (write)   shards, each synced by who writes it
    publish   sync the folder; manifest.json.tmp, synced; nobody newer? rename to manifest.json;
              sync the folder and the directory; nobody newer? it is committed
    retain    unlink the manifest of an old commit; sync; then its files may be overwritten

With one shard that is five syncs until a save is durable. `latest` is not synced, nor is a removal
after which nothing is overwritten: losing either loses nothing. A sync that failed is never
repeated: that save is given up.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator

from tradewind._core import native
from tradewind.checkpoint import marker
from tradewind.checkpoint.attempts import Attempts
from tradewind.checkpoint.claims import Acceptance, newest_claim
from tradewind.checkpoint.directory import CheckpointDirectory, to_keep
from tradewind.checkpoint.errors import (
    CheckpointError,
    DamagedCheckpointError,
    FencedError,
    VanishedCheckpointError,
)
from tradewind.checkpoint.folders import CommitFolders
from tradewind.checkpoint.locks import lock_shared
from tradewind.checkpoint.manifest import MAX_MANIFEST_BYTES
from tradewind.checkpoint.names import LATEST, LOCK, MANIFEST, SPARE, CommitName
from tradewind.checkpoint.owner import Owner
from tradewind.checkpoint.spares import Spares

RECYCLED_FROM_BYTES = 1 << 20  # below, a sync costs more than new blocks do
_MAX_LOOKS = 200
_TEMPORARY = ".tmp"


class LocalDirectory(CheckpointDirectory):
    """See CheckpointDirectory. Also for network file systems: what must not be shared is decided
    by exclusive creation and by lists, never by whether a file is seen to be absent."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        env: native.Env | None = None,
        *,
        recycled_from_bytes: int | None = None,
    ) -> None:
        """Touches nothing. `env`: the file system, for tests of crashes; `recycled_from_bytes`:
        smaller files are removed rather than kept to be overwritten."""
        self.where = os.path.abspath(os.fspath(path))
        self.env = native.posix_env() if env is None else env
        spare = os.path.join(self.where, SPARE)
        least_bytes = RECYCLED_FROM_BYTES if recycled_from_bytes is None else recycled_from_bytes
        self._spares = Spares(self.env, spare, least_bytes)
        self._folders = CommitFolders(self.env, self.where, self._spares)
        self._attempts = Attempts(self.env, self.where)
        self._owner = Owner(self.env, self.where, os.path.join(self.where, LOCK))
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._attempt: int | None = None
        self._least_attempt = 1
        self._acceptance = Acceptance()
        # What decides besides this directory's own lists: those of the store behind it.
        self.outer = Acceptance()
        self._published: set[CommitName] = set()  # of this owner, and those it accepted
        self._open: set[CommitName] = set()  # begun, neither published nor abandoned

    def path_of(self, name: CommitName, file_name: str | None = None) -> str:
        """The path of a commit's folder, or of a file in it."""
        return self._folders.path_of(name, file_name)

    # --- reading --------------------------------------------------------------------------------

    def check(self) -> None:
        marker.check(self.env, self.where)

    def committed(self) -> list[CommitName]:
        # The list of claims must be the same before and after the commits are listed: else a newer
        # owner may have shut out, in between, what the older list counts.
        for _ in range(_MAX_LOOKS):
            files = self._attempts.files()
            with contextlib.suppress(FileNotFoundError):  # a list was pruned
                decides = self._attempts.decide(files)
                names = self._look(lambda n: decides.counts(n) and self.outer.counts(n))  # noqa: B023
                if names is not None and self._attempts.files() == files:
                    return names
        raise CheckpointError(
            f"checkpoint directory {self.where!r}: its owners or commits changed while they were "
            f"listed, {_MAX_LOOKS} times in a row; do too many jobs use one directory?"
        )

    def _look(self, counts: Callable[[CommitName], bool]) -> list[CommitName] | None:
        """The commits that count, the newest first; None: a newer one may have been missed.

        From the oldest on: what has been retired when it is looked at was retired for a newer one,
        which is found later, or else its folder was made since."""
        listed = sorted(name for name in self._folders.names() if counts(name))
        names = [name for name in listed if self._folders.is_published(name)]
        if len(names) < len(listed):
            known = set(listed)
            if any(counts(name) and name not in known for name in self._folders.names()):
                return None
        return names[::-1]

    def read_manifest(self, name: CommitName) -> bytes:
        path = self.path_of(name, MANIFEST)
        try:
            return self.env.read_file(path, MAX_MANIFEST_BYTES)
        except OSError as error:
            if error.errno == errno.EFBIG:
                raise DamagedCheckpointError(
                    f"{path!r}: expected at most {MAX_MANIFEST_BYTES} bytes, got more"
                ) from error
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
                raise self._vanished(name) from error
            raise

    @contextlib.contextmanager
    def reading(self, name: CommitName, file_names: Iterable[str]) -> Iterator[None]:
        with contextlib.ExitStack() as held:
            missing: list[str] = []
            for file_name in file_names:
                try:
                    lock = lock_shared(self.env, self.path_of(name, file_name))
                except FileNotFoundError:
                    missing.append(file_name)
                else:
                    held.enter_context(lock or contextlib.nullcontext())
            # Looked for with the locks held: an owner removes the manifest, then asks for them.
            if not self._folders.is_published(name):
                raise self._vanished(name)
            if missing:
                raise DamagedCheckpointError(
                    f"{self.path_of(name, missing[0])!r}: missing, but the manifest names it"
                )
            try:
                yield
            except FileNotFoundError as error:  # retired since; what is open stays readable
                if self._folders.is_published(name):
                    raise
                raise self._vanished(name) from error

    def _vanished(self, name: CommitName) -> VanishedCheckpointError:
        return VanishedCheckpointError(
            f"checkpoint {self.path_of(name)!r} is not there any more: its owner retired it, or "
            "somebody removed it; take another step"
        )

    # --- owning ---------------------------------------------------------------------------------

    def newest_attempt(self) -> int:
        """The highest number that was claimed here, 0 where there is none."""
        return newest_claim(self._attempts.files())

    def lock(self) -> None:
        """Keep other processes of this machine from owning the directory, before `claim`.

        Raises DirectoryInUseError."""
        with self._lock:
            self._check_process()
            marker.prepare(self.env, self.where)
            self._owner.acquire()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise CheckpointError(
                f"checkpoint directory {self.where!r} was opened by process {self._pid}: a forked "
                "child opens its own, elsewhere"
            )

    def claim(self, at_least: int | None = None) -> int:
        """`at_least`: the lowest number to take, from now on, also where the directory is emptied
        under this owner: the attempt that it has in the store behind this directory."""
        with self._lock:
            self._check_process()
            if at_least is not None:
                self._least_attempt = at_least
            if self._attempt is None:
                self.lock()
                try:
                    self._attempt = self._claim_next()
                except BaseException:
                    self._owner.release()
                    raise
            return self._attempt

    def _claim_next(self) -> int:
        attempt = self._attempts.claim(self._least_attempt)
        try:
            seen = self.committed()
            self._make_durable(seen)
            self._acceptance = self._attempts.accept(attempt, seen)
        except BaseException:
            self._attempts.withdraw(attempt)
            raise
        self._published, self._open = set(seen), set()
        self._attempts.prune(attempt)
        marker.remove_leftovers(self.env, self.where, self.env.list_directory(self.where))
        with contextlib.suppress(OSError):
            self._clear_dead(attempt)
        return attempt

    def adopt(self, name: CommitName, manifest: bytes, bring: Callable[[str], object]) -> None:
        """Commit a copy of what another place has committed as `name`, whether or not this process
        owns the directory; a copy that is there already, damaged perhaps, is taken away first.

        Args:
            bring: called with the folder's path, writes and syncs all files but the manifest.

        Raises DirectoryInUseError where another process owns the directory, what `bring` raises,
        and OSError; nothing is left then.
        """
        with self._lock:
            self.lock()
            folder, final = self.path_of(name), self.path_of(name, MANIFEST)
            self._open.add(name)
            self._published.discard(name)
            try:
                self._folders.remove(name)
                self.env.make_directory(folder)
                bring(folder)
                self._let_count(name)
                self.env.sync_directory(folder)
                self.env.write_file(final + _TEMPORARY, manifest, exclusive=True)
                self.env.rename(final + _TEMPORARY, final)
                self.env.sync_directory(folder)
                self.env.sync_directory(self.where)
            except BaseException:
                with contextlib.suppress(OSError):
                    self._folders.remove(name)
                raise
            finally:
                self._open.discard(name)
                if self._attempt is None:
                    self._owner.release()
            self._published.add(name)

    def _let_count(self, name: CommitName) -> None:
        """Add a commit of an earlier attempt to the list that decides here."""
        decides = self._acceptance
        if self._attempt is None:
            decides = self._attempts.decide(self._attempts.files())
        if decides.counts(name):
            return
        assert decides.attempt is not None
        known = [CommitName.parse(folder) for folder in sorted(decides.folders)]
        names = [*(each for each in known if each is not None), name]
        decides = self._attempts.accept(decides.attempt, names)
        if self._attempt is not None:
            self._acceptance = decides

    def _make_durable(self, names: list[CommitName]) -> None:
        """What an owner that was killed, or still lives, renamed but had not synced."""
        newest = max((name.attempt for name in names), default=None)
        for name in names:
            if name.attempt == newest:
                with contextlib.suppress(FileNotFoundError):
                    self.env.sync_directory(self.path_of(name))
        if names:
            self.env.sync_directory(self.where)

    def _check_owner(self) -> int:
        """The attempt of this owner, claimed anew where the directory was emptied under it."""
        attempt = self.claim()
        if self._attempts.check(attempt):
            return attempt
        self._attempt = None
        self._owner.release()
        return self.claim()

    def _is_fenced(self) -> bool:
        if self._attempt is None:
            return False
        try:
            self._attempts.check(self._attempt)
        except FencedError:
            return True
        return False

    # --- saving ---------------------------------------------------------------------------------

    def begin(self, step: int) -> CommitName:
        with self._lock:
            name = CommitName.new(self._check_owner(), step)
            # Its entry in the directory becomes durable in publish().
            self.env.make_directory(self.path_of(name))
            self._open.add(name)
            return name

    def publish(self, name: CommitName, manifest: bytes) -> None:
        with self._lock:
            if self._attempt is None:
                raise CheckpointError(f"{self.where!r}: no save of {name} was begun here")
            try:
                self._publish(name, manifest, self._attempt)
            except OSError:
                self.check_owner()  # a later one clears our folder away
                raise
            self._open.discard(name)
            self._published.add(name)
            with contextlib.suppress(OSError):  # a hint for people
                latest = os.path.join(self.where, LATEST)
                line = name.folder.encode() + b"\n"
                self.env.write_file(latest + _TEMPORARY, line, sync=False)
                self.env.rename(latest + _TEMPORARY, latest)

    def _publish(self, name: CommitName, manifest: bytes, attempt: int) -> None:
        folder, final = self.path_of(name), self.path_of(name, MANIFEST)
        self.env.sync_directory(folder)
        self.env.write_file(final + _TEMPORARY, manifest, exclusive=True)
        self._attempts.check(attempt)
        self.env.rename(final + _TEMPORARY, final)
        self.env.sync_directory(folder)
        self.env.sync_directory(self.where)
        self._attempts.check(attempt)

    def abandon(self, name: CommitName) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._open.discard(name)
            if self._folders.is_published(name) and self._is_fenced():
                return  # the newer owner may have accepted it
            if self._attempt is not None:
                self._spares.discard()  # most saves fail because the disk is full
            self._folders.remove(name)

    def check_owner(self) -> None:
        with contextlib.suppress(OSError):
            if self._attempt is not None:
                self._attempts.check(self._attempt)

    def take_spare(self, name: CommitName, file_name: str, size_bytes: int) -> bool:
        return self._spares.take(self.path_of(name, file_name), size_bytes)

    # --- retention ------------------------------------------------------------------------------

    def retain(
        self, keep: int, keep_every: int | None = None, verified: CommitName | None = None
    ) -> list[CommitName]:
        """Retire what `to_keep` does not name, the oldest first, and clear dead folders away.

        Does nothing for who is not, or not any more, the owner. Raises the first OSError, after
        the other folders have had their turn."""
        with self._lock:
            if self._attempt is None or self._is_fenced():
                return []
            counted = self._counted(keep)
            kept = to_keep(counted, keep, keep_every, verified)
            retired: list[CommitName] = []
            failure: OSError | None = None
            for name in reversed(counted):
                if name in kept:
                    continue
                if self._is_fenced():
                    return retired
                try:
                    self._folders.retire(name)
                except OSError as error:
                    failure = failure or error
                self._published.discard(name)
                retired.append(name)
            self._clear_dead(self._attempt)
            if failure is not None:
                raise failure
            return retired

    def _counted(self, keep: int) -> list[CommitName]:
        """The commits that count, newest first, as `committed` says, but without looking into each
        folder: only the newest `keep`, on which the others' removal rests, are looked at again."""
        found: list[CommitName] = []
        for name in sorted(self._folders.names(), reverse=True):
            if not self._acceptance.counts(name) or name in self._open:
                continue
            is_known = name in self._published and len(found) >= keep
            if is_known or self._folders.is_published(name):
                found.append(name)
        self._published = set(found)
        return found

    def _clear_dead(self, attempt: int) -> None:
        """Remove saves that nobody goes on with: of earlier attempts what does not count, of this
        one what was abandoned but could not be removed. Never recycled: an earlier owner that
        still lives may be writing there."""
        for name in self._folders.names():
            if name.attempt <= attempt and name not in self._published | self._open:
                self._folders.remove(name)

    def close(self) -> None:
        with self._lock:
            if os.getpid() != self._pid:
                return
            if self._attempt is not None:
                with contextlib.suppress(OSError):
                    if not self._is_fenced():
                        self._spares.discard()
            self._attempt = None
            self._owner.release()
