"""The recipe `tw.Muon`: hidden matrices to Muon, everything else to AdamW, in one optimizer."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from tradewind.optim.fused import FusedOptimizer
from tradewind.optim.muon import Muon as _Muon
from tradewind.optim.muon_with_adamw import SHARED_OPTIONS, MuonWithAdamW
from tradewind.optim.recipe import AdamW, Recipe, Selector, matches

# Parts of a parameter's dotted name that say "input or output layer".
OUTER_NAMES = (
    *("*embed*", "emb", "*_emb", "wte", "wpe"),
    *("head", "*_head", "classifier", "*logits", "fc_out", "output_projection"),
)


class Muon(Recipe):
    """Muon for the hidden matrices of a model and AdamW for everything else:
    ``tw.Muon(lr=0.02, adamw={"lr": 3e-4, "betas": (0.9, 0.95)})``.

    Jordan's advice (2024, https://kellerjordan.github.io/posts/muon/): input and output layers,
    vectors and scalars are for AdamW. The two learning rates are apart; a schedule multiplies both.

    Args:
        adamw: options of `tw.optim.AdamW` for everything else, by its defaults where not given.
        hidden: which matrices are hidden, by patterns of names or a function, as ``params`` of a
            group. None: all parameters of two dimensions but the weights of nn.Embedding and
            nn.EmbeddingBag, and those that a part of their name calls an embedding or an output
            ("embed", "wte", "wpe", "head", "lm_head", "classifier", ...: `OUTER_NAMES`). Where
            names do not tell, as in nn.Sequential, say it: ``hidden="blocks.*"``.
        groups: param groups of AdamW's part that differ, as for every recipe.
        **options: what `tw.optim.Muon` takes, but for the parameters. clip_norm, measure, masters,
            state_dtype and seed are for both.

    Raises:
        TypeError: an option that Muon or AdamW does not have, or parameters in place of options.
        ValueError: an option out of range.
    """

    optimizer_class = _Muon

    def __init__(
        self,
        *args: Any,
        adamw: Mapping[str, Any] | None = None,
        hidden: Selector | None = None,
        groups: Sequence[Mapping[str, Any]] = (),
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        shared = [name for name in SHARED_OPTIONS if name in (adamw or {})]
        if shared:
            raise TypeError(
                f"tw.Muon adamw: unknown {', '.join(shared)}, as both share one; give it to "
                f"tw.Muon({shared[0]}=...)"
            )
        self.adamw = AdamW(groups=groups, **(adamw or {}))
        self.hidden = hidden

    def build(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        clip_norm: float | None = None,
        model: torch.nn.Module | None = None,
    ) -> FusedOptimizer:
        """The optimizer over these parameters; with `model`, its embeddings are known by type.

        Raises ValueError where no matrix is hidden, or for a group that takes no parameter.
        """
        embeddings = _embeddings(model)
        hidden: list[tuple[str, torch.nn.Parameter]] = []
        rest: list[tuple[str, torch.nn.Parameter]] = []
        for name, parameter in named_parameters:
            is_hidden = parameter.ndim == 2 and self._is_hidden(name, parameter, embeddings)
            (hidden if is_hidden else rest).append((name, parameter))
        if not hidden:
            raise ValueError(
                f"tw.Muon: expected a hidden matrix that hidden={self.hidden!r} takes, found none "
                "among the parameters; say which they are (hidden='blocks.*'), or use tw.AdamW"
            )
        own = {key: value for key, value in self.options.items() if key not in SHARED_OPTIONS}
        shared = {key: value for key, value in self.options.items() if key in SHARED_OPTIONS}
        if clip_norm is not None:
            shared["clip_norm"] = clip_norm
        others = [
            {**self.adamw.options, **group, "use_muon": False}
            for group in self.adamw.param_groups(rest)
        ]
        return MuonWithAdamW([{**own, "params": hidden, "use_muon": True}, *others], **shared)

    def _is_hidden(self, name: str, parameter: torch.nn.Parameter, embeddings: set[int]) -> bool:
        if self.hidden is not None:
            return matches(self.hidden, name, parameter)
        is_outer = any(
            fnmatch.fnmatchcase(part, pattern)
            for part in name.lower().split(".")
            for pattern in OUTER_NAMES
        )
        return id(parameter) not in embeddings and not is_outer

    def __repr__(self) -> str:
        options = [f"{name}={value!r}" for name, value in self.options.items()]
        options += [f"adamw={self.adamw!r}"]
        if self.hidden is not None:
            options += [f"hidden={self.hidden!r}"]
        return f"tw.Muon({', '.join(options)})"


def _embeddings(model: torch.nn.Module | None) -> set[int]:
    """The ids of the weights, which a tied output layer shares."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    modules = [] if model is None else list(model.modules())
    return {id(module.weight) for module in modules if isinstance(module, kinds)}
