"""Facts about the machine: processor, cores, memory, file systems. Standard library only.

Readers take the root of the file system as an argument, so that tests can give them another
machine's /proc and /sys.
"""

from __future__ import annotations

import math
import os
import platform
import re
from pathlib import Path

_ROOT = Path("/")
_NETWORK_FILESYSTEMS = frozenset(
    "9p afp afs beegfs ceph cifs coda davfs davfs2 fuse gfs gfs2 glusterfs gpfs lustre mmfs ncpfs "
    "nfs nfs4 ocfs2 orangefs pvfs2 smb2 smb3 smbfs vboxsf virtiofs wekafs".split()
)


def cpu_model(root: Path = _ROOT) -> str:
    """The processor's name, or its architecture where the kernel gives no name (aarch64)."""
    match = re.search(r"^model name\s*:\s*(.+)$", _text(root / "proc/cpuinfo"), re.MULTILINE)
    return match.group(1).strip() if match else platform.machine()


def cpu_flags(root: Path = _ROOT) -> frozenset[str]:
    """The kernel's feature names of the first processor (x86 "flags", aarch64 "Features")."""
    match = re.search(
        r"^(?:flags|Features)\s*:\s*(.+)$", _text(root / "proc/cpuinfo"), re.MULTILINE
    )
    return frozenset(match.group(1).split()) if match else frozenset()


def usable_cores(root: Path = _ROOT) -> int:
    """Cores this process may keep busy: its affinity, cut by its cgroup's quota; at least 1."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    quota = _cgroup_cpu_quota(root)
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def memory_bytes(root: Path = _ROOT) -> int:
    """Memory this process may use: the machine's, cut by its cgroup's limit; 0 if unknown."""
    match = re.search(r"^MemTotal:\s*(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    total = int(match.group(1)) * 1024 if match else _sysconf_memory_bytes()
    limits = [
        int(text)
        for folder in _cgroup_folders(root, "memory")
        for name in ("memory.max", "memory.limit_in_bytes")
        if (text := _text(folder / name).strip()).isdigit()
    ]
    return min([total, *limits]) if total else min(limits, default=0)


def filesystem_type(path: Path, root: Path = _ROOT) -> str:
    """The type of the file system that holds `path` ("ext4", "nfs4", …), "" where unknown."""
    resolved = path.resolve()
    best, found = -1, ""
    for mount_point, kind in _mounts(root):
        if resolved.is_relative_to(mount_point) and len(str(mount_point)) >= best:
            best, found = len(str(mount_point)), kind
    return found


def is_network_filesystem(kind: str) -> bool:
    """Whether files of this kind may be written by other machines, or locks there may lie."""
    lowered = kind.lower()
    return lowered in _NETWORK_FILESYSTEMS or lowered.startswith("fuse.")


def _mounts(root: Path) -> list[tuple[Path, str]]:
    """Mount points in mount order (a later mount hides an earlier one at the same point)."""
    text = _text(root / "proc/self/mounts")
    if text:
        rows = [line.split(" ") for line in text.splitlines()]
        return [(Path(_unescape(row[1])), row[2]) for row in rows if len(row) > 2]
    import psutil  # type: ignore[import-untyped,unused-ignore]

    return [(Path(part.mountpoint), part.fstype) for part in psutil.disk_partitions(all=True)]


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), field)


def _cgroup_cpu_quota(root: Path) -> float | None:
    quotas = []
    for folder in _cgroup_folders(root, "cpu"):
        words = _text(folder / "cpu.max").split()
        if not words:
            words = [
                _text(folder / "cpu.cfs_quota_us").strip(),
                _text(folder / "cpu.cfs_period_us").strip(),
            ]
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """This process's cgroup and its parents, in which any limit binds (v2, and v1 by controller).

    Inside a container the path of /proc/self/cgroup may not exist below its own mount, whose top
    then is the container's cgroup: the top is always looked at."""
    folders: list[Path] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        folder = top / path.lstrip("/")
        folders += [each for each in (folder, *folder.parents) if each.is_relative_to(top)]
    return folders


def _sysconf_memory_bytes() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
