"""One file to S3 in parts, side by side, each with its CRC32C. The sums come from the shard's
blocks, computed when training wrote it: the store checks the bytes against what was in memory, and
a disk that changed them since is found out.

Bodies are plain memory: botocore sends that at once, but anything like a file in pieces of 16 KB.
"""

from __future__ import annotations

import base64
import hashlib
import os
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tradewind.checkpoint.stores import crc32c, s3_answers
from tradewind.checkpoint.stores.patience import Deadline, StoreError

if TYPE_CHECKING:
    from tradewind.checkpoint.stores.s3 import S3Store
    from tradewind.checkpoint.stores.store import Contents

_MAX_PARTS = 10_000  # by the protocol
_NO_CRC32C = {"InvalidArgument", "InvalidRequest", "NotImplemented"}
_MAX_ROUNDS = 3


def part_size(size_bytes: int, block_bytes: int, wanted_bytes: int) -> int:
    """Bytes of each part but the last: whole blocks, at least `wanted_bytes`, and so many that the
    protocol's 10,000 parts hold the file."""
    needed = max(wanted_bytes, -(-size_bytes // _MAX_PARTS))
    return -(-needed // block_bytes) * block_bytes


def read_source(
    source: int, offset_bytes: int, size_bytes: int, where: str, buffer: bytearray | None = None
) -> bytearray:
    """Bytes of the local file, in `buffer` where it has just that size. Raises StoreError where
    the file ends before."""
    data = buffer if buffer is not None and len(buffer) == size_bytes else bytearray(size_bytes)
    view = memoryview(data)
    done = 0
    while done < size_bytes:
        num = os.preadv(source, [view[done:]], offset_bytes + done)
        if num == 0:
            raise StoreError(
                f"{where}: the local file ends at byte {offset_bytes + done}, its manifest says "
                "more; it was cut after its commit"
            )
        done += num
    return data


class MultipartUpload:
    """The upload of the file of descriptor `source`. Used once, by one thread; parts go out from
    the store's pool."""

    def __init__(
        self, store: S3Store, key: str, source: int, contents: Contents, deadline: Deadline
    ) -> None:
        self._store = store
        self._key = key
        self._where = f"{store.url}/{key}"
        self._source = source
        self._contents = contents
        self._deadline = deadline
        self._part_bytes = part_size(contents.size_bytes, contents.block_bytes, store.part_bytes)
        self._num_parts = -(-contents.size_bytes // self._part_bytes)
        self._upload_id = ""

    def run(self) -> None:
        """Raises StoreError; nothing is left then."""
        for number in range(1, _MAX_ROUNDS + 1):
            try:
                self._upload_id = self._begin()
                try:
                    self._complete(self._send_all())
                except BaseException:
                    with suppress(StoreError):
                        self._store.abort(self._key, self._upload_id)
                    raise
                return
            except StoreError as error:
                # By the protocol a conflict at the end needs a new upload, of all parts.
                if error.status != s3_answers.CONFLICT or number == _MAX_ROUNDS:
                    raise

    def _begin(self) -> str:
        from tradewind.checkpoint.stores.s3 import metadata

        sums: dict[str, Any] = {}
        if self._store.takes_crc32c:
            sums["ChecksumAlgorithm"] = "CRC32C"
        try:
            answer = self._store.call(
                "create_multipart_upload",
                self._key,
                deadline=self._deadline,
                Metadata=metadata(self._contents),
                **sums,
            )
        except StoreError as error:
            if not sums or error.code not in _NO_CRC32C:
                raise
            self._store.takes_crc32c = False
            return self._begin()
        return str(answer["UploadId"])

    def _send_all(self) -> list[dict[str, Any]]:
        futures = [
            self._store.pool.submit(self._send, number) for number in range(1, self._num_parts + 1)
        ]
        done, pending = wait(futures, self._deadline.remaining_s, FIRST_EXCEPTION)
        if pending:
            for future in pending:
                future.cancel()
            for future in done:
                future.result()  # raises the first part's error
            stuck = [str(i + 1) for i, future in enumerate(futures) if future in pending]
            raise StoreError(
                f"{self._where}: part {', '.join(stuck[:3])}{' ...' if len(stuck) > 3 else ''} of "
                f"{self._num_parts} had no answer within "
                f"{self._deadline.limit.total_seconds():g} s; is the connection stuck, or the "
                "deadline too short?",
                transient=True,
            )
        return [future.result() for future in futures]

    def _send(self, number: int) -> dict[str, Any]:
        contents = self._contents
        offset = (number - 1) * self._part_bytes
        size = min(self._part_bytes, contents.size_bytes - offset)
        where = f"{self._where}: part {number} of {self._num_parts}"
        self._deadline.check(where)
        body = read_source(self._source, offset, size, where, self._buffer())
        part: dict[str, Any] = {"PartNumber": number}
        if self._store.takes_crc32c:
            blocks = contents.block_crc32c
            sums = crc32c.header(crc32c.part_sum(blocks, contents.block_bytes, offset, size))
            part["ChecksumCRC32C"] = sums
            check: dict[str, Any] = {"ChecksumCRC32C": sums}
        else:
            md5 = hashlib.md5(body, usedforsecurity=False).digest()
            check = {"ContentMD5": base64.b64encode(md5).decode()}
        answer = self._store.call(
            "upload_part",
            self._key,
            deadline=self._deadline,
            UploadId=self._upload_id,
            PartNumber=number,
            Body=body,
            **check,
        )
        return {**part, "ETag": answer["ETag"]}

    def _buffer(self) -> bytearray:
        """This thread's own: fresh memory for each part would cost as much as reading it."""
        kept: bytearray | None = getattr(self._store.per_thread, "buffer", None)
        if kept is None or len(kept) != self._part_bytes:
            kept = self._store.per_thread.buffer = bytearray(self._part_bytes)
        return kept

    def _complete(self, parts: list[dict[str, Any]]) -> None:
        """An answer may be lost after the store has done it: the upload is then unknown, or the
        object exists, and what is there is compared with what was sent."""
        try:
            self._store.call(
                "complete_multipart_upload",
                self._key,
                deadline=self._deadline,
                final=(s3_answers.CONFLICT,),
                UploadId=self._upload_id,
                MultipartUpload={"Parts": parts},
                IfNoneMatch="*",
            )
        except StoreError as error:
            maybe_done = (s3_answers.EXISTS, s3_answers.NOT_THERE, s3_answers.CONFLICT)
            if error.status not in maybe_done or not self._store.holds(self._key, self._contents):
                raise
