"""Train a small convolutional net on scikit-learn's handwritten digits: the demo.

    python examples/digits.py [--epochs 20] [--run runs/digits] [--every "50 steps"]
    torchrun --nproc-per-node=2 examples/digits.py

1,797 images of 8x8 pixels (Alpaydin and Kaynak, 1998) come with scikit-learn: nothing is fetched.
Started again with the same --run, it goes on from its last checkpoint.
"""

import argparse
import os
import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tradewind as tw


def load() -> tuple[TensorDataset, TensorDataset]:
    """Training and test images, one in five for the test, in a fixed order."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[: len(order) // 5], order[len(order) // 5 :]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Dropout(0.25),
        nn.Linear(128, 10),
    )


@torch.no_grad()
def accuracy(engine: tw.Engine, data: TensorDataset) -> float:
    images, labels = data.tensors
    engine.eval()
    correct = (engine(images).argmax(dim=1) == labels).float().mean().item()
    engine.train()
    return correct


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--run", default=f"runs/digits-{time.strftime('%Y%m%d-%H%M%S')}")
    parser.add_argument("--every", default="auto", help="when to save: a time, or some steps")
    options = parser.parse_args()

    torch.manual_seed(0)
    train, test = load()
    world_size = tw.place().world_size
    rank_batch = options.batch // world_size
    loader = DataLoader(train, batch_size=rank_batch, shuffle=True, drop_last=True)
    model = make_model()
    engine = tw.Engine(
        model,
        tw.AdamW(lr=options.lr),
        clip_norm=1.0,
        share=tw.Share(),
        checkpoint=tw.Checkpoint(every=options.every),
        run=options.run,
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
        engine.optimizer, T_max=options.epochs * len(loader) // world_size
    )
    engine.track(schedule=schedule)

    first, began = engine.num_steps, time.perf_counter()
    for images, labels in engine.batches(loader, epochs=options.epochs):
        engine.step(F.cross_entropy(engine(images), labels))
        schedule.step()
    seconds = time.perf_counter() - began

    result = accuracy(engine, test)
    engine.log(test_accuracy=result)
    sharing = engine.stats().get("sharing")
    is_first = engine.rank == 0
    engine.close()
    report = engine.report()
    if not is_first:
        return
    samples = (engine.num_steps - first) * options.batch
    print(f"test accuracy {result:.2%} after {options.epochs} epochs in {seconds:.1f} s")
    print(f"{samples / seconds:,.0f} samples/s")
    if sharing:
        print(f"{world_size} ranks: {sharing['hidden']:.0%} of the communication was hidden")
    print(f"report: {os.path.relpath(report)}")


if __name__ == "__main__":
    main()
