"""CRC-32C of joined pieces, in Python alone: from the sums of a shard's blocks, which its manifest
has, to the sums of the parts that are uploaded. No byte is read again, and the native module (and
torch with it) is not loaded.

For messages A and B: crc(AB) = crc(A) * x^(8 |B|) + crc(B), over polynomials modulo Castagnoli's;
see M. Adler, zlib `crc32_combine`, and RFC 3720, appendix B.4, for the bit order.
"""

from __future__ import annotations

import base64
from functools import lru_cache

_POLYNOMIAL = 0x82F63B78  # Castagnoli's 0x1EDC6F41, lowest power in the highest bit
_ONE = 1 << 31
_SUM_BYTES = 4


def combine(first: int, second: int, second_bytes: int) -> int:
    """The sum of two pieces joined, from theirs and the length of the second."""
    return _multiply(_power(second_bytes), first) ^ second


def joined(sums: bytes, block_bytes: int, size_bytes: int) -> int:
    """The sum of `size_bytes` bytes, from `sums`: u32, little-endian, one per `block_bytes` of
    them, the last block shorter where they do not come out even."""
    total, left_bytes = 0, size_bytes
    for begin in range(0, len(sums), _SUM_BYTES):
        block = min(block_bytes, left_bytes)
        total = combine(total, int.from_bytes(sums[begin : begin + _SUM_BYTES], "little"), block)
        left_bytes -= block
    return total


def part_sum(block_sums: bytes, block_bytes: int, offset_bytes: int, size_bytes: int) -> int:
    """The sum of a part that begins where a block does, from the sums of all of the file's."""
    first = offset_bytes // block_bytes
    last = -(-(offset_bytes + size_bytes) // block_bytes)
    return joined(block_sums[first * _SUM_BYTES : last * _SUM_BYTES], block_bytes, size_bytes)


def header(value: int) -> str:
    """As object stores carry it: base64 of the four bytes, the highest first."""
    return base64.b64encode(value.to_bytes(_SUM_BYTES, "big")).decode()


def _multiply(a: int, b: int) -> int:
    product, bit = 0, _ONE
    while True:
        if a & bit:
            product ^= b
            if not a & (bit - 1):
                return product
        bit >>= 1
        if not bit:
            return product
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)


@lru_cache(maxsize=64)
def _power(num_bytes: int) -> int:
    """x to the power of 8 `num_bytes`."""
    result, square, left = _ONE, _ONE >> 8, num_bytes
    while left:
        if left & 1:
            result = _multiply(square, result)
        square = _multiply(square, square)
        left >>= 1
    return result
