"""Looks at everything once and puts the findings in order."""

from __future__ import annotations

from datetime import timedelta

from tradewind.doctor import disk, hardware, software, torch_probe
from tradewind.doctor.findings import MachineReport
from tradewind.track.facts import tradewind_version


def inspect_machine(torch_deadline: timedelta = torch_probe.DEADLINE) -> MachineReport:
    """Look at this machine: software, processor, memory, GPUs, the working directory's disk.

    Takes some seconds; every question has a deadline. Raises nothing: what fails is a finding.
    """
    answers = torch_probe.ask_torch(torch_deadline)
    gpu = hardware.gpu_finding(answers)
    devices = gpu.facts.get("devices")
    num_gpus = len(devices) if isinstance(devices, list) else 0
    return MachineReport(
        tradewind_version(),
        (
            software.python_finding(),
            software.torch_finding(answers),
            software.native_finding(answers, software.build_info()),
            hardware.processor_finding(),
            hardware.isa_finding(),
            hardware.memory_finding(),
            gpu,
            software.nccl_finding(answers, num_gpus),
            software.nvcc_finding(num_gpus),
            disk.disk_finding(),
            hardware.huge_pages_finding(),
            hardware.shared_memory_finding(),
        ),
    )
