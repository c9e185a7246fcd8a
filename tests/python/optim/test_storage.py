"""Masters and state in fewer bytes: what is stored, that it trains as float32 does, and that it is
saved and loaded as it is."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import tradewind as tw

RULES = ["AdamW", "Adam", "SGD", "Lion", "LAMB", "Adagrad", "RMSprop", "Muon"]
STORAGES: list[dict[str, Any]] = [
    {"masters": "fp32"},
    {"masters": "split"},
    {"state_dtype": "bf16"},
    {"state_dtype": "8bit"},
    {"masters": "fp32", "state_dtype": "bf16"},
    {"masters": "split", "state_dtype": "8bit"},
]
# Stored bytes per parameter with AdamW: parameter, master, two states; an exponent for each block
# of 256 in 8 bits.
BYTES = [2 + 4 + 8, 2 + 2 + 8, 4 + 4, 4 + 2 + 2 / 256, 2 + 4 + 4, 2 + 2 + 2 + 2 / 256]


def make(rule: str, storage: dict[str, Any], **more: Any) -> tuple[Parameter, Any]:
    generator = torch.Generator().manual_seed(3)
    dtype = torch.bfloat16 if "masters" in storage else torch.float32
    parameter = Parameter(torch.randn(64, 96, generator=generator).to(dtype).clone())
    return parameter, getattr(tw.optim, rule)([parameter], lr=1e-3, **storage, **more)


def run(parameter: Parameter, optimizer: Any, first: int, count: int) -> None:
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(100 + step)
        gradient = torch.randn(parameter.shape, generator=generator) + 0.3
        parameter.grad = gradient.to(torch.bfloat16).to(parameter.dtype)
        optimizer.step()


def whole(parameter: Parameter, optimizer: Any) -> torch.Tensor:
    """The parameter with its master."""
    from tradewind.optim.stored_state import master_values

    master = master_values(optimizer.state[parameter], parameter)
    return (parameter.detach() if master is None else master).float().clone()


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_trains_as_in_float32(rule: str, storage: dict[str, Any]) -> None:
    parameter, optimizer = make(rule, storage)
    plain, exact = make(rule, {})
    with torch.no_grad():
        plain.copy_(parameter)
    start = plain.detach().clone()
    run(parameter, optimizer, 0, 30)
    run(plain, exact, 0, 30)
    moved = (plain - start).norm()
    error = (whole(parameter, optimizer) - plain).norm() / moved
    # Masters alone lose nothing. Rounded states cost up to their spacing (2^-8, 2^-3) in the
    # direction, averaged over elements and steps; Lion takes signs, which flip near zero.
    bound = (
        0.0 if "state_dtype" not in storage else 0.02 if storage["state_dtype"] == "bf16" else 0.2
    )
    if rule == "Muon":
        bound = max(bound, 1e-6) * 2
    if rule == "Lion":
        bound *= 2
    assert error <= bound
    if "masters" in storage:
        rounded = whole(parameter, optimizer).bfloat16()
        # Split masters round ties away from zero.
        assert (parameter.detach() == rounded).float().mean() > 0.999


@pytest.mark.parametrize("storage,expected", list(zip(STORAGES, BYTES, strict=True)), ids=str)
def test_bytes_per_parameter(storage: dict[str, Any], expected: float) -> None:
    parameter, optimizer = make("AdamW", storage)
    run(parameter, optimizer, 0, 1)
    state = [value for name, value in optimizer.state[parameter].items() if name != "step"]
    stored = sum(value.numel() * value.element_size() for value in [parameter, *state])
    assert stored / parameter.numel() == expected


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("rule", ["AdamW", "SGD", "Lion"])
def test_resumes_to_the_bit(rule: str, storage: dict[str, Any]) -> None:
    more = {"momentum": 0.9} if rule == "SGD" else {}
    straight, optimizer = make(rule, storage, **more)
    run(straight, optimizer, 0, 8)

    parameter, optimizer = make(rule, storage, **more)
    run(parameter, optimizer, 0, 4)
    buffer = io.BytesIO()
    torch.save({"p": parameter.detach(), "o": optimizer.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    resumed, optimizer = make(rule, storage, **more)
    with torch.no_grad():
        resumed.copy_(saved["p"])
    optimizer.load_state_dict(saved["o"])
    run(resumed, optimizer, 4, 4)
    assert torch.equal(resumed, straight)


def test_random_rounding_follows_the_seed() -> None:
    results = []
    for seed in (0, 0, 1):
        parameter, optimizer = make("AdamW", {"state_dtype": "bf16"}, seed=seed)
        run(parameter, optimizer, 0, 3)
        results.append(optimizer.state[parameter]["exp_avg"].clone())
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize("into", [None, "fp32", "bf16", "8bit"])
@pytest.mark.parametrize("saved_as", [None, "bf16", "8bit"])
def test_state_is_converted_where_the_precision_differs(saved_as: Any, into: Any) -> None:
    parameter, optimizer = make("AdamW", {"state_dtype": saved_as})
    run(parameter, optimizer, 0, 3)
    other, target = make("AdamW", {"state_dtype": into})
    target.load_state_dict(optimizer.state_dict())
    with torch.no_grad():
        other.copy_(parameter)
    run(parameter, optimizer, 3, 1)
    run(other, target, 3, 1)
    # One step of 1e-3 whose direction is off by at most the rounding of 8 bits.
    assert (parameter - other).abs().max() < 2.5e-4


@pytest.mark.parametrize("masters", ["fp32", "split"])
def test_weights_that_are_loaded_later_win_over_the_master(masters: str) -> None:
    parameter, optimizer = make("SGD", {"masters": masters})
    run(parameter, optimizer, 0, 3)
    with torch.no_grad():
        parameter.fill_(5.0)
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert (parameter == 5.0).all()


@pytest.mark.parametrize(
    "options,message",
    [
        ({"masters": "bf16"}, "masters: expected one of None, 'fp32', 'split', got 'bf16'"),
        ({"state_dtype": "int4"}, "state_dtype: expected one of .*'8bit', got 'int4'"),
        ({"seed": -1}, "seed: expected a whole number"),
    ],
)
def test_unknown_storage(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tw.optim.AdamW([Parameter(torch.ones(2))], **options)


@pytest.mark.parametrize(
    "dtype,options,message",
    [
        (torch.float16, {"masters": "split"}, "masters='split' expects bfloat16"),
        (torch.float64, {"state_dtype": "bf16"}, "state_dtype expects .* got float64"),
        (torch.complex64, {"state_dtype": "8bit"}, "state_dtype expects .* got complex64"),
    ],
)
def test_storage_that_does_not_fit(
    dtype: torch.dtype, options: dict[str, Any], message: str
) -> None:
    parameter = Parameter(torch.ones(2, dtype=dtype))
    optimizer = tw.optim.AdamW([("w", parameter)], **options)
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match=f"'w': {message}"):
        optimizer.step()
    assert (parameter == 1).all()
