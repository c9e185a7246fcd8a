"""Flat objects by key under one URL: what the commit protocol needs of an object store.

Nothing is ever renamed, and no object that was acknowledged is overwritten but for the hint
`latest`. Whether two writers can be told apart rests on `create` alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from tradewind.checkpoint.stores.patience import Deadline, Patience

PART_BYTES = 16 << 20
NUM_THREADS = 8


class Contents(Protocol):
    """What a file holds: a ShardFile of the manifest is one. `block_crc32c`: u32, little-endian,
    one per `block_bytes`."""

    @property
    def name(self) -> str: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def crc32c(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def block_crc32c(self) -> bytes: ...


@dataclass(frozen=True)
class FileContents:
    """`Contents` by itself, in processes that read no manifest."""

    name: str
    size_bytes: int
    crc32c: int
    block_bytes: int
    block_crc32c: bytes


@dataclass(frozen=True)
class Entry:
    """One object: its key below the store's URL, and its size."""

    key: str
    size_bytes: int


class Store(ABC):
    """The objects below `url`. Thread-safe. Every call is bounded by `patience`, or by the deadline
    that it is given, and raises StoreError that names the store, the operation and what to do."""

    url: str  # without a slash at its end
    patience: Patience
    # Whether of several who `create` a key at once exactly one gets True.
    is_exclusive: bool

    @abstractmethod
    def entries(self, prefix: str = "") -> list[Entry]:
        """All objects whose keys begin with `prefix`, by key. Those that `create`, `replace` or an
        upload acknowledged before the call are in it."""

    @abstractmethod
    def read(self, key: str, max_bytes: int) -> bytes | None:
        """The object, None where there is none. Raises StoreError where it is larger."""

    @abstractmethod
    def read_range(
        self, key: str, offset_bytes: int, size_bytes: int, deadline: Deadline
    ) -> tuple[bytes, int] | None:
        """(bytes, size of the whole object), fewer bytes than asked for only at its end; None where
        there is no such object."""

    @abstractmethod
    def create(self, key: str, data: bytes) -> bool:
        """Write an object that is not there yet, durably; False: somebody else's is there.

        `data` has to be the caller's alone (it holds something random): where an answer is lost,
        an object of exactly these bytes is taken for one's own.
        """

    @abstractmethod
    def replace(self, key: str, data: bytes) -> None:
        """Write an object, whether or not it is there."""

    @abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; those that are not there count as removed."""

    @abstractmethod
    def upload_file(
        self, key: str, source: int, contents: Contents, deadline: Deadline, *, again: bool = False
    ) -> None:
        """Make an object of the file of descriptor `source`, from its begin, durably and checked.

        The key is one that nobody else writes. `again`: an earlier try may have made it already; it
        is then left as it is. What a failed upload left costs nothing and is not seen by `entries`,
        but for file systems without multipart uploads."""

    def clear_unfinished(self, keep_prefix: str) -> None:  # noqa: B027  (most have nothing to do)
        """Drop what uploads that were killed left, but for keys that begin with `keep_prefix`."""

    def close(self) -> None:  # noqa: B027
        """Let go of threads and connections; calls under way fail."""


def open_store(
    url: str,
    *,
    patience: Patience | None = None,
    part_bytes: int = PART_BYTES,
    num_threads: int = NUM_THREADS,
    options: dict[str, Any] | None = None,
) -> Store:
    """The store at `url`: `s3://BUCKET/PREFIX` by boto3, any other scheme by fsspec. Nothing is
    asked of it yet.

    Args:
        part_bytes: of a multipart upload; more where 10,000 parts would not hold the file.
        num_threads: parts under way at once; an upload holds `num_threads` parts in memory.
        options: for `boto3.client("s3", ...)` or `fsspec.filesystem(scheme, ...)`.

    Raises ValueError for what is no such URL, ImportError naming what to install.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or not scheme or not rest.strip("/"):
        raise ValueError(
            f"checkpoint: {url!r}: expected a URL such as s3://bucket/prefix, gs://bucket/prefix "
            "or file:///directory"
        )
    patience = patience or Patience()
    if scheme == "s3":
        from tradewind.checkpoint.stores.s3 import S3Store

        return S3Store(url, patience, part_bytes, num_threads, options or {})
    from tradewind.checkpoint.stores.fsspec_store import FsspecStore

    return FsspecStore(url, patience, part_bytes, options or {})


def is_url(path: object) -> bool:
    """Whether `path` means a store rather than a directory of this machine."""
    return isinstance(path, str) and "://" in path
