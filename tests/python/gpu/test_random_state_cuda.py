"""The GPU's random numbers go on bit for bit."""

from __future__ import annotations

import torch

from tradewind.checkpoint import random_state


def draw() -> list[torch.Tensor]:
    return [
        torch.rand(5, device="cuda"),
        torch.randn(1000, device="cuda"),
        torch.nn.functional.dropout(torch.ones(3000, device="cuda")),
        torch.rand(5),
    ]


def test_numbers_of_a_gpu_go_on_bit_for_bit() -> None:
    torch.manual_seed(3)
    draw()
    state = random_state.capture()
    expected = draw() + draw()
    torch.manual_seed(9)
    draw()
    random_state.restore(state)
    assert all(torch.equal(a, b) for a, b in zip(draw() + draw(), expected, strict=True))
    assert all(value.device.type == "cpu" for value in state["cuda"])
