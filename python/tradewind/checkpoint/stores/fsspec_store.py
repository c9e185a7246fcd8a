"""Any store that fsspec knows: gs://, abfs://, memory://, file:// and others.

fsspec has one word for "only if it is not there" (mode "create"), but how much it means is up to
each file system; `_EXCLUSIVE` names those that do it in one step at the store. On all others two
writers that claim in the same instant are told apart only by the random part of every name: neither
overwrites the other, and both may believe themselves the owner until one looks again.
"""

from __future__ import annotations

import importlib
import os
import secrets
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

from tradewind.checkpoint.stores.patience import Deadline, Patience, StoreError
from tradewind.checkpoint.stores.s3_upload import read_source
from tradewind.checkpoint.stores.store import Contents, Entry, Store

T = TypeVar("T")

_EXCLUSIVE = {"file", "local", "memory", "gs", "gcs"}
_LOCAL = {"file", "local"}
_TEMPORARY = ".tradewind-tmp"


class FsspecStore(Store):
    """`SCHEME://PATH`. File systems of fsspec take no deadline: each call runs in a thread of its
    own, which is left behind where it does not come back.

    Raises ImportError that names the missing package, ValueError for an unknown scheme.
    """

    def __init__(
        self, url: str, patience: Patience, part_bytes: int, options: dict[str, Any]
    ) -> None:
        self.url = url.rstrip("/")
        self.patience = patience
        self._part_bytes = part_bytes
        self._scheme = url.partition("://")[0]
        self.is_exclusive = self._scheme in _EXCLUSIVE
        self._fs, root = _file_system(self.url, options)
        self._root = str(root).rstrip("/")
        self._is_local = self._scheme in _LOCAL

    # --- small objects --------------------------------------------------------------------------

    def entries(self, prefix: str = "") -> list[Entry]:
        def once() -> list[Entry]:
            # A listing that the file system keeps would hide what others wrote since.
            self._fs.invalidate_cache()
            found = self._fs.find(self._root, detail=True)
            named = [(self._key_of(path), info) for path, info in found.items()]
            return [
                Entry(key, int(info.get("size") or 0))
                for key, info in sorted(named)
                if key.startswith(prefix) and not key.endswith(_TEMPORARY)
            ]

        return self._retried("list", "", once, missing=[])

    def read(self, key: str, max_bytes: int) -> bytes | None:
        found = self.read_range(key, 0, max_bytes + 1, Deadline(self.patience.request))
        if found is None:
            return None
        data, size_bytes = found
        if size_bytes > max_bytes:
            raise StoreError(
                f"{self.url}/{key}: expected at most {max_bytes} bytes, got {size_bytes}; it is "
                "none of ours"
            )
        return data

    def read_range(
        self, key: str, offset_bytes: int, size_bytes: int, deadline: Deadline
    ) -> tuple[bytes, int] | None:
        def once() -> tuple[bytes, int]:
            path = self._path(key)
            total = int(self._fs.size(path))
            end = min(offset_bytes + size_bytes, total)
            if end <= offset_bytes:
                return b"", total
            return bytes(self._fs.cat_file(path, start=offset_bytes, end=end)), total

        return self._retried("read", key, once, missing=None, deadline=deadline)

    def create(self, key: str, data: bytes) -> bool:
        def once() -> bool:
            try:
                self._write_new(self._path(key), data)
            except FileExistsError:
                return False
            return True

        if self._retried("create", key, once):
            return True
        return self.read_range(key, 0, len(data) + 1, Deadline(self.patience.request)) == (
            data,
            len(data),
        )

    def _write_new(self, path: str, data: bytes) -> None:
        if not self._is_local:
            self._make_parent(path)
            self._fs.pipe_file(path, data, mode="create")
            return
        self._write_local(path, data, os.link)

    def replace(self, key: str, data: bytes) -> None:
        def once() -> None:
            path = self._path(key)
            if self._is_local:
                self._write_local(path, data, os.replace)
            else:
                self._make_parent(path)
                self._fs.pipe_file(path, data)

        self._retried("write", key, once)

    def _write_local(self, path: str, data: bytes, place: Callable[[str, str], None]) -> None:
        """Whole or not at all, and durable: `place` gives the written file its name."""
        self._make_parent(path)
        temporary = f"{path}.{secrets.token_hex(4)}{_TEMPORARY}"
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            place(temporary, path)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
        _sync_directory(os.path.dirname(path))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:

            def once(path: str = self._path(key)) -> None:
                with suppress(FileNotFoundError):
                    self._fs.rm_file(path)
                if self._is_local:
                    with suppress(OSError):  # not empty yet
                        os.rmdir(os.path.dirname(path))

            self._retried("delete", key, once)

    # --- files ----------------------------------------------------------------------------------

    def upload_file(
        self, key: str, source: int, contents: Contents, deadline: Deadline, *, again: bool = False
    ) -> None:
        path = self._path(key)

        def once() -> None:
            if again and self._fs.exists(path) and self._fs.size(path) == contents.size_bytes:
                return
            self._make_parent(path)
            with self._fs.open(path, "wb") as target:
                for offset in range(0, contents.size_bytes, self._part_bytes):
                    size = min(self._part_bytes, contents.size_bytes - offset)
                    target.write(read_source(source, offset, size, f"{self.url}/{key}"))
                    deadline.check(f"{self.url}/{key}")
                if self._is_local:
                    target.flush()
                    os.fsync(target.fileno())
            if self._is_local:
                _sync_directory(os.path.dirname(path))
            stored = int(self._fs.size(path))
            if stored != contents.size_bytes:
                raise StoreError(
                    f"{self.url}/{key}: sent {contents.size_bytes} bytes, the store has {stored}",
                    transient=True,
                )

        self._retried("upload", key, once, deadline=deadline)

    # --- calls ----------------------------------------------------------------------------------

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _key_of(self, path: str) -> str:
        return str(path).removeprefix(self._root).lstrip("/")

    def _make_parent(self, path: str) -> None:
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    def _retried(
        self,
        operation: str,
        key: str,
        call: Callable[[], T],
        *,
        missing: Any = StoreError,
        deadline: Deadline | None = None,
    ) -> T:
        """What `call` returns, or `missing` where it finds no such file."""
        limit = deadline or Deadline(self.patience.request)
        where = f"{self.url}/{key}: {operation}" if key else f"{self.url}: {operation}"

        def once() -> T:
            try:
                return _in_time(call, limit, where)
            except StoreError:
                raise
            except FileNotFoundError as error:
                if missing is not StoreError:
                    return missing  # type: ignore[no-any-return]
                raise StoreError(f"{where}: {error or 'no such file or directory'}") from error
            except (PermissionError, NotADirectoryError, IsADirectoryError) as error:
                raise StoreError(f"{where}: {error}; check who may write there") from error
            except (OSError, TimeoutError) as error:
                kind = type(error).__name__
                raise StoreError(f"{where}: {kind}: {error}", transient=True) from error
            except Exception as error:
                kind = type(error).__name__
                advice = f"check the URL and the credentials for {self._scheme}://"
                raise StoreError(f"{where}: {kind}: {error}; {advice}") from error

        return self.patience.retried(once, limit)


def _in_time(call: Callable[[], T], deadline: Deadline, where: str) -> T:
    """What `call` returns or raises, or a StoreError at the deadline."""
    deadline.check(where)
    result: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(call())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True, name="tradewind-fsspec")
    thread.start()
    thread.join(deadline.remaining_s)
    if failure:
        raise failure[0]
    if not result:
        deadline.check(where)
        raise StoreError(f"{where}: no answer", transient=True)
    return result[0]


def _file_system(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    scheme = url.partition("://")[0]
    try:
        core = importlib.import_module("fsspec.core")
    except ImportError as error:
        raise ImportError(
            f"checkpoint: {url!r} needs fsspec; install it by: pip install fsspec"
        ) from error
    try:
        found: tuple[Any, str] = core.url_to_fs(url, **options)
    except ImportError as error:
        raise ImportError(
            f"checkpoint: {url!r} needs the file system of {scheme}://, which fsspec did not find: "
            f"{error}"
        ) from error
    except ValueError as error:
        raise ValueError(f"checkpoint: {url!r}: {error}") from error
    return found


def _sync_directory(path: str) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
