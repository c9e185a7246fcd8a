"""The doctor's look at this machine: what it has, what is missing, what that costs and what to do.

Runs where torch is absent, broken or hanging: torch is asked in a process of its own.
"""

from __future__ import annotations

from tradewind.doctor.findings import Finding, MachineReport
from tradewind.doctor.inspection import inspect_machine

__all__ = ["Finding", "MachineReport", "inspect_machine"]
