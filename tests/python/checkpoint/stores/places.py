"""Where the tests of this folder put objects, and how long they wait for them."""

from __future__ import annotations

import itertools
from datetime import timedelta

from tradewind.checkpoint.stores.patience import Patience

# Short pauses, but no short limits: a busy machine must not look like a fault.
QUICK = Patience(
    request=timedelta(seconds=120),
    silence=timedelta(seconds=60),
    num_tries=6,
    first_pause=timedelta(milliseconds=1),
    longest_pause=timedelta(milliseconds=2),
)
MIN_PART_BYTES = 256 << 10  # of a part but the last; 5 MiB in S3, and told to moto
NUMBERS = itertools.count()


def make_bucket() -> str:
    """An empty one, in the S3 that the environment names."""
    import boto3

    name = f"bucket-{next(NUMBERS)}"
    client = boto3.client("s3")
    client.create_bucket(Bucket=name)
    client.close()
    return name
