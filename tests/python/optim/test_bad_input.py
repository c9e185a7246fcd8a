"""Bad input: each error names the subject, what was expected and what came; nothing changes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from optimizer_cases import bits, parameters_of, set_gradients, snapshot
from torch.nn import Parameter

import tradewind as tw

NAN = math.nan
BAD_OPTIONS = [
    ("AdamW", {"lr": -1e-3}, r"lr: expected a number >= 0, got -0\.001"),
    ("AdamW", {"lr": NAN}, r"lr: expected a number >= 0, got nan"),
    ("AdamW", {"lr": "fast"}, r"lr: expected a number >= 0, got 'fast'"),
    ("AdamW", {"lr": None}, r"lr: expected a number >= 0, got None"),
    ("AdamW", {"lr": torch.ones(2)}, r"lr: expected a tensor of one element, got shape \(2,\)"),
    ("AdamW", {"lr": torch.tensor(NAN)}, r"lr: expected a number >= 0, got nan"),
    ("AdamW", {"betas": (1.0, 0.9)}, r"betas\[0\]: expected a number in \[0, 1\), got 1"),
    ("AdamW", {"betas": (0.9, -0.1)}, r"betas\[1\]: expected a number in \[0, 1\), got -0\.1"),
    ("AdamW", {"betas": (0.9, NAN)}, r"betas\[1\]: expected a number in \[0, 1\), got nan"),
    ("AdamW", {"betas": (0.9,)}, r"betas: expected two numbers in \[0, 1\), got \(0\.9,\)"),
    ("AdamW", {"betas": (0.9, 0.9, 0.9)}, r"betas: expected two numbers in \[0, 1\), got \(0\.9, "),
    ("AdamW", {"betas": 0.9}, r"betas: expected two numbers in \[0, 1\), got 0\.9"),
    ("AdamW", {"eps": -1e-8}, r"eps: expected a number >= 0, got -1e-08"),
    ("AdamW", {"eps": NAN}, r"eps: expected a number >= 0, got nan"),
    ("AdamW", {"weight_decay": -0.1}, r"weight_decay: expected a number >= 0, got -0\.1"),
    ("AdamW", {"clip_norm": -1.0}, r"clip_norm: expected a number >= 0, got -1"),
    ("AdamW", {"clip_norm": NAN}, r"clip_norm: expected a number >= 0, got nan"),
    ("SGD", {"lr": -0.1}, r"lr: expected a number >= 0, got -0\.1"),
    ("SGD", {"momentum": -0.9}, r"momentum: expected a number >= 0, got -0\.9"),
    ("SGD", {"momentum": NAN}, r"momentum: expected a number >= 0, got nan"),
    ("SGD", {"dampening": NAN}, r"dampening: expected a number, got nan"),
    ("SGD", {"weight_decay": -1}, r"weight_decay: expected a number >= 0, got -1"),
    ("SGD", {"nesterov": True}, r"nesterov: expected momentum > 0 and dampening 0, got momentum 0"),
    (
        "SGD",
        {"nesterov": True, "momentum": 0.9, "dampening": 0.5},
        r"nesterov: expected momentum > 0 and dampening 0, got .* dampening 0\.5",
    ),
]


@pytest.mark.parametrize(("rule", "options", "message"), BAD_OPTIONS)
def test_options(rule: str, options: dict[str, Any], message: str) -> None:
    parameter = Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=message):
        getattr(tw.optim, rule)([parameter], **options)
    assert torch.equal(parameter.detach(), torch.ones(3))


@pytest.mark.parametrize(
    ("rule", "options", "message"), [case for case in BAD_OPTIONS if "clip_norm" not in case[1]]
)
def test_options_of_an_added_group(rule: str, options: dict[str, Any], message: str) -> None:
    optimizer = getattr(tw.optim, rule)([Parameter(torch.ones(3))])
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [Parameter(torch.ones(2))], **options})
    assert snapshot(optimizer) == before


@pytest.mark.parametrize("rule", ["AdamW", "SGD"])
def test_clip_norm_of_one_group(rule: str) -> None:
    optimizer = getattr(tw.optim, rule)([Parameter(torch.ones(3))])
    before = snapshot(optimizer)
    group = {"params": [Parameter(torch.ones(2))], "clip_norm": 1.0}
    message = rf"param group: expected no clip_norm, .*, got 1\.0; give it to {rule}\(clip_norm="
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group(group)
    assert snapshot(optimizer) == before


@pytest.mark.parametrize("name", ["capturable", "differentiable"])
def test_not_built(name: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"AdamW\({name}=True\) is not built yet"):
        tw.optim.AdamW([Parameter(torch.ones(1))], **{name: True})
    optimizer = tw.optim.AdamW([Parameter(torch.ones(1))])
    before = snapshot(optimizer)
    with pytest.raises(NotImplementedError, match=name):
        optimizer.add_param_group({"params": [Parameter(torch.ones(1))], name: True})
    assert snapshot(optimizer) == before


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}])
@pytest.mark.parametrize("rule", ["AdamW", "SGD"])
def test_foreach_and_fused_are_accepted(rule: str, options: dict[str, Any]) -> None:
    optimizer = getattr(tw.optim, rule)([Parameter(torch.ones(2))], lr=0.1, **options)
    set_gradients(optimizer, [torch.ones(2)])
    optimizer.step()
    assert not torch.equal(parameters_of(optimizer)[0].detach(), torch.ones(2))


@pytest.mark.parametrize("rule", ["AdamW", "SGD"])
def test_unknown_options(rule: str) -> None:
    with pytest.raises(TypeError, match="learning_rate"):
        getattr(tw.optim, rule)([Parameter(torch.ones(1))], learning_rate=0.1)


P = Parameter(torch.ones(2))
BAD_PARAMETERS = [
    ([], ValueError, "empty parameter list"),
    (P, TypeError, "iterable of Tensors or dicts, but got torch.FloatTensor"),
    ([1.5], TypeError, "can only optimize Tensors, but one of the params is float"),
    ([P, "w"], TypeError, "can only optimize Tensors, but one of the params is str"),
    ([P * 2], ValueError, "non-leaf"),
    ([P, P], ValueError, "expected each parameter once, got .* duplicate"),
    ([("a", P), ("b", P)], ValueError, "expected each parameter once, got .* duplicate"),
    ([{"params": [P]}, {"params": [P]}], ValueError, "appear in more than one parameter group"),
    ([{"params": {P}}], TypeError, "sets"),
    ([("a", P), Parameter(torch.ones(1))], ValueError, "names"),
]


@pytest.mark.parametrize(("params", "kind", "message"), BAD_PARAMETERS)
@pytest.mark.parametrize("rule", ["AdamW", "SGD"])
def test_parameters(rule: str, params: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        getattr(tw.optim, rule)(params, lr=0.1)
    assert torch.equal(P.detach(), torch.ones(2))


def test_a_parameter_already_in_a_group() -> None:
    optimizer = tw.optim.SGD([P], lr=0.1)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [P]})
    assert snapshot(optimizer) == before
    assert len(optimizer.param_groups) == 1


def unchanged_by_step(
    optimizer: torch.optim.Optimizer, kind: type[Exception], message: str
) -> None:
    """A step that raises, twice, and leaves everything as it was, to the bit."""
    before = snapshot(optimizer)
    for _ in range(2):
        with pytest.raises(kind, match=message):
            optimizer.step()
        assert snapshot(optimizer) == before


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_dtypes_that_are_not_floating(dtype: torch.dtype) -> None:
    healthy = Parameter(torch.ones(2))
    other = Parameter(torch.ones(2).to(dtype), requires_grad=False)
    optimizer = tw.optim.SGD([("w", healthy), ("codes", other)], lr=0.1)
    healthy.grad = torch.ones(2)
    name = str(dtype).removeprefix("torch.")
    unchanged_by_step(optimizer, TypeError, rf"'codes': expected float32, .* got {name}; leave it")


def test_sparse_gradients() -> None:
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    healthy = Parameter(torch.ones(2))
    optimizer = tw.optim.AdamW([("w", healthy), ("table", embedding.weight)])
    (embedding(torch.tensor([1])).sum() + healthy.sum()).backward()
    unchanged_by_step(
        optimizer, RuntimeError, r"'table': .*sparse gradients are not supported; use sparse=False"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_gradients_of_another_floating_dtype_are_taken_as_they_come(dtype: torch.dtype) -> None:
    parameter = Parameter(torch.ones(5))
    if not hasattr(parameter, "grad_dtype"):
        pytest.skip("this torch refuses such gradients itself")
    values = torch.tensor([0.1, -2.0, 3.0, 0.0, 1e-3], dtype=dtype)
    parameter.grad_dtype = None
    parameter.grad = values
    same = Parameter(torch.ones(5))
    same.grad = values.float()
    for each in (parameter, same):
        tw.optim.AdamW([each], lr=0.1, clip_norm=1.0).step()
    # The norm of float64 values and of their float32 rounding may differ in the last place.
    torch.testing.assert_close(parameter, same, rtol=1e-7 if dtype == torch.float64 else 0, atol=0)


def test_complex_gradients_of_real_parameters() -> None:
    parameter = Parameter(torch.ones(2))
    if not hasattr(parameter, "grad_dtype"):
        pytest.skip("this torch refuses such gradients itself")
    parameter.grad_dtype = None
    parameter.grad = torch.ones(2, dtype=torch.complex64)
    optimizer = tw.optim.SGD([("w", parameter)], lr=0.1)
    message = r"'w': expected a gradient of float32 \[2\] on cpu, got complex64 \[2\] on cpu"
    unchanged_by_step(optimizer, RuntimeError, message)


def test_overlapping_parameters() -> None:
    storage = torch.ones(8)
    first, second = Parameter(storage[:5]), Parameter(storage[4:])
    optimizer = tw.optim.SGD([("head", first), ("tail", second)], lr=0.1)
    set_gradients(optimizer, [torch.ones(5), torch.ones(4)])
    message = "'head' and 'tail' share memory; to tie weights, use one Parameter object"
    unchanged_by_step(optimizer, ValueError, message)


def test_two_parameters_over_one_storage_across_groups() -> None:
    storage = torch.ones(8)
    groups = [{"params": [Parameter(storage)]}, {"params": [Parameter(storage)]}]
    optimizer = tw.optim.AdamW(groups)
    set_gradients(optimizer, [torch.ones(8), torch.ones(8)])
    message = r"'group[01]\.param0' and 'group[01]\.param0' share memory"
    unchanged_by_step(optimizer, ValueError, message)


def test_a_parameter_with_gaps_over_another() -> None:
    storage = torch.ones(8)
    optimizer = tw.optim.SGD(
        [("all", Parameter(storage)), ("even", Parameter(storage[::2]))], lr=0.1
    )
    set_gradients(optimizer, [torch.ones(8), torch.ones(4)])
    unchanged_by_step(optimizer, ValueError, "'(all|even)' and '(all|even)' share memory")


def test_interleaved_columns_are_fine() -> None:
    storage = torch.ones(4, 2)
    optimizer = tw.optim.SGD([Parameter(storage[:, 0]), Parameter(storage[:, 1])], lr=1.0)
    set_gradients(optimizer, [torch.ones(4), torch.ones(4) * 2])
    optimizer.step()
    assert storage.tolist() == [[0.0, -1.0]] * 4


def test_neighbours_in_one_storage_are_fine() -> None:
    storage = torch.ones(8)
    optimizer = tw.optim.SGD([Parameter(storage[4:]), Parameter(storage[:4])], lr=1.0)
    set_gradients(optimizer, [torch.ones(4), torch.ones(4) * 2])
    optimizer.step()
    assert storage.tolist() == [-1.0] * 4 + [0.0] * 4


def test_elements_that_share_memory() -> None:
    parameter = Parameter(torch.ones(1).expand(4))
    optimizer = tw.optim.SGD([("shared", parameter)], lr=0.1)
    set_gradients(optimizer, [torch.ones(4)])
    unchanged_by_step(optimizer, ValueError, r"'shared': .*\(stride 0\); call \.contiguous\(\)")


@pytest.mark.parametrize("num_steps_before", [0, 2])
@pytest.mark.parametrize(
    ("rule", "name", "value", "said"),
    [
        ("AdamW", "lr", NAN, "lr"),
        ("AdamW", "lr", torch.tensor(NAN), "lr"),
        ("AdamW", "betas", (0.9, NAN), "beta2"),
        ("AdamW", "weight_decay", NAN, "weight_decay"),
        ("SGD", "lr", NAN, "lr"),
        ("SGD", "momentum", NAN, "momentum"),
    ],
)
def test_an_option_that_becomes_nan_later(
    rule: str, name: str, value: Any, said: str, num_steps_before: int
) -> None:
    groups = [{"params": [Parameter(torch.ones(3))]}, {"params": [Parameter(torch.ones(5000))]}]
    optimizer = getattr(tw.optim, rule)(groups, lr=0.1, clip_norm=1.0)
    set_gradients(optimizer, [torch.ones(3), torch.ones(5000)])
    for _ in range(num_steps_before):
        optimizer.step()
    kept = optimizer.param_groups[1][name]
    optimizer.param_groups[1][name] = value
    message = f"param group 1: expected a number for {said}, got NaN; nothing was updated"
    unchanged_by_step(optimizer, ValueError, message)
    optimizer.param_groups[1][name] = kept
    before = bits(parameters_of(optimizer)[0])
    optimizer.step()
    assert bits(parameters_of(optimizer)[0]) != before


def test_a_closure_that_raises() -> None:
    optimizer = tw.optim.SGD([Parameter(torch.ones(2))], lr=0.1)
    set_gradients(optimizer, [torch.ones(2)])

    def closure() -> float:
        raise KeyError("batch")

    before = snapshot(optimizer)
    with pytest.raises(KeyError, match="batch"):
        optimizer.step(closure)
    assert snapshot(optimizer) == before
