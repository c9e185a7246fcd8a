"""Not a bit of parameters, state or norm depends on threads, instruction set, the flush-to-zero
mode of the calling thread, or on whether gradients were measured hot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_cases import USUAL_RULES, bits, training_digest
from torch.nn import Parameter

import tradewind as tw
from tradewind._core import native

CASES = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def digest() -> str:
    return training_digest()


def run_cases(program: str, **environment: str) -> str:
    """Standard output of a Python program that may import the test cases, in a fresh process."""
    paths = os.pathsep.join([str(CASES), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.usefixtures("torch_threads")
@pytest.mark.parametrize("num_threads", [1, 2, 7])
def test_threads(num_threads: int, digest: str) -> None:
    torch.set_num_threads(num_threads)
    assert training_digest() == digest


@pytest.mark.parametrize("isa", native.supported_isas())
def test_instruction_sets(isa: str, digest: str) -> None:
    program = (
        "import optimizer_cases\n"
        "from tradewind._core import native\n"
        "print(native.isa(), optimizer_cases.training_digest())"
    )
    assert run_cases(program, TRADEWIND_ISA=isa) == f"{isa} {digest}"


def test_an_unknown_instruction_set_is_refused_by_name() -> None:
    program = (
        "from tradewind._core import native\n"
        "try:\n"
        "    native.isa()\n"
        "except ValueError as error:\n"
        "    print(error)"
    )
    message = run_cases(program, TRADEWIND_ISA="avx1024")
    assert "TRADEWIND_ISA" in message and "'avx1024'" in message
    assert all(isa in message for isa in native.supported_isas())


@pytest.mark.usefixtures("torch_threads")
@pytest.mark.parametrize("num_threads", [1, 2])
def test_flush_denormal(num_threads: int, digest: str) -> None:
    torch.set_num_threads(num_threads)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    torch.set_flush_denormal(False)
    assert training_digest(flush_denormal=True) == digest


@pytest.mark.usefixtures("torch_threads")
def test_a_tiny_norm_is_no_zero_under_flush_denormal() -> None:
    """Squares of these float64 gradients are subnormal; so is their sum."""
    parameter = Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = tw.optim.SGD([parameter], lr=0.0, clip_norm=1.0)
    parameter.grad = torch.full((3,), 1e-160, dtype=torch.float64)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    optimizer.step()
    torch.set_flush_denormal(False)
    assert optimizer.outcome is not None
    assert optimizer.outcome.norm == pytest.approx(3**0.5 * 1e-160, rel=1e-3)


@pytest.mark.usefixtures("torch_threads")
@pytest.mark.parametrize("flush", [False, True])
def test_the_users_flush_mode_is_put_back(flush: bool) -> None:
    parameter = Parameter(torch.ones(4))
    optimizer = tw.optim.AdamW([parameter], clip_norm=1.0)
    parameter.grad = torch.ones(4)
    subnormal = torch.tensor([1e-310], dtype=torch.float64)
    if not torch.set_flush_denormal(flush):
        pytest.skip("this processor cannot flush subnormals")
    optimizer.step()
    flushed = float((subnormal * 1.0).view(torch.int64)) == 0
    torch.set_flush_denormal(False)
    assert flushed == flush


def run(rule: str, options: dict[str, Any], *, hot: bool) -> tuple[int, list[bytes]]:
    """Two steps with real backwards: how many gradients were measured hot, and all bits."""
    generator = torch.Generator().manual_seed(1)
    parameters = [
        Parameter(torch.randn(size, generator=generator)) for size in (1, 31, 4099, 300_001)
    ]
    optimizer = getattr(tw.optim, rule)(parameters, clip_norm=3.0, **options)
    if hot:
        optimizer.hook_gradients("measure")
    taken = []
    num_hot = 0
    for _ in range(2):
        optimizer.zero_grad()
        sum((p.sin() * p).sum() for p in parameters).backward()
        optimizer.step()
        num_hot = optimizer.outcome.num_hot
        taken.append(float(optimizer.outcome.norm).hex().encode())
    for parameter in parameters:
        taken += [bits(parameter), *map(bits, optimizer.state[parameter].values())]
    return num_hot, taken


@pytest.mark.parametrize(("rule", "options"), USUAL_RULES)
def test_measured_hot_or_cold(rule: str, options: dict[str, Any]) -> None:
    num_hot, hot = run(rule, options, hot=True)
    num_hot_without, cold = run(rule, options, hot=False)
    assert (num_hot, num_hot_without) == (4, 0)
    assert hot == cold


@pytest.mark.parametrize(
    "edit",
    [
        lambda p: p.grad.mul_(2),
        lambda p: setattr(p, "grad", p.grad * 2),
        lambda p: (p * 1.0).sum().backward(),
    ],
    ids=["in_place", "replaced", "accumulated"],
)
def test_a_gradient_that_changed_after_it_was_measured_hot(edit: Any) -> None:
    parameter = Parameter(torch.ones(5000))
    optimizer = tw.optim.SGD([parameter], lr=0.0, clip_norm=1.0)
    optimizer.hook_gradients("measure")
    parameter.sum().backward()
    edit(parameter)
    optimizer.step()
    assert optimizer.outcome.norm == pytest.approx(2 * 5000**0.5, rel=1e-14)


def test_many_small_parameters_are_measured_at_the_step() -> None:
    """A hook for each would cost more than reading them once; large ones keep theirs."""
    for num_small, num_hot in ((200, 201), (300, 1)):
        parameters = [torch.nn.Parameter(torch.randn(5)) for _ in range(num_small)]
        parameters.append(torch.nn.Parameter(torch.randn(1 << 15)))
        optimizer = tw.optim.AdamW(parameters, clip_norm=1.0, measure="backward")
        torch.stack([p.square().sum() for p in parameters]).sum().backward()
        optimizer.step()
        assert optimizer.outcome.num_hot == num_hot
        expected = torch.cat([p.grad.flatten() for p in parameters]).double().norm()
        assert optimizer.outcome.norm == pytest.approx(float(expected), rel=1e-12)
