"""JSON of unknown origin, read without surprises: every defect is a DamagedCheckpointError."""

from __future__ import annotations

import json
import math
from typing import NoReturn

from tradewind.checkpoint.errors import DamagedCheckpointError

_EXCERPT = 60


def loads(data: bytes, where: str) -> object:
    """The value of `data`, UTF-8 text. `where` begins every message.

    Refused besides what is no JSON: a member named twice, numbers that no float64 holds, numbers
    of thousands of digits, nesting that Python cannot follow, half a surrogate pair.
    """
    try:
        text = data.decode("utf-8")
        value: object = _DECODER.decode(text)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise DamagedCheckpointError(
            f"{where}: expected UTF-8 text, got byte 0x{data[error.start]:02x} at {error.start}"
        ) from None
    except UnicodeEncodeError:
        raise DamagedCheckpointError(f"{where}: a text has half a surrogate pair") from None
    except RecursionError:
        raise DamagedCheckpointError(f"{where}: nested deeper than this reader follows") from None
    except ValueError as error:
        raise DamagedCheckpointError(f"{where}: no JSON that is read here: {error}") from None
    return value


def excerpt(value: object) -> str:
    """`value` in a message, cut to a readable length."""
    try:
        text = value if isinstance(value, str) else json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    text = repr(text[:_EXCERPT])[1:-1] + ("…" if len(text) > _EXCERPT else "")
    return f'"{text}"' if isinstance(value, str) else text


def _members(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"member {excerpt(name)} stands there twice")
            seen.add(name)
    return members


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number {excerpt(text)} is beyond float64")
    return value


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_members, parse_float=_float, parse_constant=_constant
)
