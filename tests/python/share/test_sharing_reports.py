"""What GradientSharing tells of a backward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import tradewind as tw
from share.gradient_cases import batch, mlp
from share.ranks import Ranks


def finds_nonfinite(rank: int) -> list[tuple[int, str, int, int]]:
    model = tw.GradientSharing(mlp())
    assert model.nonfinite == []
    bad = torch.full((6, 7), float("nan")) if rank == 1 else batch(rank)
    with model.no_sync():
        model(batch(rank)).square().mean().backward()
    model(bad).square().mean().backward()
    found = [(n.rank, n.parameter_name, n.microbatch, n.num_parameters) for n in model.nonfinite]
    model.zero_grad()
    model(batch(rank)).square().mean().backward()
    assert model.nonfinite == []
    return found


def test_gradients_that_are_not_finite_are_told_by_rank_name_and_microbatch(ranks: Ranks) -> None:
    for found in ranks.run(finds_nonfinite):
        ((rank, name, microbatch, num_parameters),) = found
        assert (rank, microbatch, num_parameters) == (1, 2, 6)
        assert name in dict(mlp().named_parameters())


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
        assert found.pop("between_hosts_bytes") == found["sent_bytes"]
        assert set(found) == {"num_rounds", "sent_bytes", "waited_s", "busy_s"}
        assert found["num_rounds"] == 3
        # Each of two ranks sends half of the gradients and half of the means: 4000 bytes a round.
        assert found["sent_bytes"] == pytest.approx(3 * 4000, rel=0.1)
        assert found["waited_s"] >= 0


def clips_late(rank: int, clip_norm: float | None, folder: str) -> tuple[dict[str, float], str]:
    share = tw.Share(overlap="next-forward", bucket_mb=0.01)
    run = f"{folder}/run" if rank == 0 else None
    model = nn.Linear(1024, 1024)  # 4 MB: the norm waits for all of it
    engine = tw.Engine(model, tw.SGD(lr=1e-3), clip_norm=clip_norm, share=share, run=run)
    for _ in range(8):
        engine.step(engine(torch.ones(1, 1024)).square().mean())
    engine.settle()
    sharing = engine.stats()["sharing"]
    page = engine.report().read_text() if rank == 0 else ""
    engine.close()
    return sharing, page


def test_the_report_says_what_the_clip_costs(ranks: Ranks, tmp_path: Path) -> None:
    (clipped, page), _ = ranks.run(clips_late, 0.1, str(tmp_path))
    assert 0 < clipped["clip_waited_s"] <= clipped["waited_s"]
    assert "of a step, for the norm to clip by" in page
    (free, page), _ = ranks.run(clips_late, None, str(tmp_path / "free"))
    assert free["clip_waited_s"] == 0
    assert "of a step, waiting for other ranks" in page and "clip by" not in page
