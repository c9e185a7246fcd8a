"""An Engine over several ranks: every strategy and overlap against one process, to the bit."""

from __future__ import annotations

import hashlib
import io
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import tradewind as tw
from share.ranks import Ranks

STEPS = 7  # two are recorded, the rest may be late
OVERLAPS = ("backward", "next-forward")


class Net(nn.Module):
    """Tied weights, attention that reads a weight without calling its module, a parameter that no
    module owns alone, and one that nobody uses."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(20, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.scale = nn.Parameter(torch.ones(16))
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
        self.unused = nn.Linear(3, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.layers(self.norm(x)) * self.scale
        return x @ self.embedding.weight.T


def batch_of(rank: int, step: int, microbatch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + microbatch)
    tokens = torch.randint(0, 20, (4, 6), generator=generator)
    return tokens, torch.randint(0, 20, (4, 6), generator=generator)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def digest_of(model: nn.Module) -> str:
    return hashlib.sha256(
        b"".join(
            p.detach().contiguous().view(torch.uint8).numpy().tobytes() for p in model.parameters()
        )
    ).hexdigest()


def train(rank: int, share: dict[str, Any], options: dict[str, Any]) -> tuple[str, list[float]]:
    engine = tw.Engine(
        Net(seed=rank), tw.AdamW(lr=1e-2), share=tw.Share(bucket_mb=0.004, **share), **options
    )
    results = []
    for step in range(STEPS):
        for microbatch in range(engine.accumulate):
            tokens, targets = batch_of(rank, step, microbatch)
            result = engine.step(loss_of(engine(tokens), targets))
        results.append(result)
    norms = [result.grad_norm for result in results]
    digest = digest_of(engine.model)
    engine.close()
    return digest, norms


def train_in_one_process(
    num_ranks: int, clip_norm: float | None, accumulate: int
) -> tuple[str, list[float]]:
    """The ranks' microbatches in turn, summed in rank order."""
    model = Net(seed=0)
    optimizer = tw.optim.AdamW(model.parameters(), lr=1e-2, clip_norm=clip_norm)
    norms = []
    for step in range(STEPS):
        sums: dict[nn.Parameter, torch.Tensor] = {}
        for rank in range(num_ranks):
            for microbatch in range(accumulate):
                tokens, targets = batch_of(rank, step, microbatch)
                (loss_of(model(tokens), targets) / accumulate).backward()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    before = sums.get(parameter)
                    grad = parameter.grad
                    sums[parameter] = grad.clone() if before is None else before + grad
            model.zero_grad()
        for parameter, total in sums.items():
            parameter.grad = total / num_ranks
        squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
        norms.append(float(torch.stack(squares).sum().sqrt()))
        optimizer.step()
        model.zero_grad()
    return digest_of(model), norms


@pytest.mark.parametrize("accumulate", (1, 2))
@pytest.mark.parametrize("clip_norm", (None, 0.3))
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("strategy", ("allreduce", "sharded"))
@pytest.mark.parametrize("num_ranks", (2, 3))
def test_ranks_give_the_bits_of_one_process(
    ranks: Ranks,
    num_ranks: int,
    strategy: str,
    overlap: str,
    clip_norm: float | None,
    accumulate: int,
) -> None:
    share = {"strategy": strategy, "overlap": overlap}
    options = {"clip_norm": clip_norm, "accumulate": accumulate}
    expected, norms = train_in_one_process(num_ranks, clip_norm, accumulate)
    for digest, found in ranks.run(train, share, options, num_ranks=num_ranks):
        assert digest == expected
        # The reference adds squares in another order: float64 rounding.
        assert found == pytest.approx(norms, rel=1e-12)


@pytest.mark.parametrize("codec", ("bf16", "fp16", "int8"))
@pytest.mark.parametrize("strategy", ("allreduce", "sharded"))
def test_ranks_stay_alike_under_a_codec(ranks: Ranks, strategy: str, codec: str) -> None:
    share = {"strategy": strategy, "codec": codec}
    outcomes = ranks.run(train, share, {"clip_norm": 0.3}, num_ranks=2)
    assert len({digest for digest, _ in outcomes}) == 1
    _, norms = train_in_one_process(2, 0.3, 1)
    # int8 rounds to 1/127 of a block's largest value: norms of the first steps agree to per cent.
    assert outcomes[0][1][0] == pytest.approx(norms[0], rel=0.02)


@pytest.mark.parametrize("precision", ("amp-bf16", "bf16", "fp16", "amp-fp16"))
@pytest.mark.parametrize("strategy", ("allreduce", "sharded"))
def test_strategies_and_overlaps_agree_in_every_precision(
    ranks: Ranks, strategy: str, precision: str
) -> None:
    digests = set()
    for overlap in OVERLAPS:
        share = {"strategy": strategy, "overlap": overlap}
        for digest, _ in ranks.run(train, share, {"precision": precision, "accumulate": 2}):
            digests.add(digest)
    assert len(digests) == 1


def reads_parameters_in_between(rank: int, strategy: str) -> list[bool]:
    share = tw.Share(overlap="next-forward", strategy=strategy, bucket_mb=0.004)
    engine = tw.Engine(Net(seed=0), tw.SGD(lr=0.1), share=share)
    held = list(engine.model.parameters())
    found = []
    for step in range(8):
        tokens, targets = batch_of(rank, step)
        engine.step(loss_of(engine(tokens), targets))
        if step % 4 == 0:
            now = [p.detach().clone() for p in engine.model.parameters()]
        elif step % 4 == 1:
            now = [v.clone() for v in engine.model.state_dict().values()]
        elif step % 4 == 2:
            engine.settle()
            now = [p.detach().clone() for p in held]
        else:
            engine.eval()
            with torch.no_grad():
                engine(tokens)
            engine.train()
            now = [p.detach().clone() for p in held]
        engine.settle()
        found.append(all(torch.equal(a, b.detach()) for a, b in zip(now, held, strict=True)))
    engine.close()
    return found


@pytest.mark.parametrize("strategy", ("allreduce", "sharded"))
def test_whoever_asks_for_parameters_gets_them_up_to_date(ranks: Ranks, strategy: str) -> None:
    for found in ranks.run(reads_parameters_in_between, strategy):
        assert all(found)


def resumes(rank: int, strategy: str) -> bool:
    def engine_of(seed: int) -> tw.Engine:
        share = tw.Share(strategy=strategy, outer_every=3)
        return tw.Engine(Net(seed), tw.AdamW(lr=1e-2), clip_norm=0.5, share=share)

    def go_on(engine: tw.Engine, begin: int, end: int) -> None:
        for step in range(begin, end):
            tokens, targets = batch_of(rank, step)
            engine.step(loss_of(engine(tokens), targets))

    whole = engine_of(0)
    go_on(whole, 0, 8)
    expected = digest_of(whole.model)
    whole.close()

    first = engine_of(0)
    go_on(first, 0, 5)
    saved = io.BytesIO()
    torch.save(first.state_dict(), saved)
    first.close()
    saved.seek(0)
    second = engine_of(7)
    second.load_state_dict(torch.load(saved))
    go_on(second, 5, 8)
    same = digest_of(second.model) == expected
    second.close()
    return same


@pytest.mark.parametrize("strategy", ("allreduce", "sharded", "periodic"))
def test_state_goes_on_to_the_bit(ranks: Ranks, strategy: str) -> None:
    assert all(ranks.run(resumes, strategy))


def shards_of_state(rank: int) -> tuple[int, int]:
    engine = tw.Engine(
        nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)),
        tw.AdamW(lr=1e-3),
        share=tw.Share(strategy="sharded"),
    )
    engine.step(engine(torch.ones(2, 256)).sum())
    engine.settle()
    sharded = engine._sharing.sharded
    held = sum(
        value.numel()
        for entry in sharded.inner.state.values()
        for name, value in entry.items()
        if name != "step"
    )
    total = 2 * sum(p.numel() for p in engine.model.parameters())
    assert not engine.optimizer.state
    engine.close()
    return held, total


@pytest.mark.parametrize("num_ranks", (2, 4))
def test_a_rank_stores_its_share_of_the_state(ranks: Ranks, num_ranks: int) -> None:
    outcomes = ranks.run(shards_of_state, num_ranks=num_ranks)
    assert sum(held for held, _ in outcomes) == outcomes[0][1]
    # Shards are cut at blocks of 4,096 elements: of 131,584 a rank may have one block more.
    assert max(held for held, _ in outcomes) <= outcomes[0][1] / num_ranks + 2 * 4096


def test_rules_of_whole_parameters_are_refused_in_shards(ranks: Ranks) -> None:
    for outcome in ranks.outcomes(refuses_lamb):
        assert outcome.type == "ValueError"
        assert "LAMB reads whole parameters" in outcome.message


def refuses_lamb(rank: int) -> None:
    tw.Engine(Net(0), tw.LAMB(lr=1e-3), share=tw.Share(strategy="sharded"))


# --- periodic -------------------------------------------------------------------------------------


def trains_periodically(rank: int, every: int, steps: int) -> list[torch.Tensor]:
    share = tw.Share(strategy="periodic", outer_every=every, outer_lr=0.7, outer_momentum=0.9)
    engine = tw.Engine(Net(seed=rank), tw.SGD(lr=0.1), share=share)
    for step in range(steps):
        tokens, targets = batch_of(rank, step)
        engine.step(loss_of(engine(tokens), targets))
    found = [p.detach().clone() for p in engine.model.parameters()]
    engine.close()
    return found


def test_periodic_averaging_is_local_steps_and_an_outer_optimizer(ranks: Ranks) -> None:
    every, steps, num_ranks = 3, 9, 2
    outer = [nn.Parameter(p.detach().clone()) for p in Net(0).parameters()]
    outer_optimizer = torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True)
    for first in range(0, steps, every):
        moved = []
        for rank in range(num_ranks):
            model = Net(0)
            with torch.no_grad():
                for parameter, start in zip(model.parameters(), outer, strict=True):
                    parameter.copy_(start)
            local = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(first, first + every):
                tokens, targets = batch_of(rank, step)
                local.zero_grad()
                loss_of(model(tokens), targets).backward()
                local.step()
            moved.append([s - p for s, p in zip(outer, model.parameters(), strict=True)])
        for parameter, *parts in zip(outer, *moved, strict=True):
            parameter.grad = torch.stack([p.detach() for p in parts]).mean(0)
        outer_optimizer.step()
    for found in ranks.run(trains_periodically, every, steps):
        for given, expected in zip(found, outer, strict=True):
            # Nine steps of the same arithmetic in another order.
            torch.testing.assert_close(given, expected.detach(), rtol=1e-5, atol=1e-6)


# --- batches --------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self):
        return iter(torch.arange(float(self.num_samples)).unsqueeze(1))


def loader_of(kind: str, num_samples: int) -> Any:
    values = torch.arange(float(num_samples)).unsqueeze(1)
    if kind == "list":
        return list(values.split(4))
    if kind == "stream":
        return DataLoader(Stream(num_samples), batch_size=4)
    return DataLoader(TensorDataset(values), batch_size=4, shuffle=kind == "shuffled")


def takes_batches(
    rank: int, kind: str, num_samples: int, share: dict[str, Any], accumulate: int
) -> tuple[list[float], int, str]:
    torch.manual_seed(100 + rank)  # samplers must agree all the same
    engine = tw.Engine(
        nn.Linear(1, 1), tw.SGD(lr=1e-4), accumulate=accumulate, share=tw.Share(**share)
    )
    seen: list[float] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in engine.batches(loader_of(kind, num_samples), epochs=2, progress="off"):
            x = batch[0] if isinstance(batch, (list, tuple)) else batch
            seen += x.flatten().tolist()
            engine.step(engine(x / num_samples).square().mean())
    engine.settle()
    digest, steps = digest_of(engine.model), engine.num_steps
    engine.close()
    return seen, steps, digest


@pytest.mark.parametrize("kind", ("shuffled", "in order", "list", "stream"))
@pytest.mark.parametrize("num_samples", (48, 44, 4))
@pytest.mark.parametrize("accumulate", (1, 3))
def test_ranks_take_every_sample_once_an_epoch(
    ranks: Ranks, kind: str, num_samples: int, accumulate: int
) -> None:
    share = {"overlap": "next-forward"}
    outcomes = ranks.run(takes_batches, kind, num_samples, share, accumulate, num_ranks=3)
    everything = sorted(value for seen, _, _ in outcomes for value in seen)
    assert everything == sorted(2 * [float(v) for v in range(num_samples)])
    assert len({steps for _, steps, _ in outcomes}) == 1
    assert len({digest for _, _, digest in outcomes}) == 1


@pytest.mark.parametrize("strategy", ("sharded", "periodic"))
def test_ranks_that_run_out_of_data_follow_the_others(ranks: Ranks, strategy: str) -> None:
    share = {"strategy": strategy, "outer_every": 2}
    outcomes = ranks.run(takes_batches, "shuffled", 44, share, 1, num_ranks=3)
    assert len({digest for _, _, digest in outcomes}) == 1


def has_its_own_order(rank: int) -> None:
    engine = tw.Engine(nn.Linear(1, 1), tw.SGD(lr=1e-4), share=tw.Share())
    data = TensorDataset(torch.arange(40.0).unsqueeze(1))
    generator = torch.Generator().manual_seed(rank)
    loader = DataLoader(data, batch_size=4, shuffle=True, generator=generator)
    for _ in engine.batches(loader, progress="off"):
        pass


def test_orders_that_differ_between_ranks_are_refused(ranks: Ranks) -> None:
    for outcome in ranks.outcomes(has_its_own_order):
        assert outcome.type == "ValueError"
        assert "another order on each rank" in outcome.message


def keeps_buffers_alike(rank: int) -> list[float]:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    engine = tw.Engine(model, tw.SGD(lr=0.1), share=tw.Share(overlap="backward"))
    for step in range(3):
        engine.step(engine(torch.full((8, 4), float(step)) + torch.randn(8, 4)).square().sum())
    engine(torch.ones(8, 4))  # takes rank 0's of the last round, and goes on from them
    mean = model[1].running_mean.tolist()
    engine.close()
    return mean


def test_buffers_are_those_of_rank_0(ranks: Ranks) -> None:
    first, second = ranks.run(keeps_buffers_alike)
    assert first == pytest.approx(second, rel=1e-6)


def alone(rank: int) -> tuple[int, int, bool]:
    engine = tw.Engine(nn.Linear(2, 2), tw.SGD(lr=0.1), share=tw.Share())
    engine.step(engine(torch.ones(1, 2)).sum())
    found = engine.rank, engine.world_size, "sharing" in engine.stats()
    engine.close()
    return found


def test_one_rank_trains_as_without_sharing(ranks: Ranks) -> None:
    assert ranks.run(alone, num_ranks=1) == [(0, 1, False)]
    assert alone(0) == (0, 1, False)
