"""Commits in local folders, made without the Checkpointer: random shards and a true manifest."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tradewind._core import native
from tradewind.checkpoint import manifest as manifests
from tradewind.checkpoint.manifest import Manifest, ShardFile
from tradewind.checkpoint.names import CommitName, shard_name

BLOCK_BYTES = 64 << 10


@dataclass(frozen=True)
class Made:
    """A commit: its name, folder, shards and manifest."""

    name: CommitName
    folder: Path
    files: list[ShardFile]
    manifest: bytes

    @contextmanager
    def sources(self) -> Iterable[Sequence[tuple[ShardFile, int]]]:  # type: ignore[misc]
        """What an upload takes: each shard, and a descriptor of its file."""
        descriptors = [os.open(self.folder / file.name, os.O_RDONLY) for file in self.files]
        try:
            yield list(zip(self.files, descriptors, strict=True))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def data(self) -> dict[str, bytes]:
        return {file.name: (self.folder / file.name).read_bytes() for file in self.files}


def make_commit(
    place: Path,
    name: CommitName,
    sizes: Sequence[int] = (8192,),
    block_bytes: int = BLOCK_BYTES,
) -> Made:
    """A commit of shards of `sizes` bytes below `place`, its manifest beside them."""
    folder = place / name.folder
    folder.mkdir(parents=True)
    files = []
    for rank, size in enumerate(sizes):
        data = os.urandom(size)
        file = shard_name(rank, len(sizes))
        (folder / file).write_bytes(data)
        files.append(contents_of(file, data, block_bytes))
    manifest = manifests.encode(
        Manifest(
            step=name.step,
            attempt=name.attempt,
            id=name.id,
            parent=None,
            created_s=1.0,
            world_size=len(sizes),
            files=files,
            tensors={},
            tree={},
        )
    )
    (folder / "manifest.json").write_bytes(manifest)
    return Made(name, folder, files, manifest)


def contents_of(name: str, data: bytes, block_bytes: int = BLOCK_BYTES) -> ShardFile:
    sums = [
        native.crc32c(data[begin : begin + block_bytes])
        for begin in range(0, len(data), block_bytes)
    ]
    blocks = struct.pack(f"<{len(sums)}I", *sums)
    return ShardFile(name, len(data), native.crc32c(data), block_bytes, blocks)
