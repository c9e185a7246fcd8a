"""Checkpoints to S3, against boto3's transfer of the same bytes: a server (moto) on this machine.

python benchmarks/checkpoint_s3.py [--json] [--megabytes 256] [--repeats 7]

All begin with a committed checkpoint on disk (in the page cache) and a process that is up.
`tradewind` is all until the commit: the shard with its CRC32C, three looks at claims, the manifest
by conditional PUT. `boto3` is `upload_file` of the shard, as boto3 does by itself (8 MiB
parts, CRC32, ten threads). `limit` sends the shard from memory in our parts, without a sum or a
signature of the bytes: what the server, which shares the cores, leaves to gain.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import torch
from botocore.config import Config

import tradewind as tw
from measuring import figure_row, interleave, machine, ratios, show, timing
from tradewind.checkpoint import manifest as manifests
from tradewind.checkpoint.claims import Acceptance
from tradewind.checkpoint.local_directory import LocalDirectory
from tradewind.checkpoint.names import CommitName
from tradewind.checkpoint.stores.remote_directory import RemoteDirectory
from tradewind.checkpoint.stores.store import PART_BYTES, open_store
from tradewind.checkpoint.stores.uploader import Uploader

BUCKET = "checkpoints"
MAX_UPLOAD_S = 600.0
# The server keeps freed memory: else fresh pages of its copies are half of what is measured.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1", "MALLOC_ARENA_MAX": "1"}


@contextmanager
def local_s3() -> Iterator[str]:
    """moto in a process of its own; its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    quiet = subprocess.DEVNULL
    server = subprocess.Popen(
        command, env={**os.environ, **KEEP_MEMORY}, stdout=quiet, stderr=quiet
    )
    try:
        until = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if time.monotonic() > until or server.poll() is not None:
                    raise SystemExit("moto did not start; pip install 'moto[s3,server]'") from None
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


def committed(folder: Path, num_bytes: int) -> tuple[LocalDirectory, CommitName]:
    """A checkpoint on disk, in the page cache."""
    with tw.Checkpointer(folder) as checkpointer:
        weights = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
        checkpointer.save({"weights": weights}, step=1).wait(MAX_UPLOAD_S)
    directory = LocalDirectory(folder)
    (name,) = directory.committed()
    for shard in Path(directory.path_of(name)).iterdir():
        shard.read_bytes()
    return directory, name


class Contest:
    """The candidates: each uploads the checkpoint under names of its own."""

    def __init__(self, url: str, directory: LocalDirectory, name: CommitName) -> None:
        self.client = boto3.client("s3")
        self.client.create_bucket(Bucket=BUCKET)
        unsigned = Config(
            request_checksum_calculation="when_required",
            max_pool_connections=16,
            s3={"payload_signing_enabled": False},
        )
        self.limit_client = boto3.client("s3", config=unsigned)
        self.manifest = directory.read_manifest(name)
        self.folder = directory.path_of(name)
        self.name = name
        self.files = manifests.decode(self.manifest, self.folder).files
        self.num_bytes = sum(file.size_bytes for file in self.files)
        self.shards = [os.path.join(self.folder, file.name) for file in self.files]
        self.data = [Path(shard).read_bytes() for shard in self.shards]
        self.remote = RemoteDirectory(open_store(f"s3://{BUCKET}/tradewind"))
        attempt = self.remote.claim(also=[name])
        self.uploader = Uploader(self.remote.where, keep=3)
        self.uploader.own(attempt, Acceptance(attempt, frozenset([name.folder])))

    def tradewind(self) -> None:
        upload = self.uploader.submit(self.name, self.folder, self.files, self.manifest)
        upload.wait(MAX_UPLOAD_S)

    def settle(self) -> None:
        """Retention, which nobody waits for, is not the next candidate's to bear."""
        self.uploader.wait(MAX_UPLOAD_S)
        self.clear()

    def boto3(self) -> None:
        for shard in self.shards:
            self.client.upload_file(shard, BUCKET, f"boto3/{os.path.basename(shard)}")

    def limit(self) -> None:
        for number, data in enumerate(self.data):
            self._send_from_memory(f"limit/{number}", memoryview(data))

    def _send_from_memory(self, key: str, data: memoryview) -> None:
        where = {"Bucket": BUCKET, "Key": key}
        where["UploadId"] = self.limit_client.create_multipart_upload(**where)["UploadId"]

        def send(number: int) -> dict[str, Any]:
            begin = (number - 1) * PART_BYTES
            body = bytes(data[begin : begin + PART_BYTES])
            answer = self.limit_client.upload_part(**where, PartNumber=number, Body=body)
            return {"PartNumber": number, "ETag": answer["ETag"]}

        with ThreadPoolExecutor(8) as pool:
            parts = list(pool.map(send, range(1, -(-len(data) // PART_BYTES) + 1)))
        self.limit_client.complete_multipart_upload(**where, MultipartUpload={"Parts": parts})

    def clear(self) -> None:
        """All but claims goes, so that nobody overwrites, which costs moto time."""
        found = self.client.list_objects_v2(Bucket=BUCKET).get("Contents", ())
        for each in found:
            if "/attempts/" not in each["Key"]:
                self.client.delete_object(Bucket=BUCKET, Key=each["Key"])

    def check(self) -> None:
        """Whether what arrived is the checkpoint."""
        self.tradewind()
        assert self.remote.committed() == [self.name]
        for file, data in zip(self.files, self.data, strict=True):
            key = f"tradewind/{self.name.folder}/{file.name}"
            assert self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read() == data
        self.clear()

    def close(self) -> None:
        self.uploader.close()
        self.remote.close()


def measure(num_bytes: int, repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, local_s3() as url:
        os.environ |= {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "benchmark",
            "AWS_SECRET_ACCESS_KEY": "benchmark",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        contest = Contest(url, *committed(Path(folder), num_bytes))
        try:
            contest.check()
            candidates = {
                "tradewind": contest.tradewind,
                "boto3": contest.boto3,
                "limit": contest.limit,
            }
            after = dict.fromkeys(candidates, contest.settle)
            seconds = interleave(candidates, repeats, after=after)
        finally:
            contest.close()
    return {
        "uploaded_bytes": contest.num_bytes,
        **{name: timing(values, contest.num_bytes) for name, values in seconds.items()},
        # Of rates: above 1, the upload is faster than boto3's.
        "ratio_to_boto3": ratios(seconds["boto3"], seconds["tradewind"]),
        "ratio_to_limit": ratios(seconds["limit"], seconds["tradewind"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    figures = measure(options.megabytes << 20, options.repeats)
    rows = [[f"upload of {options.megabytes} MiB", "median (min to max)"]]
    for name in ("tradewind", "boto3", "limit"):
        rows += [figure_row(f"{name} {key}", [figures[name][key]]) for key in TOLD]
    rows += [figure_row(key, [figures[key]]) for key in ("ratio_to_boto3", "ratio_to_limit")]
    show({"machine": machine(), **figures}, rows, as_json=options.json)


TOLD = ("time_s", "rate_GBps")

if __name__ == "__main__":
    main()
