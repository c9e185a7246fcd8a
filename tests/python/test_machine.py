"""Facts about other machines, from their /proc and /sys."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from tradewind import machine


def fake(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture(autouse=True)
def sixteen_cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "real" not in request.node.name:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)


def test_the_real_machine() -> None:
    assert 1 <= machine.usable_cores() <= psutil.cpu_count()
    assert 0 < machine.memory_bytes() <= psutil.virtual_memory().total
    assert machine.cpu_model()
    assert machine.filesystem_type(Path("/proc/self")) == "proc"


def test_cpu_of_x86_and_aarch64(tmp_path: Path) -> None:
    x86 = fake(
        tmp_path / "x86",
        {"proc/cpuinfo": "processor : 0\nmodel name\t: EPYC 9\nflags\t\t: fpu avx2 avx512f\n"},
    )
    assert machine.cpu_model(x86) == "EPYC 9"
    assert machine.cpu_flags(x86) == {"fpu", "avx2", "avx512f"}
    arm = fake(tmp_path / "arm", {"proc/cpuinfo": "processor : 0\nFeatures\t: fp asimd sve\n"})
    assert "asimd" in machine.cpu_flags(arm) and machine.cpu_model(arm)
    assert machine.cpu_flags(tmp_path / "nothing") == frozenset()


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 16),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 3),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 16),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "1000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "9900000 100000\n"}, 16),
        (
            {
                "proc/self/cgroup": "0::/jobs/mine\n",
                "sys/fs/cgroup/jobs/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/jobs/mine/cpu.max": "max 100000\n",
            },
            4,
        ),
        (
            {  # version 1, in a container: the path of /proc is the host's
                "proc/self/cgroup": "4:cpu,cpuacct:/docker/abc\n2:memory:/docker/abc\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            16,
        ),
    ],
)
def test_cores_within_a_quota(tmp_path: Path, files: dict[str, str], cores: int) -> None:
    assert machine.usable_cores(fake(tmp_path, files)) == cores


@pytest.mark.parametrize(
    ("files", "size"),
    [
        ({}, 64 << 20),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": f"{1 << 20}\n"}, 1 << 20),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "max\n"}, 64 << 20),
        (
            {
                "proc/self/cgroup": "2:memory:/x\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            64 << 20,
        ),
        (
            {
                "proc/self/cgroup": "2:memory:/x\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "4096\n",
            },
            4096,
        ),
    ],
)
def test_memory_within_a_limit(tmp_path: Path, files: dict[str, str], size: int) -> None:
    root = fake(tmp_path, {"proc/meminfo": "MemTotal:       65536 kB\nMemFree: 1 kB\n", **files})
    assert machine.memory_bytes(root) == size


def test_filesystems_by_the_nearest_mount(tmp_path: Path) -> None:
    mounts = (
        "/dev/sda / ext4 rw 0 0\n"
        "server:/x /data nfs4 rw 0 0\n"
        "/dev/sdb /data/fast xfs rw 0 0\n"
        "tmpfs /with\\040space tmpfs rw 0 0\n"
        "/dev/sdc /twice ext4 rw 0 0\n"
        "s3 /twice fuse.s3fs rw 0 0\n"
    )
    root = fake(tmp_path, {"proc/self/mounts": mounts})
    for path, kind in {
        "/home/a": "ext4",
        "/data": "nfs4",
        "/data/runs/a": "nfs4",
        "/database": "ext4",
        "/data/fast/a": "xfs",
        "/with space/a": "tmpfs",
        "/twice/a": "fuse.s3fs",
    }.items():
        assert machine.filesystem_type(Path(path), root) == kind, path


@pytest.mark.parametrize(
    "kind",
    "nfs nfs4 cifs smb3 fuse.sshfs fuse.gcsfuse lustre ceph 9p beegfs gpfs".split(),
)
def test_network_filesystems(kind: str) -> None:
    assert machine.is_network_filesystem(kind)


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "apfs", ""])
def test_local_filesystems(kind: str) -> None:
    assert not machine.is_network_filesystem(kind)
