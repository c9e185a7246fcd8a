"""Asks torch about itself in a child process with a deadline, so that a torch that raises, crashes
or hangs is a finding and not the end of the doctor.

The child reports in stages, each written before the next begins: what was reached stays known.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import IO, Any

DEADLINE = timedelta(seconds=60)
STAGES = ("import", "native", "nccl", "cuda")
_KILL_GRACE_S = 5.0
_CHILD = r"""
import json, os, sys
out = int(sys.argv[1])
sys.path[:] = json.loads(sys.argv[2])
def stage(name, ask):
    try:
        told = {"facts": ask()}
    except BaseException as error:
        told = {"error": f"{type(error).__name__}: {error}",
                "absent": isinstance(error, ModuleNotFoundError) and error.name == "torch"}
    os.write(out, json.dumps({"stage": name, **told}).encode() + b"\n")
    return "error" not in told
def ask_import():
    import torch
    return {"version": str(torch.__version__), "built_for_cuda": torch.version.cuda,
            "threads": torch.get_num_threads()}
def ask_native():
    from tradewind import _native
    return {"file": _native.__file__}
def ask_nccl():
    import torch
    found = torch.cuda.nccl.version() if torch.version.cuda else None
    return {"version": ".".join(map(str, found)) if isinstance(found, tuple) else found}
def ask_cuda():
    import torch
    if not torch.cuda.is_available():
        return {"devices": []}
    each = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {"devices": [{"name": one.name, "memory_bytes": one.total_memory,
                         "capability": f"{one.major}.{one.minor}"} for one in each]}
if stage("import", ask_import):
    stage("native", ask_native)
    stage("nccl", ask_nccl)
    stage("cuda", ask_cuda)
"""


@dataclass(frozen=True)
class TorchAnswers:
    """What the child told: `facts` and `errors` by stage, and in `end` why it stopped before the
    last stage ("" where it did not)."""

    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    is_absent: bool = False
    end: str = ""

    def trouble(self, stage: str) -> str | None:
        """Why there is no answer for `stage`, or None where there is one."""
        if stage in self.facts:
            return None
        return self.errors.get(stage) or self.end or self.errors.get("import") or "not asked"


def ask_torch(deadline: timedelta = DEADLINE, python: str = sys.executable) -> TorchAnswers:
    """Ask the torch that this process would import. Takes `deadline` at most, and kills what hangs.
    Raises nothing: every failure is part of the answer."""
    with tempfile.TemporaryFile() as answers, tempfile.TemporaryFile() as errors:
        search_path = json.dumps([os.path.abspath(each) for each in sys.path])
        command = [python, "-c", _CHILD, str(answers.fileno()), search_path]
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=(answers.fileno(),),
                start_new_session=True,
            )
        except OSError as error:
            return TorchAnswers(end=f"{python} could not be started: {error}")
        end = _wait(child, deadline, errors)
        return _parse(answers, end)


def _wait(child: subprocess.Popen[bytes], deadline: timedelta, errors: IO[bytes]) -> str:
    try:
        code = child.wait(deadline.total_seconds())
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        # A child stuck in the kernel (a driver, a dead network disk) cannot be reaped: leave it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_KILL_GRACE_S)
        return f"no answer within {deadline.total_seconds():g} s"
    except BaseException:  # Ctrl-C: the child has a session of its own and would live on
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        raise
    if code < 0:
        return f"its process was killed by {_signal_name(-code)}"
    errors.seek(0)
    last = errors.read().decode(errors="replace").strip().splitlines()[-1:]
    return f"its process ended with exit code {code}: {''.join(last)}" if code else ""


def _parse(answers: IO[bytes], end: str) -> TorchAnswers:
    answers.seek(0)
    facts: dict[str, Mapping[str, Any]] = {}
    errors: dict[str, str] = {}
    is_absent = False
    for line in answers.read().splitlines():
        with contextlib.suppress(ValueError):  # a line cut off by a crash
            told = json.loads(line)
            if "error" in told:
                errors[told["stage"]] = told["error"]
                is_absent |= told["stage"] == "import" and told["absent"]
            else:
                facts[told["stage"]] = told["facts"]
    return TorchAnswers(facts, errors, is_absent, end)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
