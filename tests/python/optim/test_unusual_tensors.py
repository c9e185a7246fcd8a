"""Parameters and gradients out of the ordinary: stepped as torch steps them, or refused by name
before anything is touched."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
from optimizer_cases import snapshot
from torch.nn import Parameter

import tradewind as tw

Pair = tuple[Parameter, torch.Tensor | None]
IMAGINARY = torch.tensor([1 + 2j, -3 + 0.5j, 0.25 - 1j])


def with_gradient(parameter: torch.Tensor, gradient: torch.Tensor | None = None) -> Pair:
    return Parameter(parameter), torch.ones_like(parameter) if gradient is None else gradient


def shared_gradient() -> list[Pair]:
    gradient = torch.arange(4.0)
    return [with_gradient(torch.ones(4), gradient), with_gradient(torch.zeros(4), gradient)]


def own_memory_as_gradient() -> list[Pair]:
    parameter = Parameter(torch.arange(5.0))
    return [(parameter, parameter.detach())]


# Made anew for each optimizer.
AS_TORCH: dict[str, Callable[[], list[Pair]]] = {
    "empty last": lambda: [with_gradient(torch.ones(3)), with_gradient(torch.ones(0))],
    "empty first": lambda: [with_gradient(torch.ones(4, 0)), with_gradient(torch.ones(3))],
    "empty alone": lambda: [with_gradient(torch.ones(0, 2))],
    "without dimensions": lambda: [with_gradient(torch.tensor(2.0), torch.tensor(-3.0))],
    "no gradient": lambda: [(Parameter(torch.ones(3)), None), with_gradient(torch.ones(2))],
    "no gradients": lambda: [(Parameter(torch.ones(3)), None)],
    "float64": lambda: [with_gradient(torch.arange(5.0).double()), with_gradient(torch.ones(2))],
    "complex": lambda: [with_gradient(IMAGINARY.clone(), IMAGINARY * 2)],
    "complex128": lambda: [with_gradient(IMAGINARY.cdouble(), IMAGINARY.cdouble())],
    "conjugate gradient": lambda: [with_gradient(IMAGINARY.clone(), IMAGINARY.conj())],
    "conjugate parameter": lambda: [with_gradient(IMAGINARY.clone().conj(), IMAGINARY.clone())],
    "negative gradient": lambda: [with_gradient(torch.ones(3), IMAGINARY.conj().imag)],
    "negative parameter": lambda: [with_gradient(IMAGINARY.clone().conj().imag)],
    "gradient of one number": lambda: [with_gradient(torch.ones(4, 3), torch.ones(1).expand(4, 3))],
    "gradient with gaps": lambda: [with_gradient(torch.ones(4), torch.arange(8.0)[::2])],
    "gradient of no memory": lambda: [with_gradient(torch.ones(3), torch._efficientzerotensor(3))],
    "gradient of two": shared_gradient,
    "gradient in the parameter's memory": own_memory_as_gradient,
}


def resolved(pairs: list[Pair]) -> list[Pair]:
    """The same without conjugate views, which some of torch's optimizers refuse."""
    return [
        (
            Parameter(parameter.detach().resolve_conj()),
            None if grad is None else grad.resolve_conj(),
        )
        for parameter, grad in pairs
    ]


def stepped(
    make: Callable[..., torch.optim.Optimizer], pairs: list[Pair], options: dict[str, Any]
) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    parameters = [parameter for parameter, _ in pairs]
    optimizer = make(parameters, **options)
    for _ in range(3):
        for parameter, gradient in pairs:
            parameter.grad = gradient
        optimizer.step()
    return [parameter.detach() for parameter in parameters], optimizer


@pytest.mark.parametrize("name", AS_TORCH)
@pytest.mark.parametrize("measure", ["step", "backward"])
@pytest.mark.parametrize(
    ("rule", "options"), [("AdamW", {"lr": 0.1}), ("SGD", {"lr": 0.1, "momentum": 0.9})]
)
def test_stepped_as_torch(rule: str, options: dict[str, Any], measure: str, name: str) -> None:
    make = AS_TORCH[name]
    ours, our = stepped(
        getattr(tw.optim, rule), make(), {**options, "measure": measure, "clip_norm": 1e9}
    )
    theirs, their = stepped(
        getattr(torch.optim, rule), resolved(make()), {**options, "foreach": False}
    )
    for a, b in zip(ours, theirs, strict=True):
        # Three steps' roundings in another order.
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    counts = [
        [len(optimizer.state.get(p, {})) for g in optimizer.param_groups for p in g["params"]]
        for optimizer in (our, their)
    ]
    assert counts[0] == counts[1]


def test_a_gradient_of_no_memory_is_measured_in_backward() -> None:
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.sum()

        @staticmethod
        def backward(ctx: Any, *_: torch.Tensor) -> torch.Tensor:
            return torch._efficientzerotensor(3)

    parameter, other = Parameter(torch.ones(3)), Parameter(torch.ones(2))
    optimizer = tw.optim.SGD([parameter, other], lr=0.1, clip_norm=1.0, measure="backward")
    (Nothing.apply(parameter) + other.sum()).backward()
    optimizer.step()
    assert torch.equal(parameter.detach(), torch.ones(3))
    assert optimizer.outcome.norm == pytest.approx(2**0.5)


BEYOND = 2**31 + 5
REFUSED: dict[str, tuple[Callable[[], torch.Tensor], type[Exception], str]] = {
    "meta": (lambda: torch.ones(3, device="meta"), TypeError, "got Strided on meta"),
    "sparse": (lambda: torch.eye(3).to_sparse(), TypeError, "got Sparse on cpu"),
    "mkldnn": (lambda: torch.ones(3).to_mkldnn(), TypeError, "got Mkldnn on cpu"),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        TypeError,
        "expected a strided tensor, got a nested one",
    ),
    "no memory": (
        lambda: torch._efficientzerotensor(3),
        TypeError,
        "got a zero tensor without memory",
    ),
    "one number": (lambda: torch.ones(1).expand(4), ValueError, r"\(stride 0\); call \.contiguous"),
    "one number, very often": (
        lambda: torch.ones(1).expand(BEYOND),
        ValueError,
        r"\(stride 0\); call \.contiguous",
    ),
    "very often by two": (lambda: torch.ones(2).expand(BEYOND, 2), ValueError, r"\(stride 0\)"),
    "bits": (
        lambda: torch.ones(3, dtype=torch.float8_e4m3fn),
        TypeError,
        "expected float32, float64, .* got Float8_e4m3fn; leave it out",
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_touched(name: str, is_last: bool) -> None:
    make, kind, message = REFUSED[name]
    healthy = Parameter(torch.ones(4))
    healthy.grad = torch.ones(4)
    pairs = [("w", healthy), ("odd", Parameter(make(), requires_grad=False))]
    optimizer = tw.optim.AdamW(pairs if is_last else pairs[::-1], lr=0.1)
    for _ in range(2):
        with pytest.raises(kind, match=f"parameter 'odd': .*{message}"):
            optimizer.step()
        assert torch.equal(healthy.detach(), torch.ones(4))
        assert not optimizer.state


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_engine_refuses_a_nested_parameter() -> None:
    model = torch.nn.Linear(2, 2)
    model.odd = Parameter(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    with pytest.raises(TypeError, match=r"parameter 'odd': .* got a nested one"):
        tw.Engine(model, tw.SGD(lr=0.1))


def test_a_gradient_on_another_device_cannot_be_set() -> None:
    """torch itself refuses, by either way; the optimizer's own check is for what may come."""
    parameter = Parameter(torch.ones(3))
    with pytest.raises(RuntimeError, match="device type 'meta'"):
        parameter.grad = torch.ones(3, device="meta")
    parameter.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        parameter.grad.data = torch.ones(3, device="meta")


def test_a_gradient_whose_shape_was_changed() -> None:
    healthy, odd = Parameter(torch.ones(4)), Parameter(torch.ones(4))
    optimizer = tw.optim.SGD([("w", healthy), ("odd", odd)], lr=0.1, momentum=0.9)
    for parameter in (healthy, odd):
        parameter.grad = torch.ones(4)
    odd.grad.data = torch.ones(5)
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match=r"'odd': expected a gradient of float32 \[4\] .*\[5\]"):
        optimizer.step()
    assert snapshot(optimizer) == before


def test_an_lr_tensor_that_becomes_nan_in_place() -> None:
    parameter = Parameter(torch.ones(3))
    lr = torch.tensor(0.1)
    optimizer = tw.optim.AdamW([parameter], lr=lr)
    parameter.grad = torch.ones(3)
    optimizer.step()
    lr.fill_(torch.nan)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="param group 0: expected a number for lr, got NaN"):
        optimizer.step()
    assert snapshot(optimizer) == before


ONE_OPTION = [
    ("AdamW", {"lr": 0.3}),
    ("AdamW", {"betas": (0.5, 0.6)}),
    ("AdamW", {"eps": 0.5}),
    ("AdamW", {"weight_decay": 0.9}),
    ("AdamW", {"amsgrad": True}),
    ("AdamW", {"maximize": True}),
    ("SGD", {"momentum": 0.5}),
    ("SGD", {"momentum": 0.0}),
    ("SGD", {"dampening": 0.5}),
    ("SGD", {"weight_decay": 0.9}),
    ("SGD", {"nesterov": True}),
    ("SGD", {"maximize": True}),
]


@pytest.mark.parametrize(("rule", "changed"), ONE_OPTION)
@pytest.mark.parametrize("is_first", [False, True])
def test_groups_that_differ_in_one_option(
    rule: str, changed: dict[str, Any], is_first: bool
) -> None:
    options: dict[str, Any] = {"lr": 0.1}
    options |= {"momentum": 0.9} if rule == "SGD" else {"betas": (0.9, 0.5)}

    def step(make: Callable[..., torch.optim.Optimizer]) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(8)
        parameters = [Parameter(torch.linspace(-1.0, 1.0, 9)) for _ in range(2)]
        groups = [{"params": parameters[:1], **changed}, {"params": parameters[1:]}]
        optimizer = make(groups if is_first else groups[::-1], **options)
        for _ in range(4):
            gradient = torch.randn(9, generator=generator) + 0.5
            for parameter in parameters:
                parameter.grad = gradient
            optimizer.step()
        return [parameter.detach() for parameter in parameters]

    ours, theirs = step(getattr(tw.optim, rule)), step(getattr(torch.optim, rule))
    assert not torch.equal(ours[0], ours[1])
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)  # roundings, as above


def test_empty_groups() -> None:
    parameter = Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    nothing: dict[str, Any] = {"params": []}
    optimizer = tw.optim.SGD([nothing, {"params": [parameter]}, {"params": []}], lr=0.5)
    optimizer.step()
    assert parameter.tolist() == [0.5, 0.5]
    tw.optim.AdamW([{"params": []}], clip_norm=1.0).step()


def test_more_elements_than_32_bits_count() -> None:
    """A bfloat16 parameter of 4 GiB whose gradient is its own memory: lr 1 leaves zeros."""
    if psutil.virtual_memory().available < 12 * 2**30:
        pytest.skip("12 GiB of free memory are needed")
    parameter = Parameter(torch.zeros(BEYOND, dtype=torch.bfloat16))
    marked = [0, 4095, 2**31 - 1, 2**31, BEYOND - 1]
    with torch.no_grad():
        parameter[marked] = 1.0
    parameter.grad = parameter.detach()
    optimizer = tw.optim.SGD([parameter], lr=0.5, clip_norm=1e9)
    optimizer.step()
    assert parameter[marked].tolist() == [0.5] * len(marked)
    assert optimizer.outcome.norm == pytest.approx(len(marked) ** 0.5)


def test_nothing_here_warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for make in AS_TORCH.values():
            stepped(tw.optim.AdamW, make(), {"lr": 0.1})
