"""The commit protocol on an object store, as one owner runs it: data first, the manifest last, by a
conditional PUT between two looks at the claims.

    STORE/tradewind-checkpoints.json, latest, attempts/N, attempts/N.accepted     as in a directory
    STORE/step-S.N.ID/shard-...safetensors, manifest.json

Objects appear whole, and under names of their own, so nothing has to be synced or renamed; else the
protocol, and the rule which commits count (claims.py), are those of a local directory. The upload
process runs this module: no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from tradewind.checkpoint.claims import Acceptance, newest_claim
from tradewind.checkpoint.directory import to_keep
from tradewind.checkpoint.names import ATTEMPTS, LATEST, MANIFEST, CommitName, claim_file
from tradewind.checkpoint.stores.patience import Deadline, StoreError
from tradewind.checkpoint.stores.store import Contents, Entry, Store

_NUM_FILES_AT_ONCE = 4  # so that one file's parts go out while another's upload is completed


class FencedStoreError(StoreError):
    """A later attempt owns the store (`FencedError` where torch may be loaded)."""


class RemoteCommits:
    """Commits of the owner `attempt`, which goes on from what `acceptance` counts. One thread."""

    def __init__(self, store: Store, attempt: int, acceptance: Acceptance) -> None:
        self._store = store
        self._attempt = attempt
        self._acceptance = acceptance
        self._has_cleared = False

    def upload(
        self,
        name: CommitName,
        files: Sequence[tuple[Contents, int]],
        deadline: Deadline,
        *,
        again: bool = False,
    ) -> None:
        """Bring the files of a commit (what they hold, and their descriptors) to the store.

        `again`: an earlier try may have brought some of them. Raises FencedStoreError, StoreError.
        """

        def one(file: tuple[Contents, int]) -> None:
            contents, source = file
            key = key_of(name, contents.name)
            self._store.upload_file(key, source, contents, deadline, again=again)

        with ThreadPoolExecutor(min(_NUM_FILES_AT_ONCE, len(files)) + 1) as pool:
            fence = pool.submit(self.check_fence)
            sent = [pool.submit(one, file) for file in files]
            try:
                fence.result()
                for each in sent:
                    each.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def publish(self, name: CommitName, manifest: bytes) -> None:
        """Commit `name`, all files of which are there. Durable and acknowledged as it returns.

        Raises FencedStoreError; after the manifest was written it means that the later owner may
        or may not have accepted the commit, and that it does not count as acknowledged."""
        self.check_fence()
        key = key_of(name, MANIFEST)
        if not self._store.create(key, manifest):
            raise StoreError(
                f"{self._store.url}/{key}: another manifest stands there, and is left; folders of "
                "checkpoints are only written by tradewind"
            )
        self.check_fence()

    def tell_latest(self, name: CommitName) -> None:
        """A hint for people: losing it loses nothing."""
        with suppress(StoreError):
            self._store.replace(LATEST, name.folder.encode() + b"\n")

    def retain(
        self, keep: int, keep_every: int | None, current: CommitName | None = None
    ) -> list[CommitName]:
        """Retire what `to_keep` does not name, and clear what dead saves left, but for `current`.
        Manifests go first: no crash leaves one whose files are gone. Returns the retired."""
        entries = self._store.entries()
        self._check_claims(entry.key for entry in entries)
        by_name = folders_of(entries)
        counted = [name for name, files in by_name.items() if self._counts(name, files)]
        kept = to_keep(counted, keep, keep_every)
        dead = [
            name
            for name, files in by_name.items()
            if name not in kept and name != current and not self._is_later(name)
        ]
        manifests = [key_of(name, MANIFEST) for name in sorted(dead) if MANIFEST in by_name[name]]
        self._store.delete(manifests)
        rest = [key_of(name, file) for name in sorted(dead) for file in by_name[name] - {MANIFEST}]
        self._store.delete(rest)
        if not self._has_cleared:
            with suppress(StoreError):  # not allowed, perhaps; a rule of the bucket does it too
                self._store.clear_unfinished(current.folder if current else ATTEMPTS)
            self._has_cleared = True
        return sorted(set(dead) & set(counted))

    def _counts(self, name: CommitName, files: set[str]) -> bool:
        return MANIFEST in files and self._acceptance.counts(name)

    def _is_later(self, name: CommitName) -> bool:
        return name.attempt > self._attempt

    def check_fence(self) -> None:
        """Raises FencedStoreError where a newer claim stands, StoreError where ours does not."""
        self._check_claims(entry.key for entry in self._store.entries(f"{ATTEMPTS}/"))

    def _check_claims(self, keys: Iterable[str]) -> None:
        prefix = f"{ATTEMPTS}/"
        claims = [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
        newest = newest_claim(claims)
        if newest > self._attempt:
            raise FencedStoreError(
                f"{self._store.url}: this process is attempt {self._attempt}, and attempt {newest} "
                "owns the checkpoints there since; nothing of this process is committed there any "
                "more: end it, or save elsewhere"
            )
        if claim_file(self._attempt) not in claims:
            raise StoreError(
                f"{self._store.url}: the claim of this process ({prefix}"
                f"{claim_file(self._attempt)}) is gone: somebody emptied the place; make a new "
                "Checkpointer"
            )


def key_of(name: CommitName, file_name: str) -> str:
    return f"{name.folder}/{file_name}"


def folders_of(entries: Iterable[Entry]) -> Mapping[CommitName, set[str]]:
    """The names of the files in each folder of a save; all else is somebody else's."""
    found: dict[CommitName, set[str]] = {}
    for entry in entries:
        folder, separator, file = entry.key.partition("/")
        name = CommitName.parse(folder)
        if name is not None and separator and "/" not in file:
            found.setdefault(name, set()).add(file)
    return found
