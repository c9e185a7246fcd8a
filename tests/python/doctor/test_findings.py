"""Findings on machines that the test makes up, and on this one."""

from __future__ import annotations

import json
import os
import platform
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tradewind.doctor import Finding, MachineReport, disk, hardware, inspect_machine, software
from tradewind.doctor.torch_probe import TorchAnswers

LOADS = {"version": "2.13.0+cpu", "built_for_cuda": None, "threads": 2}
BUILD: dict[str, object] = {"TORCH_VERSION": "2.13.0+cu130", "CUDA": True}


def answers(**facts: dict[str, Any]) -> TorchAnswers:
    return TorchAnswers({"import": LOADS, "native": {}, "nccl": {}, "cuda": {}, **facts})


def test_this_machine() -> None:
    report = inspect_machine()
    titles = [finding.title for finding in report.findings]
    assert len(titles) == len(set(titles)) == 12
    assert report["Python"].facts["version"] == platform.python_version()
    assert report["torch"].status == "ok"
    assert json.loads(json.dumps(report.to_json(), allow_nan=False)) == report.to_json()
    for finding in report.findings:
        assert finding.found
        if finding.status != "ok":
            assert finding.cost or finding.remedy, finding
    with pytest.raises(KeyError, match="expected one of Python, torch"):
        _ = report["pytorch"]


def test_the_table_shows_every_word() -> None:
    import io

    from rich.console import Console

    findings = (
        Finding("a [title]", "missing", "[red]nothing[/]", "costs [time]", "do [this]"),
        Finding("b", "ok", "fine"),
    )
    stream = io.StringIO()
    Console(file=stream, width=200).print(MachineReport("0.1", findings).table())
    words = stream.getvalue()
    for part in ("a [title]", "[red]nothing[/]", "costs [time]", "-> do [this]", "missing", "fine"):
        assert part in words


@pytest.mark.parametrize(
    ("version", "has_gil", "status"),
    [((3, 10), True, "ok"), ((3, 13), True, "ok"), ((3, 9), True, "warning"),
     ((3, 14), True, "warning"), ((3, 13), False, "warning")],
)  # fmt: skip
def test_python(version: tuple[int, int], has_gil: bool, status: str) -> None:
    assert software.python_finding(version, has_gil).status == status


@pytest.mark.parametrize(
    ("version", "status"),
    [("2.11.0", "ok"), ("2.13.1+cu130", "ok"), ("2.10.2", "warning"), ("2.14.0a0", "warning")],
)
def test_versions_of_torch(version: str, status: str) -> None:
    finding = software.torch_finding(answers(**{"import": {**LOADS, "version": version}}))
    assert finding.status == status and version in finding.found
    assert (finding.remedy is None) == (status == "ok")


def test_torch_absent_and_broken() -> None:
    absent = software.torch_finding(TorchAnswers(is_absent=True, errors={"import": "No module"}))
    assert (absent.status, absent.found) == ("missing", "not installed")
    assert absent.remedy == "pip install 'torch>=2.11,<2.14'"
    broken = software.torch_finding(TorchAnswers(errors={"import": "OSError: libfoo"}))
    assert broken.status == "missing" and "does not load: OSError: libfoo" in broken.found


@pytest.mark.parametrize(
    ("told", "build", "status", "words"),
    [
        (answers(), BUILD, "ok", "built for torch 2.13.0+cu130, with CUDA; loads"),
        (answers(), None, "missing", "not built"),
        (answers(**{"import": {**LOADS, "version": "2.12.1"}}), BUILD, "missing", "2.12.1"),
        (
            TorchAnswers({"import": LOADS}, {"native": "ImportError: undefined symbol"}),
            BUILD,
            "missing",
            "undefined symbol",
        ),
        (TorchAnswers({"import": LOADS}, end="killed by SIGSEGV"), BUILD, "missing", "SIGSEGV"),
        (TorchAnswers(errors={"import": "x"}), BUILD, "warning", "built for torch"),
    ],
)
def test_native_module(
    told: TorchAnswers, build: dict[str, object] | None, status: str, words: str
) -> None:
    finding = software.native_finding(told, build)
    assert finding.status == status and words in finding.found
    assert (finding.remedy is None) == (status == "ok")
    if status == "missing":
        assert "pip install --no-build-isolation ." in str(finding.remedy)


def test_build_info_is_read_and_not_run() -> None:
    source = '"""doc"""\nTORCH_VERSION: str = "2.13.0"\nCUDA = True\nX = print("no")\nimport os\n'
    assert software.constants_of(source) == {"TORCH_VERSION": "2.13.0", "CUDA": True}


def test_gpus() -> None:
    one = {"name": "H200", "memory_bytes": 141 << 30, "capability": "9.0"}
    finding = hardware.gpu_finding(answers(cuda={"devices": [one, one]}))
    assert (finding.status, finding.found) == ("ok", "H200, 141 GiB; H200, 141 GiB")


def fake_command(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, output: str) -> None:
    program = folder / name
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_a_gpu_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_command(monkeypatch, tmp_path, "nvidia-smi", "NVIDIA H200, 143771 MiB, 570.1")
    finding = hardware.gpu_finding(answers(cuda={"devices": []}))
    assert finding.status == "warning" and "NVIDIA H200" in finding.found
    assert "trains nothing" in str(finding.cost)
    broken = TorchAnswers({"import": LOADS}, end="no answer within 60 s")
    assert "no answer within 60 s" in hardware.gpu_finding(broken).found


def test_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    finding = hardware.gpu_finding(answers(cuda={"devices": []}))
    assert (finding.status, finding.facts) == ("missing", {"devices": []})


@pytest.mark.parametrize(
    ("output", "num_gpus", "status"),
    [
        ("Cuda compilation tools, release 12.8, V12.8.61", 1, "ok"),
        ("Cuda compilation tools, release 13.0, V13.0.1", 0, "ok"),
        ("Cuda compilation tools, release 12.4, V12.4.1", 1, "warning"),
        ("?", 1, "warning"),
    ],
)
def test_cuda_compilers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, output: str, num_gpus: int, status: str
) -> None:
    fake_command(monkeypatch, tmp_path, "nvcc", output)
    assert software.nvcc_finding(num_gpus).status == status


@pytest.mark.parametrize(("num_gpus", "status"), [(0, "ok"), (1, "missing")])
def test_no_cuda_compiler(monkeypatch: pytest.MonkeyPatch, num_gpus: int, status: str) -> None:
    monkeypatch.setattr(software, "_nvcc_path", lambda: None)
    assert software.nvcc_finding(num_gpus).status == status


def test_nccl() -> None:
    assert software.nccl_finding(answers(nccl={"version": "2.27.5"}), 8).status == "ok"
    assert software.nccl_finding(answers(), 1).status == "ok"
    assert software.nccl_finding(answers(), 2).status == "missing"


def machine_root(tmp_path: Path, flags: str, key: str = "flags") -> Path:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cpuinfo").write_text(f"{key}\t: {flags}\n")
    return tmp_path


AVX2 = "sse2 avx2 fma f16c"
AVX512 = f"{AVX2} avx512f avx512bw avx512vl avx512dq"


@pytest.mark.parametrize(
    ("flags", "key", "wanted", "status", "found"),
    [
        (AVX512, "flags", "", "ok", "avx512"),
        (AVX2, "flags", "", "ok", "avx2"),
        ("sse2 avx2", "flags", "", "warning", "baseline only"),
        ("fp asimd", "Features", "", "ok", "baseline (NEON)"),
        (AVX512, "flags", "avx2", "warning", "avx2 by TRADEWIND_ISA, though avx512 is there"),
        (AVX512, "flags", "avx512", "ok", "avx512"),
        (AVX2, "flags", "avx512", "warning", "avx2; TRADEWIND_ISA=avx512"),
        (AVX2, "flags", "sse9", "warning", "avx2; TRADEWIND_ISA=sse9"),
    ],
)
def test_vector_instructions(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    flags: str,
    key: str,
    wanted: str,
    status: str,
    found: str,
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    finding = hardware.isa_finding(
        machine_root(tmp_path, flags, key), {"TRADEWIND_ISA": wanted} if wanted else {}
    )
    assert (finding.status, finding.found) == (status, found)


def test_the_isa_is_the_native_modules() -> None:
    native = pytest.importorskip("tradewind._core").native
    assert hardware.isa_finding(environ={}).facts["isas"] == list(native.supported_isas())


@pytest.mark.parametrize(
    ("text", "status"),
    [("always [madvise] never", "ok"), ("[always] madvise never", "ok"),
     ("always madvise [never]", "warning"), (None, "warning")],
)  # fmt: skip
def test_huge_pages(tmp_path: Path, text: str | None, status: str) -> None:
    if text is not None:
        path = tmp_path / "sys/kernel/mm/transparent_hugepage/enabled"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    assert hardware.huge_pages_finding(tmp_path).status == status


@pytest.mark.parametrize(
    ("total", "status"), [(64 << 20, "warning"), (8 << 30, "ok")], ids=["docker", "large"]
)
def test_shared_memory(monkeypatch: pytest.MonkeyPatch, total: int, status: str) -> None:
    blocks = total // 4096
    told = os.statvfs_result((4096, 4096, blocks, blocks, blocks, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: told)
    finding = hardware.shared_memory_finding()
    assert (finding.status, finding.facts["total_bytes"]) == (status, total)
    assert ("bus error" in str(finding.cost)) == (status == "warning")


def test_no_shared_memory(tmp_path: Path) -> None:
    assert hardware.shared_memory_finding(tmp_path / "none").status == "missing"


def test_disk_is_measured_and_left_clean(tmp_path: Path) -> None:
    finding = disk.disk_finding(tmp_path)
    assert list(tmp_path.iterdir()) == []
    rate, free = finding.facts["write_bytes_per_s"], finding.facts["free_bytes"]
    assert isinstance(rate, float) and rate > 0
    status = os.statvfs(tmp_path)
    assert isinstance(free, int)
    assert free == pytest.approx(status.f_bavail * status.f_frsize, rel=0.2)


@pytest.mark.parametrize(
    ("facts", "status", "words"),
    [
        (disk.DiskFacts("ext4", 100 << 30, 900e6), "ok", "900 MB/s"),
        (disk.DiskFacts("nfs4", 100 << 30, 20e6), "warning", "20 MB/s"),
        (disk.DiskFacts("ext4", 1 << 30, 900e6), "warning", "1.0 GiB free"),
        (disk.DiskFacts("ext4", 100 << 30, None, "not writable: x"), "warning", "not writable"),
    ],
)
def test_disks(facts: disk.DiskFacts, status: str, words: str) -> None:
    finding = disk.finding_of(facts)
    assert finding.status == status and words in finding.found
    assert (finding.remedy is None) == (status == "ok")


def test_a_disk_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(disk, "write_all", refuse)
    finding = disk.disk_finding(tmp_path)
    assert "not writable: Read-only file system" in finding.found
    assert "does not answer" in disk.disk_finding(tmp_path / "nowhere").found


def test_a_disk_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "measure", lambda folder: time.sleep(3))
    finding = disk.disk_finding(deadline=timedelta(seconds=0.1))
    assert finding.status == "warning" and "no answer within 0.1 s" in finding.found
