"""S3, and stores that speak its protocol, by boto3.

Retries are ours, botocore makes none: what a lost answer means differs from operation to operation.
A conditional PUT (If-None-Match: *) that was answered by "exists" may have been our own first try,
so the object is read back and compared before anybody else is blamed.
"""

from __future__ import annotations

import base64
import importlib
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tradewind.checkpoint.stores import crc32c, s3_answers
from tradewind.checkpoint.stores.patience import Deadline, Patience, StoreError
from tradewind.checkpoint.stores.s3_upload import MultipartUpload, read_source
from tradewind.checkpoint.stores.store import Contents, Entry, Store

SUM_METADATA = "tradewind-crc32c"  # of an uploaded file, for whoever looks at the object alone

_CONNECT_TIMEOUT_S = 5.0
_MAX_DELETED = 1000  # in one request, by the protocol
_MAX_LOST_CREATES = 3


class S3Store(Store):
    """`s3://BUCKET/PREFIX`; endpoint, region and credentials as boto3 finds them.

    Raises ImportError without boto3, StoreError where its configuration cannot be read.
    """

    is_exclusive = True

    def __init__(
        self,
        url: str,
        patience: Patience,
        part_bytes: int,
        num_threads: int,
        options: dict[str, Any],
    ) -> None:
        self.url = url.rstrip("/")
        self.patience = patience
        self.part_bytes = part_bytes
        self.bucket, _, prefix = self.url.removeprefix("s3://").partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        # Until a store refuses them; its parts are then sent with MD5 sums.
        self.takes_crc32c = True
        try:
            self._client = _client(patience, num_threads, options)
        except (ImportError, TypeError):
            raise
        except Exception as error:
            raise s3_answers.translated(f"{self.url}: open", error) from error
        self.per_thread = threading.local()  # a buffer of each thread of the pool
        self.pool = ThreadPoolExecutor(num_threads, "tradewind-s3")

    def call(
        self,
        operation: str,
        key: str | None = None,
        *,
        deadline: Deadline | None = None,
        final: tuple[int, ...] = (),
        take: Callable[[dict[str, Any]], Any] | None = None,
        **parameters: Any,
    ) -> Any:
        """What `operation` of boto3's client answers, or what `take` makes of it, retried within
        the deadline. Statuses in `final` are not retried. Raises StoreError."""
        subject = self.url if key is None else f"{self.url}/{key}"
        if key is not None:
            parameters["Key"] = self._prefix + key

        def once() -> Any:
            try:
                answer = getattr(self._client, operation)(Bucket=self.bucket, **parameters)
                return answer if take is None else take(answer)
            except StoreError:
                raise
            except Exception as error:
                found = s3_answers.translated(f"{subject}: {operation}", error)
                if found.status in final:
                    found.transient = False
                raise found from error

        return self.patience.retried(once, deadline or Deadline(self.patience.request))

    # --- small objects --------------------------------------------------------------------------

    def entries(self, prefix: str = "") -> list[Entry]:
        return list(self._listed(prefix))

    def _listed(self, prefix: str) -> Iterator[Entry]:
        deadline, token = Deadline(self.patience.request), None
        while True:
            more: dict[str, Any] = {"ContinuationToken": token} if token else {}
            page = self.call(
                "list_objects_v2", deadline=deadline, Prefix=self._prefix + prefix, **more
            )
            for each in page.get("Contents", ()):
                yield Entry(each["Key"].removeprefix(self._prefix), each["Size"])
            token = page.get("NextContinuationToken")
            if not page.get("IsTruncated") or not token:
                return

    def read(self, key: str, max_bytes: int) -> bytes | None:
        def take(answer: dict[str, Any]) -> bytes:
            if answer["ContentLength"] > max_bytes:
                raise StoreError(
                    f"{self.url}/{key}: expected at most {max_bytes} bytes, got "
                    f"{answer['ContentLength']}; it is none of ours"
                )
            return bytes(answer["Body"].read())

        try:
            data: bytes = self.call("get_object", key, take=take)
        except StoreError as error:
            if _is_missing(error):
                return None
            raise
        return data

    def read_range(
        self, key: str, offset_bytes: int, size_bytes: int, deadline: Deadline
    ) -> tuple[bytes, int] | None:
        def take(answer: dict[str, Any]) -> tuple[bytes, int]:
            total = int(answer["ContentRange"].rpartition("/")[2])
            return answer["Body"].read(), total

        last = offset_bytes + size_bytes - 1
        try:
            found: tuple[bytes, int] = self.call(
                "get_object",
                key,
                deadline=deadline,
                take=take,
                Range=f"bytes={offset_bytes}-{last}",
            )
        except StoreError as error:
            if _is_missing(error):
                return None
            if error.status == s3_answers.NOT_SATISFIABLE:
                return b"", self.call("head_object", key)["ContentLength"]
            raise
        return found

    def create(self, key: str, data: bytes) -> bool:
        for _ in range(_MAX_LOST_CREATES):
            try:
                self._put(key, data, IfNoneMatch="*")
                return True
            except StoreError as error:
                if error.status != s3_answers.EXISTS:
                    raise
            found = self._read_same(key, len(data))
            if found is not None:
                return found == data
        raise StoreError(
            f"{self.url}/{key}: it exists when written and is gone when read; does somebody delete "
            "below this URL?"
        )

    def _read_same(self, key: str, size_bytes: int) -> bytes | None:
        """The object; of one that is larger only its begin and a byte more."""
        deadline = Deadline(self.patience.request)
        found = self.read_range(key, 0, size_bytes + 1, deadline)
        return None if found is None else found[0]

    def replace(self, key: str, data: bytes) -> None:
        self._put(key, data)

    def _put(self, key: str, data: bytes, **conditions: Any) -> None:
        crc = zlib.crc32(data).to_bytes(4, "big")
        self.call(
            "put_object",
            key,
            Body=data,
            ChecksumCRC32=base64.b64encode(crc).decode(),
            **conditions,
        )

    def delete(self, keys: Iterable[str]) -> None:
        objects = [{"Key": self._prefix + key} for key in keys]
        for begin in range(0, len(objects), _MAX_DELETED):
            batch = {"Objects": objects[begin : begin + _MAX_DELETED], "Quiet": True}
            self.call("delete_objects", take=self._check_deleted, Delete=batch)

    def _check_deleted(self, answer: dict[str, Any]) -> None:
        for error in answer.get("Errors", ()):
            code = error.get("Code", "")
            raise StoreError(
                f"{self.url}: delete of {error.get('Key')}: {code}: {error.get('Message', '')}",
                transient=code in s3_answers.TRANSIENT_CODES,
                code=code,
            )

    # --- files ----------------------------------------------------------------------------------

    def upload_file(
        self, key: str, source: int, contents: Contents, deadline: Deadline, *, again: bool = False
    ) -> None:
        if again and self.holds(key, contents):
            return
        if contents.size_bytes > self.part_bytes:
            MultipartUpload(self, key, source, contents, deadline).run()
            return
        where = f"{self.url}/{key}"
        body = read_source(source, 0, contents.size_bytes, where)
        try:
            self.call(
                "put_object",
                key,
                deadline=deadline,
                Body=body,
                IfNoneMatch="*",
                ChecksumCRC32C=crc32c.header(contents.crc32c),
                Metadata=metadata(contents),
            )
        except StoreError as error:
            if error.status != s3_answers.EXISTS or not self.holds(key, contents):
                raise

    def holds(self, key: str, contents: Contents) -> bool:
        """Whether the object is the file: its size, and the sum that was given when it was made
        (what arrived was checked against the sums of its parts)."""
        try:
            found = self.call("head_object", key)
        except StoreError as error:
            if error.status == s3_answers.NOT_THERE:
                return False
            raise
        given = found.get("Metadata", {}).get(SUM_METADATA)
        return bool(found["ContentLength"] == contents.size_bytes and given == _hex(contents))

    def clear_unfinished(self, keep_prefix: str) -> None:
        deadline = Deadline(self.patience.request)
        markers: dict[str, Any] = {}
        while True:
            page = self.call(
                "list_multipart_uploads", deadline=deadline, Prefix=self._prefix, **markers
            )
            for each in page.get("Uploads", ()):
                key = each["Key"].removeprefix(self._prefix)
                if not key.startswith(keep_prefix):
                    self.abort(key, each["UploadId"])
            if not page.get("IsTruncated"):
                return
            markers = {
                "KeyMarker": page["NextKeyMarker"],
                "UploadIdMarker": page["NextUploadIdMarker"],
            }

    def abort(self, key: str, upload_id: str) -> None:
        """Drop the parts of a multipart upload; one that is gone counts as dropped."""
        try:
            self.call(
                "abort_multipart_upload",
                key,
                deadline=Deadline(self.patience.silence),
                UploadId=upload_id,
            )
        except StoreError as error:
            if error.status != s3_answers.NOT_THERE:
                raise

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        self._client.close()


def metadata(contents: Contents) -> dict[str, str]:
    return {SUM_METADATA: _hex(contents)}


def _hex(contents: Contents) -> str:
    return f"{contents.crc32c:08x}"


def _is_missing(error: StoreError) -> bool:
    return error.status == s3_answers.NOT_THERE and error.code in ("NoSuchKey", "404")


def _client(patience: Patience, num_threads: int, options: dict[str, Any]) -> Any:
    try:
        boto3 = importlib.import_module("boto3")
        config = importlib.import_module("botocore.config").Config
    except ImportError as error:
        raise ImportError(
            "checkpoint: a URL of s3:// needs boto3; install it by: pip install 'tradewind[aws]'"
        ) from error
    session = boto3.session.Session()  # its second client costs little
    silence_s = min(patience.silence, patience.request).total_seconds()

    def make(**s3: Any) -> Any:
        settings = config(
            connect_timeout=min(_CONNECT_TIMEOUT_S, silence_s),
            read_timeout=silence_s,
            retries={"total_max_attempts": 1, "mode": "standard"},
            max_pool_connections=num_threads + 4,
            request_checksum_calculation="when_required",  # the sums are those we have
            s3=s3,
        )
        return session.client("s3", config=settings, **options)

    # Within TLS the CRC, which is a signed header, is enough; a SHA-256 besides would only cost.
    client = make(payload_signing_enabled=False)
    return make() if client.meta.endpoint_url.startswith("http:") else client
