"""One checkpoint, told: facts of its manifest, the JSON values of the state, the tensors in their
places. The data position of an Engine is among the values, under `progress.data`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import torch

from tradewind.checkpoint.dtypes import DTYPE_OF
from tradewind.checkpoint.manifest import Manifest
from tradewind.checkpoint.parts import PerRank
from tradewind.checkpoint.rebuilding import rebuild
from tradewind.checkpoint.targets import Stored

_EXCERPT = 76
_INDENT = "  "


@dataclass(frozen=True)
class Outline:
    """`state`: as `of_all_ranks` has it, with Stored in place of tensors."""

    manifest: Manifest
    state: Any

    @property
    def size_bytes(self) -> int:
        """Of the files."""
        return sum(file.size_bytes for file in self.manifest.files)

    def to_json(self) -> dict[str, Any]:
        """What `tradewind checkpoint show --json` prints: JSON, with texts for what JSON lacks."""
        manifest = self.manifest
        return {
            "created_s": manifest.created_s,
            "parent": manifest.parent,
            "world_size": manifest.world_size,
            "size_bytes": self.size_bytes,
            "files": [
                {"name": file.name, "size_bytes": file.size_bytes, "crc32c": f"{file.crc32c:08x}"}
                for file in manifest.files
            ],
            "facts": manifest.facts,
            "tensors": [
                {
                    "name": name,
                    "dtype": entry.dtype,
                    "shape": list(entry.shape),
                    "size_bytes": _num_bytes(manifest, name),
                }
                for name, entry in manifest.tensors.items()
            ],
            "state": _jsonable(self.state),
        }

    def lines(self) -> Iterator[str]:
        """The same for people, long values cut."""
        manifest = self.manifest
        created = datetime.fromtimestamp(manifest.created_s, timezone.utc)
        yield f"step {manifest.step}, attempt {manifest.attempt}, {created:%Y-%m-%d %H:%M:%S} UTC"
        yield f"after {manifest.parent}" if manifest.parent else "after no other checkpoint"
        yield (
            f"ranks: {manifest.world_size}; tensors: {len(manifest.tensors)}; files: "
            f"{len(manifest.files)} of {self.size_bytes} bytes"
        )
        yield "facts"
        yield from _lines(manifest.facts, manifest, 1)
        yield "state"
        yield from _lines(self.state, manifest, 1)


def outline(manifest: Manifest, where: str) -> Outline:
    """Raises DamagedCheckpointError for a tree that no state is in."""
    stored = {
        name: Stored(name, DTYPE_OF[entry.dtype], entry.shape)
        for name, entry in manifest.tensors.items()
    }
    views = [
        rebuild(manifest.tree, stored, own, where=where, array=_as_it_is)
        for own in manifest.per_rank or [None]
    ]
    return Outline(manifest, of_all_ranks(views, _as_it_is))


def of_all_ranks(views: Sequence[Any], give: Callable[[Stored], Any]) -> Any:
    """One state of what each rank sees of it (`CommitReader.saved`): what is alike on all once, and
    each rank's own values in a list of all ranks. `give(stored)` takes the place of tensors."""
    first = views[0]
    if isinstance(first, Stored):
        return give(first)
    if isinstance(first, PerRank):
        return [of_all_ranks([view.value], give) for view in views]
    if isinstance(first, Mapping):
        copied: Any = copy.copy(first)  # an OrderedDict keeps its attributes
        for key in first:
            copied[key] = of_all_ranks([view[key] for view in views], give)
        return copied
    if isinstance(first, (list, tuple)) and not isinstance(first, torch.Size):
        return type(first)([of_all_ranks(each, give) for each in zip(*views, strict=True)])
    return first


def _as_it_is(stored: Any) -> Any:
    return stored


def _num_bytes(manifest: Manifest, name: str) -> int:
    entry = manifest.tensors[name]
    return math.prod(entry.shape) * DTYPE_OF[entry.dtype].itemsize


def _jsonable(value: Any) -> Any:
    if isinstance(value, Stored):
        return {"tensor": value.name}
    if isinstance(value, Mapping):
        return {str(key): _jsonable(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(inner) for inner in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return repr(value)


def _lines(value: Any, manifest: Manifest, depth: int) -> Iterator[str]:
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    indent = _INDENT * depth
    for key, inner in items:
        if isinstance(inner, Stored):
            entry = manifest.tensors[inner.name]
            shape = ", ".join(map(str, entry.shape))
            yield f"{indent}{key}  {entry.dtype} [{shape}]  {_num_bytes(manifest, inner.name)} B"
        elif _is_nested(inner):
            yield f"{indent}{key}"
            yield from _lines(inner, manifest, depth + 1)
        else:
            text = repr(inner)
            more = f" ({len(inner)} items)" if isinstance(inner, (list, tuple)) else ""
            yield f"{indent}{key} = " + (
                text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}…{more}"
            )


def _is_nested(value: Any) -> bool:
    """A list of numbers or texts is one value: a random state has thousands."""
    if isinstance(value, Mapping):
        return len(value) > 0
    nested = (Stored, Mapping, list, tuple)
    return isinstance(value, (list, tuple)) and any(isinstance(item, nested) for item in value)
