"""Train a small ResNet on CIFAR-10 (Krizhevsky, 2009) from JPEGs in a folder or a zip.

    python examples/cifar10.py --data DIR_OR_ZIP [--epochs 3] [--steps 200] [--batch 128] [--lr 0.1]

DATA is a folder with train/CLASS/*.jpg or with a zip of that ("train" in its name), or the zip.
Without --data: the channel "training". Options may come as hyperparameters. torchrun starts ranks.
"""

import argparse
import io
import zipfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, UnidentifiedImageError
from torch import nn
from torch.utils.data import DataLoader, Dataset

import tradewind as tw


class Images(Dataset):
    """(3x32x32 float image, class) pairs, augmented. Classes are the folders' names, sorted."""

    def __init__(self, root: Path, split: str = "train") -> None:
        is_zip = root.suffix == ".zip"
        zips = [root] if is_zip else sorted(root.glob(f"*{split}*.zip"))
        self.archive = zipfile.ZipFile(zips[0]) if zips else None
        self.place = zips[0] if zips else root / split
        if self.archive is not None and (bad := self.archive.testzip()):
            raise SystemExit(f"{self.place}: entry {bad} is corrupt; copy the zip again")
        paths = self.archive.namelist() if self.archive else self.place.rglob("*")
        self.paths = sorted(str(p) for p in paths if str(p).endswith((".jpg", ".jpeg", ".png")))
        if not self.paths:
            raise SystemExit(f"{root}: expected {split}/CLASS/*.jpg or a zip of it, found none")
        self.classes = sorted({Path(path).parent.name for path in self.paths})

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path = self.paths[index]
        data = self.archive.read(path) if self.archive else Path(path).read_bytes()
        try:
            pixels = np.array(Image.open(io.BytesIO(data)).convert("RGB"), dtype=np.float32)
        except (UnidentifiedImageError, OSError) as error:
            raise ValueError(f"{self.place}: {path} is not a readable image ({error})") from None
        image = torch.from_numpy(pixels).permute(2, 0, 1).div_(127.5).sub_(1.0)
        image = image.flip(2) if torch.rand(()) < 0.5 else image
        row, column = torch.randint(0, 9, (2,)).tolist()
        shifted = F.pad(image, (4, 4, 4, 4))[:, row : row + 32, column : column + 32]
        return shifted, self.classes.index(Path(path).parent.name)


class Block(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))
        self.skip = nn.Conv2d(width_in, width, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(inner)) + self.skip(x))


def make_model(num_classes: int) -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
    blocks = [Block(32, 32, 1), Block(32, 64, 2), Block(64, 128, 2)]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, num_classes))
    return nn.Sequential(stem, *blocks, head).to(memory_format=torch.channels_last)


def parse() -> argparse.Namespace:
    here = tw.place()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shared = Path(__file__).resolve().parents[2] / "shared/data"
    parser.add_argument("--data", default=here.channels.get("training", shared))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, help="stop after this many updates")
    parser.add_argument("--batch", type=int, default=128, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--run", default="runs/cifar10")
    known = {action.dest for action in parser._actions} & set(here.hyperparameters)
    parser.set_defaults(**{name: here.hyperparameters[name] for name in known})
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    train = Images(Path(options.data))
    ranks = tw.place().world_size
    loader = DataLoader(train, batch_size=options.batch // ranks, shuffle=True, drop_last=True)
    steps = options.steps or options.epochs * (len(loader) // ranks)
    recipe = tw.SGD(lr=options.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    how = {"precision": "amp-bf16", "clip_norm": 5.0, "share": tw.Share(), "run": options.run}
    engine = tw.Engine(make_model(len(train.classes)), recipe, **how)
    schedule = torch.optim.lr_scheduler.OneCycleLR(engine.optimizer, options.lr, total_steps=steps)
    for images, labels in engine.batches(loader, epochs=-(-steps * ranks // len(loader))):
        logits = engine(images.to(memory_format=torch.channels_last))
        engine.log(accuracy=(logits.argmax(1) == labels).float().mean())
        engine.step(F.cross_entropy(logits, labels))
        schedule.step()
        if engine.num_steps == steps:
            break
    if tw.place().model_dir and engine.rank == 0:
        torch.save(engine.model.state_dict(), tw.place().model_dir / "model.pt")
    engine.close()
    print(f"loss {engine.last_result.loss:.3f}; report: {engine.report()}")


if __name__ == "__main__":
    main()
