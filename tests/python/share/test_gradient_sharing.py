"""What GradientSharing promises, on one to three ranks."""

from __future__ import annotations

import copy
import io
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import tradewind as tw
from share.ranks import Ranks

CODECS = ("none", "bf16", "fp16", "int8")


def _mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5), nn.Tanh(), nn.Linear(5, 1))


def _batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(6, 7, generator=torch.Generator().manual_seed(100 * step + rank))


def _gradients_of(model: nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
    model(inputs).square().mean().backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def _mean(gradients: list[torch.Tensor]) -> torch.Tensor:
    """In rank order, as the exchange adds."""
    total = gradients[0].clone()
    for gradient in gradients[1:]:
        total += gradient
    return total / len(gradients)


def _means(model: nn.Module, num_ranks: int, step: int = 0) -> list[torch.Tensor]:
    """What the ranks get, computed by one process."""
    of_ranks = [_gradients_of(model, _batch(rank, step)) for rank in range(num_ranks)]
    return [_mean(list(same)) for same in zip(*of_ranks, strict=True)]


def _equal(given: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))


# --- means ----------------------------------------------------------------------------------------


def trains_as_one_process(rank: int, num_ranks: int) -> None:
    model, alone = tw.GradientSharing(_mlp(seed=rank), bucket_cap_mb=0.0005), _mlp(seed=0)
    assert _equal(list(model.parameters()), list(alone.parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    alone_optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        model(_batch(rank, step)).square().mean().backward()
        optimizer.step()
        alone_optimizer.zero_grad()
        for parameter, mean in zip(alone.parameters(), _means(alone, num_ranks, step), strict=True):
            parameter.grad = mean
        alone_optimizer.step()
        # Bitwise: the sum is taken in rank order wherever it is taken.
        assert _equal(list(model.parameters()), list(alone.parameters())), step


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_train_as_one_process_does_to_the_bit(ranks: Ranks, num_ranks: int) -> None:
    ranks.run(trains_as_one_process, num_ranks, num_ranks=num_ranks)


def test_it_runs_alone_without_a_process_group() -> None:
    model, alone = tw.GradientSharing(_mlp()), _mlp()
    assert _equal(_gradients_of(model, _batch(0)), _gradients_of(alone, _batch(0)))
    assert model.process_group is None


class Paths(nn.Module):
    """`used` says which layers a forward goes through; all of one input size."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(num_layers))

    def forward(self, inputs: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        for index in used:
            inputs = self.layers[index](inputs)
        return inputs.sum()

    def grad(self, index: int) -> torch.Tensor | None:
        return self.layers[index].weight.grad


def handles_unused_parameters(rank: int) -> None:
    model = Paths()
    shared = tw.GradientSharing(model)
    ones = torch.ones(1, 4)
    shared(ones, (0, 1) if rank == 0 else (0,)).backward()
    assert model.grad(2) is None  # no rank used it
    assert model.grad(1) is not None  # rank 0 did
    alone = Paths()
    alone(ones, (0, 1)).backward()
    assert torch.equal(model.grad(1), alone.grad(1) / 2)
    # Now layers 0 and 1 hold gradients, and one of them is globally unused.
    before = model.grad(1).clone()
    model.layers[0].weight.grad = None
    shared(ones, (0,)).backward()
    assert torch.equal(model.grad(1), before)
    assert model.grad(2) is None


def test_unused_parameters_keep_their_grad(ranks: Ranks) -> None:
    ranks.run(handles_unused_parameters)


def accumulates(rank: int) -> None:
    """The third layer is used by rank 1 in a microbatch that is not shared, and never after."""
    model, ones = Paths(), torch.ones(1, 4)
    shared = tw.GradientSharing(model)
    for _ in range(3):
        model.zero_grad()
        with shared.no_sync():
            shared(ones, (0, 2) if rank == 1 else (0,)).backward()
        local = model.layers[0].weight.grad.clone()
        shared(ones, (0, 1)).backward()
        alone = [Paths(), Paths()]
        for of_rank, of in enumerate(alone):
            of(ones, (0, 2) if of_rank == 1 else (0,)).backward()
            if of_rank == rank:
                assert torch.equal(local, of.grad(0))
            of(ones, (0, 1)).backward()
        for index in (0, 1):
            assert torch.equal(model.grad(index), _mean([of.grad(index) for of in alone]))
        assert torch.equal(model.grad(2), alone[1].grad(2) / 2)


def test_accumulation_counts_what_any_microbatch_used(ranks: Ranks) -> None:
    ranks.run(accumulates)


def combines_no_sync(rank: int) -> None:
    """As with DistributedDataParallel, the forward says whether its backward is shared."""
    for forward_inside in (False, True):
        for backward_inside in (False, True):
            model = tw.GradientSharing(_mlp())
            with model.no_sync() if forward_inside else nullcontext():
                loss = model(_batch(rank)).square().mean()
            with model.no_sync() if backward_inside else nullcontext():
                loss.backward()
            given = [p.grad.clone() for p in model.parameters()]
            own = _gradients_of(_mlp(), _batch(rank))
            expected = own if forward_inside else _means(_mlp(), 2)
            assert _equal(given, expected), (forward_inside, backward_inside)
            model.zero_grad()
            model(_batch(rank)).square().mean().backward()
            assert _equal([p.grad for p in model.parameters()], _means(_mlp(), 2))


def test_no_sync_with_forward_and_backward_inside_and_outside(ranks: Ranks) -> None:
    ranks.run(combines_no_sync)


# --- models ---------------------------------------------------------------------------------------


def takes_many_kinds(rank: int) -> None:
    torch.manual_seed(rank)
    model = nn.ParameterDict(
        {
            "complex_": nn.Parameter(torch.randn(3, 2, dtype=torch.complex64)),
            "double_": nn.Parameter(torch.randn(5, dtype=torch.float64)),
            "half_": nn.Parameter(torch.randn(5).bfloat16()),
            "empty": nn.Parameter(torch.empty(0, 4)),
            "strided": nn.Parameter(torch.randn(4, 6)[:, ::2]),
            "transposed": nn.Parameter(torch.randn(4, 6).t()),
            "channels_last": nn.Parameter(
                torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
            ),
            "scalar": nn.Parameter(torch.randn(())),
            "frozen": nn.Parameter(torch.randn(3), requires_grad=False),
        }
    )
    names = {id(p): name for name, p in model.items()}
    shared = tw.GradientSharing(_Sum(model))
    states = [p.detach().clone() for p in shared.parameters()]
    dist.all_gather_object(gathered := [None, None], states)
    assert _equal(gathered[0], gathered[1])
    shared(float(rank + 1)).backward()
    for parameter in shared.parameters():
        name = names[id(parameter)]
        if name == "frozen":
            assert parameter.grad is None
            continue
        # Of ranks 1 and 2: 1.5, which every dtype has.
        assert torch.equal(parameter.grad, torch.full_like(parameter, 1.5)), name
        if name in ("channels_last", "transposed"):
            assert parameter.grad.stride() == parameter.stride(), name


class _Sum(nn.Module):
    def __init__(self, parameters: nn.ParameterDict) -> None:
        super().__init__()
        self.held = parameters

    def forward(self, factor: float) -> torch.Tensor:
        parts = [p.sum() * factor for p in self.held.values()]
        return sum(part.real.double() if part.is_complex() else part.double() for part in parts)


def test_every_kind_of_parameter_is_shared(ranks: Ranks) -> None:
    ranks.run(takes_many_kinds)


class Outputs:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Checkpointed(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind = _mlp(), kind

    def forward(self, inputs: torch.Tensor) -> Any:
        if self.kind in ("reentrant", "not reentrant"):
            inputs = inputs.clone().requires_grad_()
            hidden = checkpoint(self.net[:2], inputs, use_reentrant=self.kind == "reentrant")
            return self.net[2:](hidden)
        outputs = self.net(inputs)
        return Outputs(outputs) if self.kind == "custom output" else {"deep": [outputs]}


def shares_through(rank: int, kind: str) -> None:
    model = tw.GradientSharing(Checkpointed(kind))
    for step in range(3):
        outputs = model(_batch(rank, step))
        if kind == "custom output":
            outputs = outputs.value
        elif kind == "nested output":
            outputs = outputs["deep"][0]
        outputs.square().mean().backward()
        given = [p.grad.clone() for p in model.parameters()]
        assert _equal(given, _means(_mlp(), 2, step)), step
        model.zero_grad()


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant", "custom output", "nested output"])
def test_checkpointing_and_outputs_of_any_kind(ranks: Ranks, kind: str) -> None:
    ranks.run(shares_through, kind)


class Buffered(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("count", torch.tensor([10 * rank]))
        self.register_buffer("own", torch.tensor([rank]))
        self.register_parameter("mine", nn.Parameter(torch.tensor([float(rank)])))
        self._ddp_params_and_buffers_to_ignore = ["own", "mine"]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.linear(inputs) * self.mine


def shares_buffers(rank: int) -> None:
    """By keyword: the buffer at the start, and after rank 1 changed it and one forward ran."""
    for keywords, at_start, after in (
        ({}, 0, 1),
        ({"forward_sync_buffers": False}, 0, 1 + 5 * rank),
        ({"broadcast_buffers": False}, 10 * rank, 15 * rank + 1),
        ({"broadcast_buffers": False, "forward_sync_buffers": True}, 0, 1),
    ):
        model = tw.GradientSharing(Buffered(rank), **keywords)
        assert model.module.count.item() == at_start, keywords
        model.module.count += 5 * rank
        model(torch.ones(1, 2)).sum().backward()
        assert model.module.count.item() == after, keywords
        assert model.module.own.item() == rank
        assert model.module.mine.item() == rank
        assert model.parameters_to_ignore == {"own", "mine"}


def test_buffers_follow_rank_0_and_ignored_ones_are_left_alone(ranks: Ranks) -> None:
    ranks.run(shares_buffers)


def shares_twice(rank: int) -> None:
    first, second = tw.GradientSharing(_mlp(1)), tw.GradientSharing(_mlp(2))
    for step in range(2):
        loss = (
            first(_batch(rank, step)).square().mean() + second(_batch(rank, step)).square().mean()
        )
        loss.backward()
        for model, seed in ((first, 1), (second, 2)):
            given = [p.grad.clone() for p in model.parameters()]
            assert _equal(given, _means(_mlp(seed), 2, step))
            model.zero_grad()


def test_two_models_in_one_backward(ranks: Ranks) -> None:
    ranks.run(shares_twice)


def shares_in_a_subgroup(rank: int) -> str:
    group = dist.new_group([0, 2])
    if rank == 1:
        with pytest.raises(ValueError, match="not one of its members"):
            tw.GradientSharing(_mlp(), process_group=group)
        return "left out"
    model = tw.GradientSharing(_mlp(), process_group=group)
    model(_batch(rank)).square().mean().backward()
    expected = [
        _mean([a, b])
        for a, b in zip(*(_gradients_of(_mlp(), _batch(r)) for r in (0, 2)), strict=True)
    ]
    assert _equal([p.grad for p in model.parameters()], expected)
    with pytest.raises(ValueError, match="a group of its own"):
        copy.deepcopy(model)
    return "shared"


def test_a_subgroup(ranks: Ranks) -> None:
    found = ranks.run(shares_in_a_subgroup, num_ranks=3)
    assert found == ["shared", "left out", "shared"]


def copies(rank: int) -> None:
    model = tw.GradientSharing(_mlp())
    assert all(name.startswith("module.") for name in model.state_dict())
    if rank == 0:  # as an average of weights is kept, on one rank alone
        alone = copy.deepcopy(model)
        with torch.no_grad():
            assert torch.equal(alone(_batch(0)), model.module(_batch(0)))
        assert alone.num_rounds == 0
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    loaded(_batch(rank)).square().mean().backward()
    assert _equal([p.grad for p in loaded.parameters()], _means(_mlp(), 2))
    assert all(p.grad is None for p in model.parameters())


def test_copies_and_pickles_share_once_they_train(ranks: Ranks) -> None:
    ranks.run(copies)


def compiles(rank: int) -> None:
    model = tw.GradientSharing(torch.compile(_mlp(), backend="aot_eager"))
    outer = torch.compile(tw.GradientSharing(_mlp()), backend="aot_eager")
    for made in (model, outer):
        made(_batch(rank)).square().mean().backward()
        for parameter, mean in zip(made.parameters(), _means(_mlp(), 2), strict=True):
            # The compiled backward may sum in another order.
            torch.testing.assert_close(parameter.grad, mean, rtol=1e-5, atol=1e-7)


def test_compiled_models(ranks: Ranks) -> None:
    ranks.run(compiles, timeout_s=120)


# --- uneven inputs --------------------------------------------------------------------------------


def joins(rank: int, divide_by_all: bool, interval: int) -> None:
    num_own = (2, 5)
    model = Paths()
    shared, ones = tw.GradientSharing(model), torch.ones(1, 4)
    used = [(0, 1), (0,)]
    kept = None
    with shared.join(divide_by_initial_world_size=divide_by_all):
        for step in range(num_own[rank]):
            syncs = step % interval == 0
            with nullcontext() if syncs else shared.no_sync():
                shared(ones, used[rank]).backward()
            if not syncs:
                model.zero_grad()
                continue
            present = [r for r in (0, 1) if step < num_own[r]]
            alone = Paths()
            (sum(alone(ones, used[r]) for r in present)).backward()
            count = 2 if divide_by_all else len(present)
            # Two terms, in another order: one rounding apart.
            torch.testing.assert_close(model.grad(0), alone.grad(0) / count, rtol=1e-6, atol=0)
            if step < num_own[rank] - 1:
                model.zero_grad()
            else:
                kept = model.grad(0).clone()
            with torch.no_grad():  # an evaluation between steps
                shared(ones, used[rank])
    if kept is not None:
        # Rounds that it attended after its last step are not its own.
        assert torch.equal(model.grad(0), kept)


@pytest.mark.parametrize("divide_by_all", [True, False])
@pytest.mark.parametrize("interval", [1, 2])
def test_join_lets_ranks_run_out_of_data(ranks: Ranks, divide_by_all: bool, interval: int) -> None:
    ranks.run(joins, divide_by_all, interval)


def joins_one_after_the_other(rank: int) -> None:
    shared = tw.GradientSharing(nn.Linear(5, 5, bias=False))
    for _ in range(2):
        with shared.join():
            for step in range(3 if rank == 0 else 5):
                shared(torch.ones(1, 5)).sum().backward()
                expected = 1.0 if step < 3 else 0.5
                assert torch.equal(shared.module.weight.grad, torch.full((5, 5), expected))
                shared.zero_grad()


def test_join_twice(ranks: Ranks) -> None:
    ranks.run(joins_one_after_the_other)


def joins_until_the_first_ends(rank: int) -> int:
    shared = tw.GradientSharing(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    num_steps = 0
    with pytest.raises(RuntimeError, match="exhausted"):  # noqa: SIM117
        with shared.join(throw_on_early_termination=True):
            for _ in range(3 if rank == 0 else 6):
                shared(torch.randn(4, 2)).sum().backward()
                num_steps += 1
    return num_steps


def test_join_can_end_with_the_first_rank_without_data(ranks: Ranks) -> None:
    assert ranks.run(joins_until_the_first_ends) == [3, 3]


# --- errors ---------------------------------------------------------------------------------------


def differs(rank: int, what: str) -> None:
    model: nn.Module = nn.Linear(4, 4)
    keywords: dict[str, Any] = {}
    if rank == 1:
        if what == "shape":
            model = nn.Linear(4, 5)
        elif what == "count":
            model = nn.Sequential(model, nn.Linear(4, 4))
        elif what == "dtype":
            model = model.double()
        elif what == "frozen":
            model.bias.requires_grad_(False)
        else:
            keywords["codec"] = "bf16"
    tw.GradientSharing(model, timeout=timedelta(seconds=20), **keywords)


@pytest.mark.parametrize("what", ["shape", "count", "dtype", "frozen", "options"])
def test_ranks_that_differ_are_an_error_on_every_rank(ranks: Ranks, what: str) -> None:
    for outcome in ranks.outcomes(differs, what):
        assert outcome.type == "ValueError", outcome
        assert "rank 0 and rank 1 differ in" in outcome.message
        assert ("options" if what == "options" else "parameters") in outcome.message


def waits_for_nobody(rank: int) -> None:
    if rank == 0:
        tw.GradientSharing(nn.Linear(2, 2), timeout=timedelta(seconds=1))


def test_a_rank_that_does_not_come_is_named(ranks: Ranks) -> None:
    first, _ = ranks.outcomes(waits_for_nobody)
    assert first.type == "SharingError"
    assert "missing: rank 1" in first.message


def outlives_its_group(rank: int) -> None:
    model = tw.GradientSharing(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    dist.destroy_process_group()
    model(torch.ones(1, 2))


def test_a_destroyed_group_is_a_named_error(ranks: Ranks) -> None:
    for outcome in ranks.outcomes(outlives_its_group):
        assert outcome.type == "ValueError"
        assert "has been destroyed" in outcome.message


def gives_sparse_gradients(rank: int) -> None:
    model = tw.GradientSharing(nn.Sequential(nn.Embedding(5, 2, sparse=True)))
    model(torch.tensor([1, 2])).sum().backward()


def test_sparse_gradients_are_refused_by_name(ranks: Ranks) -> None:
    for outcome in ranks.outcomes(gives_sparse_gradients):
        assert outcome.type in ("RuntimeError", "SharingError"), outcome
    assert any(
        "parameter '0.weight': expected a dense gradient" in outcome.message
        for outcome in ranks.outcomes(gives_sparse_gradients)
    )


def _of(parameter: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.register_parameter("p", nn.Parameter(parameter, requires_grad=False))
    return module


def _stepping_in_backward() -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight._in_backward_optimizers = [object()]  # as _apply_optimizer_in_backward leaves it
    return model


@pytest.mark.parametrize(
    ("make", "keywords", "error", "message"),
    [
        (nn.Module, {}, RuntimeError, "nothing to share"),
        (lambda: _of(torch.ones(2)), {}, RuntimeError, "requires a gradient"),
        (lambda: nn.LazyLinear(3), {}, RuntimeError, "'weight': is lazy"),
        (lambda: [1], {}, TypeError, "module: expected a torch.nn.Module, got list"),
        (lambda: nn.Linear(2, 2, device="meta"), {}, NotImplementedError, "'weight': is on meta"),
        (_stepping_in_backward, {}, NotImplementedError, "'weight': has an optimizer"),
        (_mlp, {"codec": "int4"}, ValueError, "codec: expected one of none"),
        (_mlp, {"strategy": "ring"}, ValueError, "strategy: expected one of"),
        (_mlp, {"strategy": "sharded"}, ValueError, "use tw.Engine"),
        (_mlp, {"strategy": "periodic"}, ValueError, "use tw.Engine"),
        (_mlp, {"overlap": "never"}, ValueError, "overlap: expected one of"),
        (_mlp, {"deterministic": 1}, TypeError, "deterministic: expected True or False"),
        (_mlp, {"bucket_cap_mb": 0}, ValueError, "bucket_mb: expected a positive number"),
        (_mlp, {"timeout": 3}, TypeError, "timeout: expected a datetime.timedelta, got int"),
        (_mlp, {"timeout": timedelta(0)}, ValueError, "timeout: expected a positive number"),
        (_mlp, {"device_ids": [0]}, NotImplementedError, "device_ids=None"),
        (_mlp, {"output_device": 0}, NotImplementedError, "output_device=None"),
        (_mlp, {"buckets": 3}, TypeError, "unknown option 'buckets'"),
        (_mlp, {"mixed_precision": object()}, NotImplementedError, "mixed_precision"),
        (_mlp, {"device_mesh": object()}, NotImplementedError, "device_mesh"),
        (_mlp, {"bucket_cap_mb_list": [1]}, NotImplementedError, "bucket_cap_mb_list"),
        (_mlp, {"delay_all_reduce_named_params": []}, NotImplementedError, "delay_all_reduce"),
        (_mlp, {"param_to_hook_all_reduce": 1}, NotImplementedError, "param_to_hook_all_reduce"),
        (_mlp, {"skip_all_reduce_unused_params": True}, NotImplementedError, "skip_all_reduce"),
        (_mlp, {"batched_grad_copy": True}, NotImplementedError, "batched_grad_copy"),
    ],
)
def test_bad_arguments_are_refused_by_name(
    make: Any, keywords: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tw.GradientSharing(make(), **keywords)


@pytest.mark.parametrize(
    "keywords",
    [
        {"dim": 1},
        {"find_unused_parameters": True},
        {"check_reduction": True},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"init_sync": False},
        {"bucket_cap_mb": 25},
        {"mixed_precision": None, "device_mesh": None, "batched_grad_copy": False},
        {"device_ids": None, "output_device": None},
        {"device_ids": []},
    ],
)
def test_keywords_of_distributed_data_parallel_are_taken(keywords: dict[str, Any]) -> None:
    model = tw.GradientSharing(_mlp(), **keywords)
    model._set_static_graph()
    assert _equal(_gradients_of(model, _batch(0)), _gradients_of(_mlp(), _batch(0)))


def test_hooks_on_buckets_are_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="codec='bf16'"):
        tw.GradientSharing(_mlp()).register_comm_hook(None, lambda state, bucket: None)


# --- what is reported -----------------------------------------------------------------------------


def finds_nonfinite(rank: int) -> list[tuple[int, str, int, int]]:
    model = tw.GradientSharing(_mlp())
    assert model.nonfinite == []
    bad = torch.full((6, 7), float("nan")) if rank == 1 else _batch(rank)
    with model.no_sync():
        model(_batch(rank)).square().mean().backward()
    model(bad).square().mean().backward()
    found = [(n.rank, n.parameter_name, n.microbatch, n.num_parameters) for n in model.nonfinite]
    model.zero_grad()
    model(_batch(rank)).square().mean().backward()
    assert model.nonfinite == []
    return found


def test_gradients_that_are_not_finite_are_told_by_rank_name_and_microbatch(ranks: Ranks) -> None:
    for found in ranks.run(finds_nonfinite):
        ((rank, name, microbatch, num_parameters),) = found
        assert (rank, microbatch, num_parameters) == (1, 2, 6)
        assert name in dict(_mlp().named_parameters())


def counts(rank: int) -> dict[str, float]:
    model = tw.GradientSharing(nn.Linear(1000, 1, bias=False))
    for _ in range(3):
        model(torch.ones(1, 1000)).sum().backward()
    with model.no_sync():
        model(torch.ones(1, 1000)).sum().backward()
    assert model.num_rounds == 3
    return model.statistics()


def test_statistics(ranks: Ranks) -> None:
    for found in ranks.run(counts):
        assert set(found) == {"num_rounds", "sent_bytes", "waited_s"}
        assert found["num_rounds"] == 3
        # Each of two ranks sends half of the gradients and half of the means: 4000 bytes a round.
        assert found["sent_bytes"] == pytest.approx(3 * 4000, rel=0.1)
        assert found["waited_s"] >= 0


def compresses(rank: int, codec: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    model = tw.GradientSharing(_mlp(), codec=codec)
    given = _gradients_of(model, _batch(rank))
    return [g.clone() for g in given], _means(_mlp(), 2)


@pytest.mark.parametrize("codec", CODECS)
def test_codecs_are_close_and_the_same_on_every_rank(ranks: Ranks, codec: str) -> None:
    first, second = ranks.run(compresses, codec)
    assert _equal(first[0], second[0])
    # A gradient and a mean are each rounded once: to 8 bits of mantissa, 11 bits, or half a 127th
    # of the largest value (of a block, so of the model at most).
    step = {"none": 0.0, "bf16": 2**-8, "fp16": 2**-11, "int8": 0.5 / 127}[codec]
    largest = max(
        g.abs().max().item() for rank in (0, 1) for g in _gradients_of(_mlp(), _batch(rank))
    )
    for given, exact in zip(*first, strict=True):
        assert (given - exact).abs().max().item() <= 2 * step * largest


def feeds_back(rank: int, codec: Any) -> tuple[float, float]:
    """A constant gradient, most of which is far below the largest value of its block."""
    model = tw.GradientSharing(nn.Linear(512, 1, bias=False), codec=codec)
    factor = torch.full((1, 512), 1e-3)
    factor[0, 0] = 1.0
    total, num_rounds = torch.zeros(1, 512), 64
    for _ in range(num_rounds):
        model.zero_grad()
        model(factor).sum().backward()
        total += model.module.weight.grad
    return (total / num_rounds - factor).abs().max().item(), factor.max().item()


@pytest.mark.parametrize("codec", ["bf16", "fp16", "int8"])
def test_what_a_codec_loses_is_sent_later(ranks: Ranks, codec: str) -> None:
    for error, largest in ranks.run(feeds_back, codec):
        # After n rounds what is missing is one rounding of a gradient and one of a mean: two steps
        # of at most 1/127 of the largest value, spread over n. Without feedback int8 would send
        # 0 in place of 1e-3 for ever.
        assert error <= 2 * largest / 127 / 64
