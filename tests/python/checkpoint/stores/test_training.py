"""Training with checkpoints in a store: Engines that move to another machine, and ranks that save
and restore together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.stores.faulty_server import FaultyServer

import tradewind as tw
from share.ranks import Ranks
from tradewind.checkpoint import PartialTensor
from tradewind.checkpoint.stores.patience import StoreError
from tradewind.checkpoint.stores.remote_directory import RemoteDirectory

LENGTH = 100_003
LONG_S = 120.0


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks() as made:
        yield made


def trained(num_steps: int, **checkpoint: Any) -> tuple[list[torch.Tensor], int | None]:
    """Parameters after `num_steps` steps, and the step that was gone on from."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1)
    model = torch.nn.Sequential(*layers)
    saves = tw.Checkpoint(every=3, notices="off", **checkpoint) if checkpoint else None
    engine = tw.Engine(model, tw.AdamW(lr=1e-2), checkpoint=saves)
    resumed = engine.num_steps or None
    for step in range(engine.num_steps, num_steps):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        engine.step(engine(x).square().mean())
    engine.close()
    return [parameter.detach().clone() for parameter in model.parameters()], resumed


def test_an_engine_goes_on_on_another_machine(s3_url: str, opened: Any, tmp_path: Path) -> None:
    expected, _ = trained(10)
    trained(6, path=s3_url, local=tmp_path / "a")
    names = RemoteDirectory(opened(s3_url)).committed()
    assert names[0].step == 6
    found, resumed = trained(10, path=s3_url, local=tmp_path / "b")
    assert resumed == 6
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_an_engine_does_not_begin_anew_where_the_store_cannot_be_asked(
    s3: FaultyServer, s3_url: str, tmp_path: Path
) -> None:
    trained(3, path=s3_url, local=tmp_path / "a")
    s3.reset(lambda seen: "403")
    with pytest.raises(StoreError, match="403 AccessDenied"):
        trained(6, path=s3_url, local=tmp_path / "b")


def whole() -> torch.Tensor:
    return torch.randn(LENGTH, generator=torch.Generator().manual_seed(1))


def part_of(rank: int, num_ranks: int, values: torch.Tensor) -> tuple[dict[str, Any], torch.Tensor]:
    begin, end = rank * LENGTH // num_ranks, (rank + 1) * LENGTH // num_ranks
    part = values[begin:end].clone()
    moment = PartialTensor((LENGTH,), torch.float32, [(begin, part)])
    return {"moment": moment, "step": 0}, part


def save_together(
    rank: int, num_ranks: int, environ: dict[str, str], url: str, local: str
) -> tuple[Any, str | None]:
    os.environ.update(environ)
    state, _ = part_of(rank, num_ranks, whole())
    try:
        with tw.Checkpointer(url, local=local) as checkpointer:
            checkpointer.save({**state, "step": 5}, step=5).wait(LONG_S)
            return checkpointer.last_durable, None
    except (RuntimeError, OSError) as error:
        return None, f"{type(error).__name__}: {error}"


def restore_together(
    rank: int, num_ranks: int, environ: dict[str, str], url: str, local: str
) -> tuple[int | None, bool]:
    os.environ.update(environ)
    state, part = part_of(rank, num_ranks, torch.zeros(LENGTH))
    with tw.Checkpointer(url, local=local) as checkpointer:
        step = checkpointer.restore(state)
    begin = rank * LENGTH // num_ranks
    return step, torch.equal(part, whole()[begin : begin + len(part)]) and state["step"] == 5


def aws() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def test_ranks_save_and_other_ranks_restore(
    ranks: Ranks, s3_url: str, opened: Any, tmp_path: Path
) -> None:
    two = (2, aws(), s3_url, str(tmp_path / "a"))
    for durable, error in ranks.run(save_together, *two, num_ranks=2, timeout_s=LONG_S):
        assert error is None
        assert durable is not None
        assert durable[0] == 5
    (name,) = RemoteDirectory(opened(s3_url)).committed()
    shards = opened(s3_url).entries(f"{name.folder}/shard")
    assert len(shards) == 2
    for num_ranks, machine in ((1, "b"), (3, "c")):
        other = (num_ranks, aws(), s3_url, str(tmp_path / machine))
        restored = ranks.run(restore_together, *other, num_ranks=num_ranks, timeout_s=LONG_S)
        assert restored == [(5, True)] * num_ranks


def test_all_ranks_hear_that_the_store_cannot_be_used(
    ranks: Ranks, s3: FaultyServer, tmp_path: Path
) -> None:
    bad = (2, aws(), "s3://no-such-bucket/a", str(tmp_path / "a"))
    told = [error for _, error in ranks.run(save_together, *bad, num_ranks=2, timeout_s=LONG_S)]
    assert all("make the bucket, or correct the URL" in str(error) for error in told)
