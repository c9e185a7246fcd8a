"""State dicts: exchanged with torch both ways, saved, loaded, of older versions, and wrong ones."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from optimizer_cases import (
    RULES,
    USUAL_RULES,
    assert_same_step,
    bits,
    ours_and_torchs,
    parameters_of,
    random_gradients,
    set_gradients,
)

STEPS_ULPS = 64.0  # a dozen steps here; see test_against_torch
TENSORS = [torch.ones(3), torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)]


def run(seed: int, *optimizers: torch.optim.Optimizer) -> None:
    """Three steps of equal gradients."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        gradients = random_gradients(parameters_of(optimizers[0]), generator)
        for optimizer in optimizers:
            set_gradients(optimizer, gradients)
            optimizer.step()


def copy_parameters(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for given, taken in zip(parameters_of(source), parameters_of(target), strict=True):
            taken.copy_(given)


@pytest.mark.parametrize(("rule", "options"), RULES)
def test_the_layout_is_torchs(rule: str, options: dict[str, Any]) -> None:
    ours, theirs = ours_and_torchs(rule, TENSORS, options)
    run(1, ours, theirs)
    got, want = ours.state_dict(), theirs.state_dict()
    same = {"foreach": None}
    assert [{**g, **same} for g in got["param_groups"]] == [
        {**g, **same} for g in want["param_groups"]
    ]
    assert got["state"].keys() == want["state"].keys()
    for index, entry in want["state"].items():
        assert got["state"][index].keys() == entry.keys()
        for name, value in entry.items():
            mine = got["state"][index][name]
            assert (mine.dtype, mine.shape) == (value.dtype, value.shape)
            if name != "step":  # torch's momentum has its first gradient's strides
                assert mine.stride() == TENSORS[index].stride()


@pytest.mark.parametrize("through_a_file", [False, True])
@pytest.mark.parametrize(("rule", "options"), RULES)
def test_exchange_with_torch(rule: str, options: dict[str, Any], through_a_file: bool) -> None:
    ours, theirs = ours_and_torchs(rule, TENSORS, options)
    run(1, ours, theirs)
    fresh_ours, fresh_theirs = ours_and_torchs(rule, TENSORS, options)
    for source, target in ((ours, fresh_theirs), (theirs, fresh_ours)):
        state = copy.deepcopy(source.state_dict())
        if through_a_file:
            file = io.BytesIO()
            torch.save(source.state_dict(), file)
            file.seek(0)
            state = torch.load(file)
        target.load_state_dict(state)
        copy_parameters(source, target)
    run(2, ours, theirs, fresh_ours, fresh_theirs)
    assert_same_step(ours, fresh_theirs, STEPS_ULPS)
    assert_same_step(fresh_ours, theirs, STEPS_ULPS)


@pytest.mark.parametrize(("rule", "options"), RULES)
def test_resuming_is_exact_to_the_bit(rule: str, options: dict[str, Any]) -> None:
    through, _ = ours_and_torchs(rule, TENSORS, options)
    run(1, through)
    resumed, _ = ours_and_torchs(rule, TENSORS, {**options, "lr": 123.0})
    resumed.load_state_dict(copy.deepcopy(through.state_dict()))
    copy_parameters(through, resumed)
    run(2, through, resumed)
    for mine, other in zip(parameters_of(through), parameters_of(resumed), strict=True):
        assert bits(mine) == bits(other)
        for name, value in through.state[mine].items():
            assert bits(value) == bits(resumed.state[other][name])


def test_dicts_of_older_torch_versions() -> None:
    ours, theirs = ours_and_torchs("AdamW", TENSORS, {"lr": 0.05})
    run(1, ours, theirs)
    old = copy.deepcopy(theirs.state_dict())
    for entry in old["state"].values():
        entry["step"] = float(entry["step"])  # before torch 1.12 steps were numbers
    for group in old["param_groups"]:
        for name in ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused"):
            del group[name]
        del group["decoupled_weight_decay"]
    fresh, _ = ours_and_torchs("AdamW", TENSORS, {"lr": 0.05})
    fresh.load_state_dict(old)
    copy_parameters(theirs, fresh)
    run(2, theirs, fresh)
    assert_same_step(fresh, theirs, STEPS_ULPS)
    assert fresh.state[parameters_of(fresh)[0]]["step"].dtype == torch.float32


def test_old_sgd_dicts() -> None:
    options = {"lr": 0.05, "momentum": 0.9}
    ours, theirs = ours_and_torchs("SGD", TENSORS, options)
    old = copy.deepcopy(theirs.state_dict())  # never stepped: some versions wrote None buffers
    old["state"] = {0: {"momentum_buffer": None}}
    for name in ("maximize", "foreach", "differentiable", "fused", "nesterov"):
        del old["param_groups"][0][name]
    ours.load_state_dict(old)
    run(2, ours, theirs)
    assert_same_step(ours, theirs, STEPS_ULPS)


def test_one_states_file_is_small() -> None:
    tensors = [torch.ones(10), torch.ones(200_000)]
    optimizer, _ = ours_and_torchs("AdamW", tensors, {})
    set_gradients(optimizer, tensors)
    optimizer.step()
    for name, value in optimizer.state[parameters_of(optimizer)[0]].items():
        assert value.untyped_storage().nbytes() == value.numel() * value.element_size(), name
        file = io.BytesIO()
        torch.save(value, file)
        assert file.tell() < 4096, name  # the arena is 800 kB


@pytest.mark.parametrize(("rule", "options"), USUAL_RULES)
def test_a_loaded_state_is_copied_not_shared(rule: str, options: dict[str, Any]) -> None:
    source, theirs = ours_and_torchs(rule, TENSORS, options)
    run(1, source, theirs)
    given = source.state_dict()
    target, _ = ours_and_torchs(rule, TENSORS, options)
    target.load_state_dict(given)
    copy_parameters(source, target)
    before = {i: {n: bits(v) for n, v in e.items()} for i, e in given["state"].items()}
    run(2, target, theirs)
    assert_same_step(target, theirs, STEPS_ULPS)
    after = {i: {n: bits(v) for n, v in e.items()} for i, e in given["state"].items()}
    assert after == before


def test_parameters_state_goes_to_the_parameters_dtype() -> None:
    source, _ = ours_and_torchs("AdamW", TENSORS, {})
    run(1, source)
    target, _ = ours_and_torchs("AdamW", [t.bfloat16() for t in TENSORS], {})
    target.load_state_dict(source.state_dict())
    run(2, target)
    entry = target.state[parameters_of(target)[0]]
    assert {n: v.dtype for n, v in entry.items()} == {
        "step": torch.float32,
        "exp_avg": torch.bfloat16,
        "exp_avg_sq": torch.bfloat16,
    }


def test_state_of_other_parameters_is_refused_and_lost_nowhere() -> None:
    source, _ = ours_and_torchs("AdamW", [torch.ones(5), torch.ones(4)], {})
    set_gradients(source, [torch.ones(5), torch.ones(4)])
    source.step()
    target, _ = ours_and_torchs("AdamW", [torch.ones(5), torch.ones(3)], {})
    target.load_state_dict(source.state_dict())
    set_gradients(target, [torch.ones(5), torch.ones(3)])
    for _ in range(2):  # and again: the first refusal must not have reset the state
        with pytest.raises(
            ValueError, match=r"'exp_avg' of parameter 'group0\.param1'.*\(3,\).*\(4,\)"
        ):
            target.step()
    assert all(torch.equal(p.detach(), torch.ones(p.shape)) for p in parameters_of(target))
    second = target.state[parameters_of(target)[1]]
    assert torch.equal(second["exp_avg"], source.state_dict()["state"][1]["exp_avg"])


def test_a_dict_of_another_number_of_parameters_is_refused() -> None:
    source, _ = ours_and_torchs("AdamW", TENSORS, {})
    target, _ = ours_and_torchs("AdamW", TENSORS[:1], {})
    with pytest.raises(ValueError, match="size of optimizer's group"):
        target.load_state_dict(source.state_dict())
