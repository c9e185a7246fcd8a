"""The disk's own limit: direct writes and reads of one buffer in huge pages by several threads,
into a new file and over an existing one. Called by checkpoint.py: FOLDER GIGABYTES REPEATS."""

from __future__ import annotations

import json
import mmap
import os
import sys
import threading
import time
from pathlib import Path

BLOCK = 16 << 20
THREADS = (4, 16)
_MADV_HUGEPAGE = 14


def buffer_of(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(_MADV_HUGEPAGE)
    page = os.urandom(4096) * (BLOCK // 4096)
    for begin in range(0, size, BLOCK):
        memory[begin : begin + BLOCK] = page
    return memory


def move(path: Path, memory: mmap.mmap, num_threads: int, *, reads: bool) -> float:
    """Seconds for the whole buffer, the sync included."""
    size = len(memory)
    flags = (os.O_RDONLY if reads else os.O_RDWR | os.O_CREAT) | os.O_DIRECT
    began = time.perf_counter()
    file = os.open(path, flags, 0o644)
    if not reads and os.fstat(file).st_size != size:
        os.posix_fallocate(file, 0, size)
    view = memoryview(memory)

    def work(first: int) -> None:
        for begin in range(first * BLOCK, size, num_threads * BLOCK):
            block = view[begin : begin + BLOCK]
            done = os.preadv(file, [block], begin) if reads else os.pwritev(file, [block], begin)
            assert done == len(block)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not reads:
        os.fsync(file)
    os.close(file)
    return time.perf_counter() - began


def main() -> None:
    folder, gigabytes, repeats = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    memory = buffer_of(int(gigabytes * 1e9) // BLOCK * BLOCK)
    scale = gigabytes * 1e9 / len(memory)
    found: dict[str, list[float]] = {"write_fresh_s": [], "write_reused_s": [], "read_s": []}
    for _ in range(repeats):
        times: dict[str, list[float]] = {key: [] for key in found}
        for num_threads in THREADS:
            path = folder / "limit"
            path.unlink(missing_ok=True)
            times["write_fresh_s"].append(move(path, memory, num_threads, reads=False))
            times["write_reused_s"].append(move(path, memory, num_threads, reads=False))
            times["read_s"].append(move(path, memory, num_threads, reads=True))
        for key, seconds in times.items():
            found[key].append(min(seconds) * scale)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
