"""Checkpoints of several ranks: every strategy goes on to the same bits, state moves between world
sizes, strategies and precisions, one rank's notice ends all."""

from __future__ import annotations

import hashlib
import os
import signal
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

import tradewind as tw
from share.ranks import Ranks

# Batches of an epoch, and what is left of it after 6 updates of 2 ranks, divide by 1, 2, 3 and 4.
SAMPLES, BATCH, EPOCHS = 96, 4, 2
TIMEOUT_S = 240


class Net(nn.Module):
    """Parameters of several norm blocks and of less, one that lies otherwise, a scalar, a buffer,
    dropout, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(40, 128)
        self.conv = nn.Conv2d(2, 8, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(128)
        self.scale = nn.Parameter(torch.ones(()))
        self.body = nn.Linear(64, 128)
        self.drop = nn.Dropout(0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(tokens).mean(1)) * self.scale
        x = self.conv(x.view(-1, 2, 8, 8)).mean(1).flatten(1)
        return self.drop(torch.relu(self.body(x))) @ self.embedding.weight.T


class Tokens(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 40, (6,), generator=generator)
        return tokens, torch.randint(0, 40, (), generator=generator), index


def make(folder: str, share: dict[str, Any] | None, **options: Any) -> tw.Engine:
    torch.manual_seed(3)
    return tw.Engine(
        Net(),
        options.pop("recipe", tw.AdamW(lr=1e-2)),
        share=tw.Share(bucket_mb=0.02, **share) if share is not None else None,
        checkpoint=tw.Checkpoint(
            folder,
            every=options.pop("every", 10_000),
            keep=options.pop("keep", 3),
            notices=options.pop("notices", "off"),
        ),
        **options,
    )


def run(
    rank: int,
    folder: str,
    share: dict[str, Any] | None,
    save_at: int | None = None,
    stop_at: int | None = None,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train to the end, or leave without a word after `stop_at` updates."""
    options = dict(options or {})
    has_ties = options.pop("ties", False)
    engine = make(folder, share, **options)
    loader = DataLoader(Tokens(), batch_size=BATCH, shuffle=True)
    samples: list[list[int]] = []
    for tokens, targets, indices in engine.batches(loader, epochs=EPOCHS, progress="off"):
        samples.append(indices.tolist())
        before = engine.num_steps
        engine.step(nn.functional.cross_entropy(engine(tokens), targets))
        if engine.num_steps == before:
            continue
        if engine.num_steps == save_at:
            if has_ties:
                make_ties(engine)
            engine.save().wait(TIMEOUT_S)
        if engine.num_steps == stop_at:
            break
    found = {**facts(engine), "samples": samples}
    if stop_at is not None:
        lose(engine)
    else:
        engine.close()
    return found


def make_ties(engine: tw.Engine) -> None:
    """Parameters half way between two bfloat16 numbers, where ways to round differ."""
    with engine.edit_parameters(), torch.no_grad():
        for parameter in engine.model.parameters():
            bits = parameter.contiguous().reshape(-1).view(torch.int32)
            tied = ((bits & ~0xFFFF) | 0x8000).view(torch.float32)
            parameter.copy_(tied.view(parameter.shape))


def lose(engine: tw.Engine) -> None:
    """As a crash of all ranks: nothing is saved any more."""
    if dist.get_world_size() > 1:
        dist.barrier()  # none is lost while another still reads what it sent
    engine._abort(RuntimeError("lost"))


def facts(engine: tw.Engine) -> dict[str, Any]:
    sharded = engine._sharing.sharded if engine._sharing is not None else None
    if sharded is not None and engine.optimizer.state_dtype == "8bit":
        engine.settle()  # its state dict is not built
        optimizer = {str(i): entry for i, (*_, entry) in enumerate(sharded.states())}
    else:
        optimizer = engine.state_dict()["optimizer"]["state"]
    return {
        "model": digests(engine.model.state_dict()),
        "optimizer": digests(optimizer),
        "steps": engine.num_steps,
        "random": digests({"torch": torch.get_rng_state()}),
    }


def digests(values: dict[Any, Any]) -> dict[str, str]:
    found = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found.update({f"{key}.{inner}": d for inner, d in digests(value).items()})
        elif isinstance(value, torch.Tensor):
            flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
            found[str(key)] = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
    return found


WAYS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "allreduce": (2, {"overlap": "backward"}, {}),
    "allreduce, late": (2, {"overlap": "next-forward"}, {"clip_norm": 0.5}),
    "allreduce, 3 ranks": (3, {}, {"accumulate": 2}),
    "sharded": (2, {"strategy": "sharded", "overlap": "backward"}, {}),
    "sharded, late": (3, {"strategy": "sharded", "overlap": "next-forward"}, {"clip_norm": 0.5}),
    "sharded bf16": (2, {"strategy": "sharded"}, {"precision": "bf16"}),
    "sharded split": (3, {"strategy": "sharded"}, {"precision": "bf16", "masters": "split"}),
    "sharded 8-bit": (2, {"strategy": "sharded"}, {"state_dtype": "8bit"}),
    "int8": (2, {"codec": "int8"}, {}),
    "sharded int8": (2, {"strategy": "sharded", "codec": "int8"}, {}),
    "powersgd": (2, {"codec": "powersgd"}, {}),
    "hierarchical": (2, {"strategy": "hierarchical"}, {}),
    "periodic": (2, {"strategy": "periodic", "outer_every": 4}, {}),
}


@pytest.mark.parametrize("way", WAYS)
def test_ranks_go_on_to_the_same_bits(ranks: Ranks, tmp_path: Path, way: str) -> None:
    num_ranks, share, options = WAYS[way]

    def start(folder: str, **more: Any) -> list[dict[str, Any]]:
        arguments = (str(tmp_path / folder), share, more.get("save_at"), more.get("stop_at"))
        return ranks.run(run, *arguments, options, num_ranks=num_ranks, timeout_s=TIMEOUT_S)

    expected = start("whole")
    # Of "periodic" also between two outer steps.
    start("lost", save_at=6, stop_at=8)
    found = start("lost")
    for rank in range(num_ranks):
        assert found[rank]["steps"] == expected[rank]["steps"]
        before = 6 * options.get("accumulate", 1)
        assert found[rank]["samples"] == expected[rank]["samples"][before:], rank
        for part in ("model", "optimizer", "random"):
            assert found[rank][part] == expected[rank][part], (rank, part)


def look(rank: int, folder: str, share: dict[str, Any] | None, options: Any) -> dict[str, Any]:
    """What is restored, and saved again at once."""
    engine = make(folder, share, **options)
    found = facts(engine)
    engine.save().wait(TIMEOUT_S)
    lose(engine)
    return found


def order_of(rank: int, folder: str, share: dict[str, Any] | None) -> list[list[int]]:
    """The samples of the batches to come, without training."""
    engine = make(folder, share)
    loader = DataLoader(Tokens(), batch_size=BATCH, shuffle=True)
    batches = engine.batches(loader, epochs=EPOCHS, progress="off")
    left = (EPOCHS * SAMPLES // BATCH - 2 * engine.num_steps) // engine.world_size
    found = [indices.tolist() for _, _, indices in islice(batches, left)]
    batches.close()
    lose(engine)
    return found


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}], ids=["fp32", "bf16"])
def test_state_moves_between_world_sizes_and_strategies(
    ranks: Ranks, tmp_path: Path, options: dict[str, Any]
) -> None:
    folder = str(tmp_path)
    sharded = {"strategy": "sharded"}
    arguments = (folder, sharded, 6, 6, options)
    first = ranks.run(run, *arguments, num_ranks=2, timeout_s=TIMEOUT_S)[0]
    hops: list[tuple[int, dict[str, Any] | None]] = [
        (1, sharded),
        (2, sharded),
        (3, sharded),
        (4, sharded),
        (2, {"strategy": "allreduce"}),
        (3, sharded),
        (1, None),
        (2, {"strategy": "hierarchical"}),
        (1, sharded),
    ]
    for size, share in hops:
        for found in ranks.run(
            look, folder, share, dict(options), num_ranks=size, timeout_s=TIMEOUT_S
        ):
            assert found["steps"] == 6
            assert found["model"] == first["model"], (size, share)
            assert found["optimizer"] == first["optimizer"], (size, share)


def test_8_bit_state_moves_as_it_is(ranks: Ranks, tmp_path: Path) -> None:
    folder = str(tmp_path)
    options = {"state_dtype": "8bit"}
    sharded = {"strategy": "sharded"}
    ranks.run(run, folder, sharded, 6, 6, options, num_ranks=2, timeout_s=TIMEOUT_S)
    first = saved_states(folder)
    assert "conv.weight.exp_avg_exponents" in first
    ranks.run(look, folder, sharded, options, num_ranks=3, timeout_s=TIMEOUT_S)
    assert saved_states(folder) == first
    # To whole tensors, which stand by their dimensions, whatever they lie like.
    kept = {name: digest for name, digest in first.items() if "conv.weight" not in name}
    for size, share in ((1, None), (2, {})):
        ranks.run(look, folder, share, options, num_ranks=size, timeout_s=TIMEOUT_S)
        found = saved_states(folder)
        assert {name: found[name] for name in kept} == kept, size


def saved_states(folder: str) -> dict[str, str]:
    loaded = tw.Checkpointer(folder).load()
    assert loaded is not None
    return digests(loaded[1]["optimizer"]["states"])


@pytest.mark.parametrize(
    "options",
    [{"precision": "bf16"}, {"precision": "bf16", "masters": "split"}, {"state_dtype": "8bit"}],
    ids=["bf16", "split", "8-bit"],
)
def test_precision_changes_while_ranks_share_the_state(
    ranks: Ranks, tmp_path: Path, options: dict[str, Any]
) -> None:
    folder = str(tmp_path)
    sharded = {"strategy": "sharded"}
    ties = {"ties": True}
    first = ranks.run(run, folder, sharded, 6, 6, ties, num_ranks=2, timeout_s=TIMEOUT_S)[0]
    there = ranks.run(look, folder, sharded, options, num_ranks=3, timeout_s=TIMEOUT_S)
    assert all(found["model"] == there[0]["model"] for found in there)
    back = ranks.run(look, folder, {}, {}, num_ranks=2, timeout_s=TIMEOUT_S)
    for found in back:
        assert found["model"] == first["model"]
        if options.get("state_dtype") != "8bit":
            assert found["optimizer"] == first["optimizer"]


def test_samples_come_in_one_order_at_any_world_size(ranks: Ranks, tmp_path: Path) -> None:
    folder = str(tmp_path)
    lost = ranks.run(run, folder, {}, 6, 6, num_ranks=2, timeout_s=TIMEOUT_S)
    taken = [
        batch for pair in zip(*(found["samples"] for found in lost), strict=True) for batch in pair
    ]
    orders = []
    for size in (1, 2, 3, 4):
        per_rank = ranks.run(
            order_of, folder, {} if size > 1 else None, num_ranks=size, timeout_s=TIMEOUT_S
        )
        orders.append([batch for round in zip(*per_rank, strict=True) for batch in round])
    assert all(order == orders[0] for order in orders)
    first_epoch = taken + orders[0][: SAMPLES // BATCH - len(taken)]
    assert sorted(i for batch in first_epoch for i in batch) == list(range(SAMPLES))


def stopped_by_one(rank: int, folder: str, share: dict[str, Any], at: int) -> Any:
    """Rank 1 is told to go; nobody else is."""
    engine = make(folder, share, notices="signals")
    loader = DataLoader(Tokens(), batch_size=BATCH, shuffle=True)
    try:
        for tokens, targets, _ in engine.batches(loader, epochs=EPOCHS, progress="off"):
            engine.step(nn.functional.cross_entropy(engine(tokens), targets))
            if rank == 1 and engine.num_steps == at:
                os.kill(os.getpid(), signal.SIGTERM)
    except SystemExit as end:
        return end.code, engine.num_steps
    return None, engine.num_steps


@pytest.mark.parametrize(
    "share",
    [
        {"overlap": "backward"},
        {"overlap": "next-forward"},
        {"strategy": "sharded"},
        {"strategy": "periodic", "outer_every": 3},
    ],
    ids=["allreduce", "late", "sharded", "periodic"],
)
def test_one_rank_told_to_stop_stops_all_at_one_step(
    ranks: Ranks, tmp_path: Path, share: dict[str, Any]
) -> None:
    arguments = (str(tmp_path), share, 5)
    ended = ranks.run(stopped_by_one, *arguments, num_ranks=3, timeout_s=TIMEOUT_S)
    assert len(set(ended)) == 1
    code, step = ended[0]
    # The next round tells; "periodic" has one every third update.
    assert code == 75 and 5 < step <= 9
    assert tw.Checkpointer(tmp_path).steps() == [step]


def test_ranks_save_by_time_together(ranks: Ranks, tmp_path: Path) -> None:
    options = {"every": "0.001 s", "keep": 100}
    arguments = (str(tmp_path), {}, None, None, options)
    found = ranks.run(run, *arguments, num_ranks=2, timeout_s=TIMEOUT_S)
    assert {each["steps"] for each in found} == {SAMPLES // BATCH * EPOCHS // 2}
    steps = tw.Checkpointer(tmp_path).steps()
    assert len(steps) > 3 and steps[-1] == found[0]["steps"]
    # Always due; but what was wished before a save began is not wished again after it.
    assert all(b - a >= 2 for a, b in pairwise(steps[:-1]))


def test_an_error_of_one_rank_does_not_hang_the_others(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.outcomes(fails_on_one, str(tmp_path), num_ranks=2, timeout_s=TIMEOUT_S)
    assert found[1].type == "ZeroDivisionError"
    assert found[0].type == "SharingError"


def names_its_own(rank: int, folder: str) -> tuple[str, list[int]]:
    with make(f"{folder}/{rank}", {}) as engine:
        engine.save().wait(TIMEOUT_S)
        return engine.stats()["checkpoint"]["path"], tw.Checkpointer(f"{folder}/0").steps()


def test_rank_0_says_where(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(names_its_own, str(tmp_path), num_ranks=2, timeout_s=TIMEOUT_S)
    assert found == [(str(tmp_path / "0"), [0])] * 2
    assert not (tmp_path / "1").exists()


def differs(rank: int, folder: str) -> None:
    make(folder, {}, every=5 + rank)


def test_ranks_must_agree_when_to_save(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.outcomes(differs, str(tmp_path), num_ranks=2, timeout_s=TIMEOUT_S)
    for each in found:
        assert each.type == "ValueError" and "checkpoint.every: '5 steps' against" in each.message


def fails_on_one(rank: int, folder: str) -> None:
    with make(folder, {}) as engine:
        loader = DataLoader(Tokens(), batch_size=BATCH)
        for tokens, targets, _ in engine.batches(loader, progress="off"):
            engine.step(nn.functional.cross_entropy(engine(tokens), targets))
            engine.save()
            if rank == 1 and engine.num_steps == 3:
                1 / 0  # noqa: B018
