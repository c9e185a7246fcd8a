"""Plain use under Lightning and Accelerate: they take `tw.optim` as they take torch's, and train to
the same weights; a run that stops at a checkpoint and goes on ends at the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tradewind as tw

NUM_SAMPLES, BATCH = 48, 8
STEPS_PER_EPOCH = NUM_SAMPLES // BATCH
OPTIMIZERS = {"tw": tw.optim.AdamW, "torch": torch.optim.AdamW}
Make = Callable[..., torch.optim.Optimizer]


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 3))


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(NUM_SAMPLES, 12, generator=generator)
    targets = (inputs @ torch.randn(12, 3, generator=generator)).argmax(1)
    return DataLoader(TensorDataset(inputs, targets), batch_size=BATCH)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


# --- Lightning --------------------------------------------------------------------------------


def lightning_module(make: Make) -> Any:
    lightning = pytest.importorskip("lightning", reason="pip install 'tradewind[frameworks]'")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            inputs, targets = batch
            return F.cross_entropy(self.network(inputs), targets)

        def configure_optimizers(self) -> dict[str, Any]:
            optimizer = make(groups(self), lr=3e-2, weight_decay=0.1)
            schedule = tw.optim.WarmupCosine(optimizer, warmup_steps=3, total_steps=24)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "interval": "step"},
            }

    return Module()


def fit(
    folder: Path, make: Make, *, epochs: int, resume: Path | None = None, **options: Any
) -> Any:
    lightning = pytest.importorskip("lightning", reason="pip install 'tradewind[frameworks]'")
    module = lightning_module(make)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    # Whole, as Lightning resumes: its checkpoints hold more than tensors.
    trainer.fit(module, loader(), ckpt_path=resume, **({"weights_only": False} if resume else {}))
    trainer.save_checkpoint(folder / "last.ckpt")
    assert trainer.global_step == epochs * STEPS_PER_EPOCH // options.get(
        "accumulate_grad_batches", 1
    )
    return module


LIGHTNING = [
    {"precision": "32-true"},
    {"precision": "bf16-mixed", "gradient_clip_val": 0.5},
    {"precision": "bf16-mixed", "gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    {"precision": "32-true", "gradient_clip_val": 0.5, "accumulate_grad_batches": 2},
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options", LIGHTNING, ids=lambda options: "-".join(map(str, options.values()))
)
def test_lightning_trains_as_with_torchs(tmp_path: Path, options: dict[str, Any]) -> None:
    ours, theirs = (
        fit(tmp_path, make, epochs=3, **options) for make in (tw.optim.AdamW, torch.optim.AdamW)
    )
    assert not torch.equal(weights(ours), weights(network()))
    # Rounding in another order; a bfloat16 forward pass turns some of it into other gradients.
    tolerance = 5e-3 if options["precision"] == "bf16-mixed" else 1e-5
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("saved_by", OPTIMIZERS)
def test_lightning_resumes(tmp_path: Path, saved_by: str) -> None:
    options = {"precision": "bf16-mixed", "gradient_clip_val": 0.5}
    whole = fit(tmp_path, tw.optim.AdamW, epochs=4, **options)
    fit(tmp_path, OPTIMIZERS[saved_by], epochs=2, **options)
    resumed = fit(tmp_path, tw.optim.AdamW, epochs=4, resume=tmp_path / "last.ckpt", **options)
    if saved_by == "tw":
        assert torch.equal(weights(resumed), weights(whole))
    else:  # as above
        torch.testing.assert_close(weights(resumed), weights(whole), rtol=5e-3, atol=5e-3)


# --- Accelerate -------------------------------------------------------------------------------


@pytest.fixture
def accelerate() -> Iterator[Any]:
    """The module, with the process-wide state of its Accelerators dropped before and after."""
    module = pytest.importorskip("accelerate", reason="pip install 'tradewind[frameworks]'")
    state = pytest.importorskip("accelerate.state")
    state.AcceleratorState._reset_state(reset_partial_state=True)
    yield module
    state.AcceleratorState._reset_state(reset_partial_state=True)


class Run:
    """A model, optimizer, loader and schedule as `Accelerator.prepare` returns them."""

    def __init__(self, accelerate: Any, make: Make, folder: Path, precision: str = "no") -> None:
        self.accelerator = accelerate.Accelerator(
            cpu=True, mixed_precision=precision, gradient_accumulation_steps=2
        )
        self.folder = folder
        model = network()
        optimizer = make(groups(model), lr=3e-2, weight_decay=0.1)
        schedule = tw.optim.WarmupCosine(optimizer, warmup_steps=2, total_steps=12)
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            model, optimizer, loader(), schedule
        )

    def train(self, epochs: int) -> torch.Tensor:
        for _ in range(epochs):
            for inputs, targets in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = F.cross_entropy(self.model(inputs), targets)
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
        return weights(self.model)

    def save(self) -> None:
        self.accelerator.save_state(str(self.folder))

    def load(self) -> None:
        self.accelerator.load_state(str(self.folder))


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate_trains_as_with_torchs(accelerate: Any, tmp_path: Path, precision: str) -> None:
    ours, theirs = (
        Run(accelerate, make, tmp_path, precision).train(3)
        for make in (tw.optim.AdamW, torch.optim.AdamW)
    )
    assert not torch.equal(ours, weights(network()))
    tolerance = 5e-3 if precision == "bf16" else 1e-5  # as above
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_accelerate_resumes(accelerate: Any, tmp_path: Path) -> None:
    first = Run(accelerate, tw.optim.AdamW, tmp_path)
    middle = first.train(1).clone()
    first.save()
    end = first.train(2).clone()
    second = Run(accelerate, tw.optim.AdamW, tmp_path)
    second.train(1)
    second.load()
    assert torch.equal(weights(second.model), middle)
    assert torch.equal(second.train(2), end)
    first.load()  # into an optimizer that has gone on
    assert torch.equal(first.train(2), end)
