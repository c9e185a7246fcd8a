"""Commits brought from a store to local files: in parts, side by side, each block checked against
the sum that its manifest has before it counts."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from datetime import timedelta

from tradewind._core import native
from tradewind.checkpoint import manifest as manifests
from tradewind.checkpoint.errors import DamagedCheckpointError
from tradewind.checkpoint.manifest import Manifest
from tradewind.checkpoint.names import CommitName
from tradewind.checkpoint.stores.patience import Deadline, StoreError
from tradewind.checkpoint.stores.remote_commits import key_of
from tradewind.checkpoint.stores.remote_directory import RemoteDirectory
from tradewind.checkpoint.stores.s3_upload import part_size
from tradewind.checkpoint.stores.store import NUM_THREADS, PART_BYTES, Contents, Store

_NUM_LOOKS = 2  # at a part that arrives wrong: the way may have done it, not the store


def download_part(
    store: Store,
    key: str,
    offset_bytes: int,
    size_bytes: int,
    contents: Contents,
    target: int,
    deadline: Deadline,
) -> None:
    """Bring a range that begins at a block's begin, check its blocks and write it to the file of
    descriptor `target`, at the same offset. Raises DamagedCheckpointError, StoreError, OSError."""
    where = f"{store.url}/{key}"
    damage = ""
    for _ in range(_NUM_LOOKS):
        deadline.check(f"{where}: download from byte {offset_bytes}")
        found = store.read_range(key, offset_bytes, size_bytes, deadline)
        if found is None:
            raise DamagedCheckpointError(f"{where}: missing, but the manifest names it")
        data, total_bytes = found
        if total_bytes != contents.size_bytes:
            raise DamagedCheckpointError(
                f"{where}: expected {contents.size_bytes} bytes by its manifest, the store has "
                f"{total_bytes}"
            )
        damage = _damage(data, offset_bytes, size_bytes, contents)
        if not damage:
            _write(target, data, offset_bytes)
            return
    raise DamagedCheckpointError(f"{where}: {damage}")


def _damage(data: bytes, offset_bytes: int, size_bytes: int, contents: Contents) -> str:
    """What is wrong with the bytes; "" where nothing is."""
    if len(data) != size_bytes:
        return f"expected {size_bytes} bytes from byte {offset_bytes}, got {len(data)}"
    step = contents.block_bytes
    for begin in range(0, size_bytes, step):
        block = (offset_bytes + begin) // step
        expected = int.from_bytes(contents.block_crc32c[4 * block : 4 * block + 4], "little")
        got = native.crc32c(data[begin : begin + step])
        if got != expected:
            return (
                f"block {block} (from byte {offset_bytes + begin}): expected CRC32C "
                f"{expected:08x}, got {got:08x}"
            )
    return ""


def _write(target: int, data: bytes, offset_bytes: int) -> None:
    view = memoryview(data)
    while view:
        num = os.pwrite(target, view, offset_bytes)
        view = view[num:]
        offset_bytes += num


def read_checked_manifest(remote: RemoteDirectory, name: CommitName) -> tuple[Manifest, bytes]:
    """The manifest of a commit, and its bytes. Raises DamagedCheckpointError also where it is that
    of another commit."""
    where = f"{remote.where}/{name.folder}"
    data = remote.read_manifest(name)
    manifest = manifests.decode(data, where)
    if (manifest.attempt, manifest.step, manifest.id) != (name.attempt, name.step, name.id):
        raise DamagedCheckpointError(
            f"{where}: its manifest is that of step {manifest.step}, attempt {manifest.attempt}, "
            f"{manifest.id}"
        )
    return manifest, data


def fetch_files(
    remote: RemoteDirectory,
    name: CommitName,
    manifest: Manifest,
    folder: str | os.PathLike[str],
    *,
    deadline: timedelta = timedelta(hours=1),
    files: Sequence[Contents] | None = None,
    part_bytes: int = PART_BYTES,
    num_threads: int = NUM_THREADS,
) -> int:
    """Bring the shards of a commit (or `files` of them) into the existing `folder`, durably.

    Files of their names are overwritten; what is there after an error is to be removed. Returns
    the bytes brought.

    Raises DamagedCheckpointError naming object and block, StoreError, OSError.
    """
    wanted = manifest.files if files is None else files
    limit = Deadline(deadline)
    targets: list[int] = []
    pool = ThreadPoolExecutor(num_threads, "tradewind-fetch")
    futures: list[Future[None]] = []
    try:
        for file in wanted:
            path = os.path.join(folder, file.name)
            target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            targets.append(target)
            os.truncate(target, file.size_bytes)
            key = key_of(name, file.name)
            step = part_size(file.size_bytes, file.block_bytes, part_bytes)
            for offset in range(0, file.size_bytes, step):
                size = min(step, file.size_bytes - offset)
                part = (remote.store, key, offset, size, file, target, limit)
                futures.append(pool.submit(download_part, *part))
        _await(futures, limit, f"{remote.where}/{name.folder}")
        for target in targets:
            os.fsync(target)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        _close_after(futures, targets)
    return sum(file.size_bytes for file in wanted)


def _close_after(futures: Sequence[Future[None]], targets: Sequence[int]) -> None:
    """Close the files once no part is written any more: a stuck one, which its socket's time-out
    ends, must not find another file under its descriptor."""

    begun = [future for future in futures if not future.cancelled()]

    def close() -> None:
        wait(begun)
        for target in targets:
            os.close(target)

    if all(future.done() for future in begun):
        close()
    else:
        threading.Thread(target=close, daemon=True, name="tradewind-fetch-end").start()


def _await(futures: Sequence[Future[None]], limit: Deadline, where: str) -> None:
    done, pending = wait(futures, limit.remaining_s, FIRST_EXCEPTION)
    for future in done:
        future.result()
    if pending:
        raise StoreError(
            f"{where}: {len(pending)} of {len(futures)} parts did not arrive within "
            f"{limit.limit.total_seconds():g} s; is the connection stuck, or the deadline too "
            "short?",
            transient=True,
        )
