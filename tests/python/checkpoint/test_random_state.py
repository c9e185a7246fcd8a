"""Random numbers go on bit for bit, through what a checkpoint holds."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tradewind.checkpoint import random_state
from tradewind.checkpoint.rebuilding import rebuild
from tradewind.checkpoint.tree import flatten


@pytest.fixture(autouse=True)
def everything_as_it_was() -> Iterator[None]:
    bit_generator = np.random.get_bit_generator()
    kept = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    yield
    np.random.set_bit_generator(bit_generator)
    random.setstate(kept[0])
    np.random.set_state(kept[1])
    torch.set_rng_state(kept[2])


def through_checkpoint(state: Any) -> Any:
    flat = flatten(state)
    return rebuild(json.loads(json.dumps(flat.tree, allow_nan=False)), flat.tensors)


def draw() -> list[Any]:
    """Of every kind: those that keep a second number for the next call come an odd number of
    times."""
    return [
        *(random.random(), random.gauss(0.0, 1.0), random.getrandbits(70)),
        *np.random.standard_normal(3).tolist(),
        *(np.random.randint(1 << 40), float(np.random.rand())),
        *torch.randn(3).tolist(),
        *torch.randn(17, dtype=torch.float64).tolist(),
        *torch.randperm(9).tolist(),
        torch.empty(()).exponential_().item(),
    ]


@pytest.mark.parametrize("num_before", (0, 1, 2, 700))
def test_numbers_go_on_bit_for_bit(num_before: int) -> None:
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    for _ in range(num_before):
        draw()
    state = random_state.capture()
    expected = [draw() for _ in range(3)]
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    draw()
    random_state.restore(through_checkpoint(state))
    assert [draw() for _ in range(3)] == expected


def test_capturing_changes_nothing_and_is_a_copy() -> None:
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    expected = [draw(), draw()]
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    first = random_state.capture()
    found = [draw()]
    random_state.capture()
    assert [*found, draw()] == expected
    random_state.restore(first)
    assert draw() == expected[0]


def test_another_bit_generator_of_numpy() -> None:
    np.random.set_bit_generator(np.random.PCG64(5))
    np.random.random(3)
    state = through_checkpoint(random_state.capture())
    expected = np.random.random(5).tolist()
    random_state.restore(state)
    assert np.random.random(5).tolist() == expected
    np.random.set_bit_generator(np.random.MT19937(5))
    before = torch.get_rng_state()
    torch.rand(3)
    with pytest.raises(ValueError, match=r"has that of numpy's PCG64, np\.random uses MT19937"):
        random_state.restore(state)
    assert not torch.equal(torch.get_rng_state(), before)  # nothing was set


@pytest.mark.parametrize(
    "make, next_of",
    [
        (lambda: torch.Generator().manual_seed(5), lambda g: torch.rand(5, generator=g).tolist()),
        (lambda: random.Random(5), lambda g: [g.random(), g.gauss(0, 1)]),
        (lambda: np.random.default_rng(5), lambda g: g.random(5).tolist()),
        (lambda: np.random.Generator(np.random.MT19937(5)), lambda g: g.random(5).tolist()),
        (lambda: np.random.Generator(np.random.Philox(5)), lambda g: g.random(5).tolist()),
        (lambda: np.random.RandomState(5), lambda g: g.standard_normal(5).tolist()),
    ],
)
def test_generator_objects(make: Any, next_of: Any) -> None:
    generator = make()
    next_of(generator)
    state = through_checkpoint(random_state.generator_state(generator))
    expected = [next_of(generator), next_of(generator)]
    other = make()
    random_state.set_generator_state(other, state)
    assert [next_of(other), next_of(other)] == expected


def test_what_is_no_generator_has_no_state() -> None:
    for value in (None, 5, "generator", object(), random.SystemRandom()):
        assert random_state.generator_state(value) is None


def test_a_generator_of_another_kind_is_named() -> None:
    state = random_state.generator_state(random.Random(5))
    with pytest.raises(TypeError, match="another kind of generator than Generator"):
        random_state.set_generator_state(torch.Generator(), state)


# --- GPUs: what is asked of torch.cuda, recorded here; on a GPU in tests/python/gpu ---------------


class Devices:
    """Generators of GPUs, for torch.cuda's functions."""

    def __init__(self, count: int, current: int = 0) -> None:
        self.states = [torch.full((16,), 10 + i, dtype=torch.uint8) for i in range(count)]
        self.current = current

    def take_the_place_of_cuda(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(torch.cuda, "is_available", lambda: bool(self.states))
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: len(self.states))
        patch.setattr(torch.cuda, "current_device", lambda: self.current)
        patch.setattr(torch.cuda, "get_rng_state", lambda i: self.states[i].clone())
        patch.setattr(torch.cuda, "set_rng_state", self.set_state)

    def set_state(self, state: torch.Tensor, index: int) -> None:
        self.states[index] = state.clone()

    def values(self) -> list[int]:
        return [int(state[0]) for state in self.states]


def test_every_gpus_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    Devices(3).take_the_place_of_cuda(monkeypatch)
    state = through_checkpoint(random_state.capture())
    other = Devices(3)
    other.states = [state + 100 for state in other.states]
    other.take_the_place_of_cuda(monkeypatch)
    random_state.restore(state)
    assert other.values() == [10, 11, 12]


def test_the_gpu_in_use_gets_the_state_of_the_one_that_was(monkeypatch: pytest.MonkeyPatch) -> None:
    Devices(3, current=2).take_the_place_of_cuda(monkeypatch)
    state = random_state.capture()
    here = Devices(1)
    here.take_the_place_of_cuda(monkeypatch)
    with pytest.warns(RuntimeWarning, match="has that of 3 GPUs, this process sees 1"):
        random_state.restore(state)
    assert here.values() == [12]


def test_without_a_gpu_the_rest_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        Devices(1).take_the_place_of_cuda(patch)
        torch.manual_seed(4)
        state = random_state.capture()
        expected = torch.rand(3)
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.warns(RuntimeWarning, match=r"has that of 1 GPU\(s\), this process sees none"):
        random_state.restore(state)
    assert torch.equal(torch.rand(3), expected)
