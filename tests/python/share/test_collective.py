"""Gradients that travel by collective calls, as they do on a GPU: what the other tests of this
folder ask of messages between ranks, asked of these, and what is theirs alone."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tradewind as tw
from share import test_engine_sharing as engines
from share.collective_ranks import by_collectives, collectives
from share.gradient_cases import Paths, batch, equal, means, mlp
from share.ranks import Ranks
from tradewind._core import native

GRADIENTS = "share.test_gradient_sharing"
MODELS = "share.test_shared_models"
ENGINES = engines.__name__


@pytest.mark.parametrize(
    ("module", "name", "args"),
    [
        (GRADIENTS, "trains_as_one_process", (2,)),
        (GRADIENTS, "handles_unused_parameters", ()),
        (GRADIENTS, "accumulates", ()),
        (GRADIENTS, "combines_no_sync", ()),
        (GRADIENTS, "ignores_outputs", ()),
        (GRADIENTS, "calls_backward_twice", ()),
        (GRADIENTS, "leaves_gradients_undefined", ()),
        (GRADIENTS, "asks_for_gradients_of_inputs", ()),
        (MODELS, "takes_many_kinds", ()),
        (MODELS, "shares_complex_ones", ()),
        (MODELS, "shares_tied_ones", ()),
        (MODELS, "forwards_twice_through_batch_norm", ()),
        (MODELS, "shares_buffers", ()),
        (MODELS, "shares_twice", ()),
        (MODELS, "copies", ()),
        ("share.test_join", "joins", (True, 1)),
        ("share.test_join", "joins", (False, 2)),
        ("share.test_join", "joins_one_after_the_other", ()),
    ],
)
def test_what_messages_do_collectives_do(
    ranks: Ranks, module: str, name: str, args: tuple[Any, ...]
) -> None:
    ranks.run(by_collectives, module, name, *args)


# --- numbers -------------------------------------------------------------------------------------


def trains_in_rank_order(rank: int, num_ranks: int) -> None:
    with collectives():
        model = tw.GradientSharing(mlp(seed=rank), bucket_cap_mb=0.0005, deterministic=True)
        alone = mlp(seed=0)
        for step in range(4):
            model.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            assert isinstance(model._native, native.CollectiveGradients)
            assert model._native.num_buckets() > 1
            found = [p.grad for p in model.parameters()]
            assert equal(found, means(alone, num_ranks, step)), step


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_deterministic_sums_are_those_of_one_process_to_the_bit(
    ranks: Ranks, num_ranks: int
) -> None:
    ranks.run(trains_in_rank_order, num_ranks, num_ranks=num_ranks)


def sums_of_three(rank: int) -> None:
    with collectives():
        model = tw.GradientSharing(mlp())
        for step in range(3):
            model.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            found = [p.grad for p in model.parameters()]
            for given, expected in zip(found, means(mlp(), 3, step), strict=True):
                # Three terms in another order: two roundings of what is at most their largest sum.
                torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-7)


def test_sums_of_three_ranks_come_in_any_order(ranks: Ranks) -> None:
    ranks.run(sums_of_three, num_ranks=3)


CODEC_STEPS = {"none": 0.0, "bf16": 2**-8, "fp16": 2**-11, "int8": 0.5 / 127}


@pytest.mark.parametrize("codec", CODEC_STEPS)
def test_codecs_are_close_and_the_same_on_every_rank(ranks: Ranks, codec: str) -> None:
    name = "compresses"
    first, second = ranks.run(by_collectives, "share.test_sharing_codecs", name, codec)
    assert equal(first[0], second[0])
    largest = max(g.abs().max().item() for rank in (0, 1) for g in means(mlp(), rank + 1))
    for given, exact in zip(*first, strict=True):
        # A gradient and a mean are rounded once each; gradients are at most twice the mean.
        assert (given - exact).abs().max().item() <= 4 * CODEC_STEPS[codec] * largest


@pytest.mark.parametrize("codec", ["bf16", "fp16", "int8"])
def test_what_a_codec_loses_is_sent_later(ranks: Ranks, codec: str) -> None:
    found = ranks.run(by_collectives, "share.test_sharing_codecs", "feeds_back", codec)
    for error, largest in found:
        # As in test_sharing_codecs.py.
        assert error <= 2 * largest / 127 / 64


def owes_after_a_checkpoint(rank: int) -> None:
    with collectives():
        model = tw.GradientSharing(mlp(), codec="int8")
        model(batch(rank)).square().mean().backward()
        state = model.feedback_state_dict()
        assert any(float(owed.abs().sum()) > 0 for owed in state["values"].values())
        again = tw.GradientSharing(mlp(), codec="int8")
        again.load_feedback_state_dict(state)
        for sharing in (model, again):
            sharing.zero_grad()
            sharing(batch(rank, 1)).square().mean().backward()
        pairs = zip(model.parameters(), again.parameters(), strict=True)
        assert all(torch.equal(p.grad, q.grad) for p, q in pairs)
        state["values"] = dict.fromkeys(state["values"], torch.zeros(3))
        with pytest.warns(RuntimeWarning, match="error feedback starts from zero: feedback"):
            again.load_feedback_state_dict(state)


def test_what_a_codec_owes_is_part_of_a_checkpoint(ranks: Ranks) -> None:
    ranks.run(owes_after_a_checkpoint)


# --- what is not finite --------------------------------------------------------------------------


def names_nonfinite(rank: int) -> list[tuple[int, str, int, int]]:
    with collectives():
        model = Paths()
        shared, ones = tw.GradientSharing(model), torch.ones(1, 4)
        with shared.no_sync():
            shared(ones, (0, 1)).backward()
        # A factor of the first layer's input alone: its gradient overflows, the others' do not.
        inputs = ones * (float("inf") if rank == 1 else 1.0)
        shared(inputs, (0,)).backward()
        found = [
            (f.rank, f.parameter_name, f.microbatch, f.num_parameters) for f in shared.nonfinite
        ]
        model.zero_grad()
        shared(ones, (0, 1)).backward()
        assert shared.nonfinite == []
        return found


def test_ranks_with_nonfinite_gradients_are_named(ranks: Ranks) -> None:
    for found in ranks.run(names_nonfinite):
        assert found == [(1, "layers.0.weight", 2, 1)]


# --- the Engine ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_ranks", "accumulate"), [(2, 1), (2, 2), (3, 1)])
def test_an_engine_gives_the_bits_of_one_process(
    ranks: Ranks, num_ranks: int, accumulate: int
) -> None:
    share = {"deterministic": True}
    options = {"clip_norm": 0.3, "accumulate": accumulate}
    expected, norms = engines.train_in_one_process(num_ranks, 0.3, accumulate)
    found = ranks.run(by_collectives, ENGINES, "train", share, options, num_ranks=num_ranks)
    for digest, given in found:
        assert digest == expected
        # The reference adds squares in another order: float64 rounding.
        assert given == pytest.approx(norms, rel=1e-12)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "amp-bf16"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_engine_agrees_with_messages_in_every_precision(
    ranks: Ranks, precision: str, accumulate: int
) -> None:
    share, options = {"deterministic": True}, {"precision": precision, "accumulate": accumulate}
    expected = ranks.run(engines.train, share, options)
    found = ranks.run(by_collectives, ENGINES, "train", share, options)
    assert [digest for digest, _ in found] == [digest for digest, _ in expected]


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("num_samples", [48, 44, 4])
def test_ranks_that_run_out_of_data_follow_the_others(
    ranks: Ranks, num_samples: int, accumulate: int
) -> None:
    given = ("shuffled", num_samples, {}, accumulate)
    outcomes = ranks.run(by_collectives, ENGINES, "takes_batches", *given, num_ranks=3)
    everything = sorted(value for seen, _, _ in outcomes for value in seen)
    assert everything == sorted(2 * [float(value) for value in range(num_samples)])
    assert len({steps for _, steps, _ in outcomes}) == 1
    assert len({digest for _, _, digest in outcomes}) == 1


@pytest.mark.parametrize("strategy", ["allreduce", "hierarchical", "periodic"])
def test_state_goes_on_to_the_bit(ranks: Ranks, strategy: str) -> None:
    assert all(ranks.run(by_collectives, ENGINES, "resumes", strategy))


def test_buffers_are_those_of_rank_0(ranks: Ranks) -> None:
    first, second = ranks.run(by_collectives, ENGINES, "keeps_buffers_alike")
    assert first == pytest.approx(second, rel=1e-6)


def test_periodic_averages_are_those_of_messages(ranks: Ranks) -> None:
    expected = ranks.run(engines.trains_periodically, 3, 9)
    found = ranks.run(by_collectives, ENGINES, "trains_periodically", 3, 9)
    for given, other in zip(found, expected, strict=True):
        assert equal(given, other)


def vetoes(rank: int, codec: Any) -> list[tuple[int, str]]:
    with collectives():
        share = tw.Share(codec=codec)
        engine = tw.Engine(mlp(), tw.AdamW(lr=1e-2), share=share)
        before = [p.detach().clone() for p in engine.model.parameters()]
        factor = float("nan") if rank == 1 else 1.0
        with pytest.warns(RuntimeWarning, match="the update was skipped"):
            result = engine.step(engine(batch(rank)).square().mean() * factor)
        assert result.vetoed
        assert equal([p.detach() for p in engine.model.parameters()], before)
        found = [(one.rank, one.parameter_name) for one in result.nonfinite]
        # One bad step does not spoil the next.
        assert engine.step(engine(batch(rank)).square().mean()).applied
        engine.close()
        return found


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_a_nan_of_one_rank_vetoes_on_all(ranks: Ranks, codec: str) -> None:
    for found in ranks.run(vetoes, codec):
        assert [rank for rank, _ in found] == [1]
        assert found[0][1] in dict(mlp().named_parameters())


# --- what is refused, and what ends -------------------------------------------------------------


def is_refused(rank: int, options: dict[str, Any]) -> None:
    with collectives():
        tw.Engine(mlp(), tw.AdamW(lr=1e-2), share=tw.Share(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "sharded"}, "use strategy='allreduce'"),
        ({"codec": "powersgd"}, "use codec='int8' or 'bf16'"),
        ({"overlap": "next-forward"}, "use overlap='backward' or 'auto'"),
    ],
)
def test_what_only_messages_do_is_refused_by_name(
    ranks: Ranks, options: dict[str, Any], message: str
) -> None:
    for outcome in ranks.outcomes(is_refused, options):
        assert outcome.type == "NotImplementedError"
        assert message in outcome.message


def differs(rank: int) -> None:
    if rank == 0:
        os.environ["TRADEWIND_SHARE_COLLECTIVE"] = "1"
    try:
        tw.GradientSharing(mlp(), timeout=timedelta(seconds=10))
    finally:
        os.environ.pop("TRADEWIND_SHARE_COLLECTIVE", None)


def test_ranks_must_share_in_one_way(ranks: Ranks) -> None:
    for outcome in ranks.outcomes(differs):
        assert outcome.type == "ValueError"
        assert "differ in carried" in outcome.message


def outlives_its_group(rank: int) -> None:
    with collectives():
        model = tw.GradientSharing(mlp())
        model(batch(rank)).square().mean().backward()
        dist.destroy_process_group()
        model(batch(rank))


def test_a_destroyed_group_is_a_named_error(ranks: Ranks) -> None:
    for outcome in ranks.outcomes(outlives_its_group):
        assert outcome.type == "ValueError"
        assert "has been destroyed" in outcome.message


def goes_missing(rank: int, how: str, num_ranks: int) -> float:
    """Rank 1 takes part in one round, and not in the second one."""
    with collectives():
        model = tw.GradientSharing(mlp(), timeout=timedelta(seconds=3))
        model(batch(rank)).square().mean().backward()
        if rank == 1 and how == "leaves":
            model._native.fail("rank 1 has had enough")
            return 0.0
        if rank == 1:
            time.sleep(6)
            return 0.0
        loss = model(batch(rank)).square().mean()
        began = time.monotonic()
        try:
            loss.backward()
        except tw.SharingError as error:
            waited = time.monotonic() - began
            assert "rank 1" in str(error)
            with pytest.raises(tw.SharingError):
                model(batch(rank)).square().mean().backward()
            return waited
        raise AssertionError("backward: expected SharingError, as rank 1 is gone")


@pytest.mark.parametrize(("how", "within_s"), [("leaves", 2.5), ("sleeps", 6.0)])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_rank_that_is_gone_ends_all_by_the_deadline(
    ranks: Ranks, num_ranks: int, how: str, within_s: float
) -> None:
    for waited in ranks.run(goes_missing, how, num_ranks, num_ranks=num_ranks):
        assert waited <= within_s


# --- the Comm that carries them ------------------------------------------------------------------


def calls_every_collective(rank: int) -> None:
    from tradewind.share.collective import host_group
    from tradewind.share.rendezvous import meet

    comm = native.C10dComm(host_group(meet(None, timedelta(seconds=10)), "test"), 10.0)
    size = comm.size
    assert comm.rank == rank
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64):
        of_ranks = [torch.arange(1, 7).to(dtype) * (r + 1) for r in range(size)]
        for reduction in ("sum", "mean", "max"):
            if reduction == "max" and dtype.is_complex:
                continue
            stacked = torch.stack(of_ranks)
            total = stacked.amax(0) if reduction == "max" else stacked.sum(0)
            expected = total / size if reduction == "mean" else total
            values = of_ranks[rank].clone()
            comm.all_reduce(values, reduction)
            # The mean of 16 bits is summed of values that are divided first.
            torch.testing.assert_close(values, expected, rtol=1e-2, atol=0)
            part = torch.empty(6 // size, dtype=dtype)
            comm.reduce_scatter(of_ranks[rank].clone(), part, reduction)
            torch.testing.assert_close(part, expected.chunk(size)[rank], rtol=1e-2, atol=0)
        gathered = torch.empty(6 * size, dtype=dtype)
        comm.all_gather(of_ranks[rank], gathered)
        assert torch.equal(gathered, torch.cat(of_ranks))
        traded = torch.empty(6, dtype=dtype)
        comm.all_to_all(of_ranks[rank].clone(), traded)
        assert torch.equal(traded, torch.cat([one.chunk(size)[rank] for one in of_ranks]))
        values = of_ranks[rank].clone()
        comm.broadcast(values, size - 1)
        assert torch.equal(values, of_ranks[-1])
    flags = torch.tensor([rank == 0, False])
    comm.all_reduce(flags, "max")
    assert flags.tolist() == [True, False]
    comm.barrier(5.0)
    comm.check()
    with pytest.raises(TypeError, match=r"mean in all_reduce of 2 int64 .* on rank"):
        comm.all_reduce(torch.zeros(2, dtype=torch.int64), "mean")
    with pytest.raises(ValueError, match="reduction: expected 'sum', 'max' or 'mean', got 'min'"):
        comm.all_reduce(torch.zeros(2), "min")
    comm.barrier(5.0)
    comm.abort(5.0)
    with pytest.raises(tw.SharingError, match="aborted"):
        comm.all_reduce(torch.zeros(2), "sum")


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_collective_of_a_process_group(ranks: Ranks, num_ranks: int) -> None:
    ranks.run(calls_every_collective, num_ranks=num_ranks)


def waits_for_a_rank(rank: int) -> str:
    from tradewind.share.collective import host_group
    from tradewind.share.rendezvous import meet

    comm = native.C10dComm(host_group(meet(None, timedelta(seconds=10)), "test"), 1.0)
    if rank == 1:
        time.sleep(2)
        return ""
    with pytest.raises(tw.SharingError) as caught:
        comm.all_reduce(torch.zeros(1000), "sum")
    return str(caught.value)


def test_a_call_that_is_late_names_itself(ranks: Ranks) -> None:
    text = ranks.run(waits_for_a_rank)[0]
    assert text.startswith(
        "all_reduce of 1000 float32 (4000 bytes) on rank 0 of 2: lost a rank, or"
    )
    assert "start the ranks again" in text
