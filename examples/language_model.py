"""Train a small GPT (Radford et al., 2019) on the characters of a text file, then let it write.

python examples/language_model.py --text FILE [--steps 500] [--batch 32] [--lr 1e-3]
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import tradewind as tw


class GPT(nn.Module):
    """Logits of the next character; (batch, length) indices -> (batch, length, vocabulary)."""

    def __init__(self, vocabulary: int, context: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.context = context
        self.characters = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(context, width)
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, **options)
        self.blocks = nn.TransformerEncoder(block, depth, enable_nested_tensor=False)
        self.mask = nn.Buffer(nn.Transformer.generate_square_subsequent_mask(context))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.characters.weight

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        length = indices.shape[1]
        x = self.characters(indices) + self.places(torch.arange(length))
        x = self.blocks(x, mask=self.mask[:length, :length], is_causal=True)
        return self.head(self.norm(x))

    @torch.no_grad()
    def write(self, indices: torch.Tensor, length: int) -> torch.Tensor:
        for _ in range(length):
            logits = self(indices[:, -self.context :])[:, -1]
            indices = torch.cat([indices, torch.multinomial(logits.softmax(-1), 1)], dim=1)
        return indices


class Windows:
    """`steps` batches of random windows of the text: (inputs, the same one character on)."""

    def __init__(self, text: torch.Tensor, context: int, batch: int, steps: int) -> None:
        self.text, self.context, self.batch, self.steps = text, context, batch, steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(self.steps):
            starts = torch.randint(len(self.text) - self.context, (self.batch, 1))
            windows = self.text[starts + torch.arange(self.context + 1)]
            yield windows[:, :-1], windows[:, 1:]


def read(path: Path, context: int) -> tuple[torch.Tensor, list[str]]:
    text = path.read_text(encoding="utf-8")
    if len(text) <= context + 1:
        raise SystemExit(f"{path}: expected more than {context + 1} characters, got {len(text)}")
    alphabet = sorted(set(text))
    index = {character: i for i, character in enumerate(alphabet)}
    return torch.tensor([index[character] for character in text]), alphabet


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shared = Path(__file__).resolve().parents[2] / "shared" / "data" / "tinyshakespeare.txt"
    parser.add_argument("--text", type=Path, default=shared)
    for name, default in {
        "steps": 500,
        "batch": 32,
        "context": 64,
        "width": 128,
        "depth": 4,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--run", default="runs/language_model")
    options = parser.parse_args()

    torch.manual_seed(0)
    text, alphabet = read(options.text, options.context)
    model = GPT(len(alphabet), options.context, options.width, options.depth, heads=4)
    undecayed = {"params": ["*.bias", "*norm*"], "weight_decay": 0.0}
    recipe = tw.AdamW(lr=options.lr, weight_decay=0.1, groups=[undecayed])
    engine = tw.Engine(model, recipe, clip_norm=1.0, run=options.run)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        engine.optimizer, options.lr, total_steps=options.steps, pct_start=0.1
    )
    windows = Windows(text, options.context, options.batch, options.steps)
    for inputs, targets in engine.batches(windows):
        engine.step(F.cross_entropy(engine(inputs).flatten(0, 1), targets.flatten()))
        schedule.step()
    written = model.write(torch.zeros(1, 1, dtype=torch.long), 200)[0, 1:]
    print("".join(alphabet[i] for i in written.tolist()))
    engine.close()
    print(f"loss {engine.last_result.loss:.3f}; report: {engine.report()}")


if __name__ == "__main__":
    main()
