"""CRC32C of joined pieces, against a bitwise loop and the native module."""

from __future__ import annotations

import os
import random
import struct

import pytest

from tradewind._core import native
from tradewind.checkpoint.stores import crc32c
from tradewind.checkpoint.stores.s3_upload import part_size


def bitwise(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_two_pieces_joined() -> None:
    # RFC 3720, B.4: 32 bytes of zeros, of ones, ascending.
    assert bitwise(bytes(32)) == 0x8A9136AA
    for data in (bytes(32), b"\xff" * 32, bytes(range(32)), os.urandom(301), b"", b"x"):
        for cut in {0, 1, len(data) // 2, len(data)} & set(range(len(data) + 1)):
            first, second = data[:cut], data[cut:]
            joined = crc32c.combine(bitwise(first), bitwise(second), len(second))
            assert joined == bitwise(data), (data, cut)


@pytest.mark.parametrize("block", [7, 64, 4096])
def test_parts_of_a_file_from_the_sums_of_its_blocks(block: int) -> None:
    data = random.Random(0).randbytes(10 * block + block // 3)
    sums = [native.crc32c(data[i : i + block]) for i in range(0, len(data), block)]
    blocks = struct.pack(f"<{len(sums)}I", *sums)
    assert crc32c.joined(blocks, block, len(data)) == native.crc32c(data)
    for part in (block, 3 * block, 11 * block):
        for offset in range(0, len(data), part):
            size = min(part, len(data) - offset)
            expected = native.crc32c(data[offset : offset + size])
            assert crc32c.part_sum(blocks, block, offset, size) == expected


def test_header_is_base64_of_the_big_endian_sum() -> None:
    assert crc32c.header(0x8A9136AA) == "ipE2qg=="


def test_parts_are_whole_blocks_and_at_most_ten_thousand() -> None:
    mib = 1 << 20
    assert part_size(100 * mib, 4 * mib, 16 * mib) == 16 * mib
    assert part_size(100 * mib, 3 * mib, 16 * mib) == 18 * mib
    for size in (160_000 * mib, 160_000 * mib + 1, 5 << 40):
        part = part_size(size, 4 * mib, 16 * mib)
        assert part % (4 * mib) == 0
        assert -(-size // part) <= 10_000
        assert part - 4 * mib < max(16 * mib, -(-size // 10_000))
