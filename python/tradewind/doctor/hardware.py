"""Findings about processor, vector instructions, memory, GPUs, huge pages and shared memory."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tradewind import machine
from tradewind.doctor.findings import Finding
from tradewind.doctor.torch_probe import TorchAnswers

_SMI_DEADLINE_S = 15.0
_GIB = 1 << 30
_SMALL_SHM_BYTES = 1 << 30
_ROOT = Path("/")
# As the native module chooses its kernels (csrc/base/isa.cpp), best last.
_AVX2 = frozenset(("avx2", "fma", "f16c"))
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}


def processor_finding(root: Path = _ROOT) -> Finding:
    """The processor and how many of its cores this process may use."""
    usable, present = machine.usable_cores(root), os.cpu_count() or 1
    facts = {"model": machine.cpu_model(root), "usable_cores": usable, "cores": present}
    found = f"{facts['model']}, {usable} of {present} cores usable"
    if usable >= present:
        return Finding("processor", "ok", found, facts=facts)
    return Finding(
        "processor",
        "ok",
        f"{found} (affinity or cgroup quota)",
        "more threads than usable cores take turns and slow each other",
        f"keep OMP_NUM_THREADS and loader workers within {usable}, or raise the limit",
        facts,
    )


def isa_finding(root: Path = _ROOT, environ: Mapping[str, str] = os.environ) -> Finding:
    """Which of the compiled kernels run here, and whether TRADEWIND_ISA overrides that."""
    flags = machine.cpu_flags(root)
    isas = ["baseline"]
    isas += ["avx2"] if flags >= _AVX2 else []
    isas += ["avx512"] if flags >= _AVX512 else []
    has_neon = "asimd" in flags or platform.machine() in ("aarch64", "arm64")
    shown = f"{isas[-1]}{' (NEON)' if has_neon else ''}"
    wanted = environ.get("TRADEWIND_ISA", "")
    facts = {"isas": isas, "best": isas[-1], "override": wanted or None, "neon": has_neon}
    if wanted and wanted not in isas:
        return Finding(
            "vector instructions",
            "warning",
            f"{shown}; TRADEWIND_ISA={wanted}",
            "the native module refuses to run with it",
            f"unset TRADEWIND_ISA, or set one of {', '.join(isas)}",
            facts,
        )
    if wanted and wanted != isas[-1]:
        return Finding(
            "vector instructions",
            "warning",
            f"{wanted} by TRADEWIND_ISA, though {shown} is there",
            "sweeps that fit in cache are slower",
            "unset TRADEWIND_ISA",
            facts,
        )
    if isas[-1] == "baseline" and not has_neon:
        return Finding(
            "vector instructions",
            "warning",
            "baseline only",
            "sweeps are slower than on a processor with AVX2",
            "rent a machine from after 2015, or let the virtual machine pass the host's flags on",
            facts,
        )
    return Finding("vector instructions", "ok", shown, facts=facts)


def memory_finding(root: Path = _ROOT) -> Finding:
    """Memory this process may use."""
    size = machine.memory_bytes(root)
    return Finding("memory", "ok", f"{size / _GIB:.1f} GiB", facts={"memory_bytes": size})


def gpu_finding(answers: TorchAnswers) -> Finding:
    """GPUs by torch, and by the driver where torch sees none."""
    devices: list[dict[str, Any]] = list(answers.facts.get("cuda", {}).get("devices", []))
    if devices:
        names = [f"{each['name']}, {each['memory_bytes'] / _GIB:.0f} GiB" for each in devices]
        return Finding("GPU", "ok", "; ".join(names), facts={"devices": devices})
    by_driver = _gpus_by_driver()
    trouble = answers.trouble("cuda")
    if by_driver:
        return Finding(
            "GPU",
            "warning",
            f"{'; '.join(by_driver)} by nvidia-smi, but torch cannot use it"
            + (f" ({trouble})" if trouble else ""),
            "the GPU is paid for and trains nothing",
            "install a torch built for CUDA that this driver supports; check CUDA_VISIBLE_DEVICES",
            {"devices": [], "by_driver": by_driver},
        )
    return Finding(
        "GPU",
        "missing",
        "none found",
        "training runs on the processor: right for small models and tests, slow for large ones",
        "on a machine with a GPU: check the driver with nvidia-smi",
        {"devices": []},
    )


def huge_pages_finding(root: Path = _ROOT) -> Finding:
    """Whether the kernel gives arenas pages of 2 MiB."""
    title = "transparent huge pages"
    try:
        text = (root / "sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        text = ""
    mode = text.partition("[")[2].partition("]")[0]
    if mode in ("always", "madvise"):
        return Finding(title, "ok", mode, facts={"mode": mode})
    return Finding(
        title,
        "warning",
        mode or "not offered by this kernel",
        "arenas lie in 4 KiB pages: sweeps and checkpoints take more processor time",
        "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled" if mode else None,
        {"mode": mode or None},
    )


def shared_memory_finding(path: Path = Path("/dev/shm")) -> Finding:
    """The size of /dev/shm, through which the DataLoader's workers hand over batches."""
    title = "shared memory"
    try:
        status = os.statvfs(path)
    except OSError:
        return Finding(
            title,
            "missing",
            f"no {path}",
            "DataLoader workers cannot hand over batches",
            "mount a tmpfs there, or use num_workers=0",
            {"total_bytes": 0, "free_bytes": 0},
        )
    total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    facts = {"total_bytes": total, "free_bytes": free}
    found = f"{path}: {total / _GIB:.2f} GiB, {free / _GIB:.2f} GiB free"
    if free >= _SMALL_SHM_BYTES:
        return Finding(title, "ok", found, facts=facts)
    return Finding(
        title,
        "warning",
        found,
        "DataLoader workers die with a bus error once their batches do not fit",
        "start the container with --ipc=host or --shm-size=8g, or use num_workers=0",
        facts,
    )


def _gpus_by_driver() -> list[str]:
    path = shutil.which("nvidia-smi")
    if path is None:
        return []
    query = ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            [path, *query],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SMI_DEADLINE_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.stdout.decode(errors="replace").splitlines() if line]
