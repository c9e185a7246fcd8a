"""Takes secrets out of command lines and configurations before they are written down.

Names decide: a value is hidden where its name reads like a secret's (`--api-key X`,
`PASSWORD=…`, `"token": …`), where it is the user part of a URL, or where it has the shape of a
well-known access key. It errs on the side of hiding.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

HIDDEN = "[redacted]"

_SECRET_WORDS = frozenset(
    "apikey auth authorization bearer credential credentials passphrase passwd password pwd pw "
    "secret secrets sig signature".split()
)
_KEY_OWNERS = frozenset("access account api auth encryption private secret signing".split())
# A tokenizer's tokens and counts of tokens are no secrets.
_PLAIN_TOKENS = frozenset(
    "bos class cls eos image mask max min next pad per sep special start stop unk".split()
)
_PAIR = re.compile(
    r"""(?P<name>[A-Za-z][\w.-]*)(?P<between>["']?\s*[=:]\s*["']?)(?P<value>[^"'&\s,;}]+)"""
)
_WHOLE_PAIR = re.compile(
    r"(?P<name>-{0,2}[A-Za-z][\w.-]*)(?P<between>[=:]\s*)(?P<value>.+)", re.DOTALL
)
_USERINFO = re.compile(r"([A-Za-z][\w+.-]*://)[^/\s]*@")
_KNOWN_SHAPES = re.compile(
    r"\b(?:gh[oprsu]_\w{20,}|github_pat_\w{20,}|hf_\w{20,}|sk-[\w-]{20,}|xox[abeoprs]-[\w-]{10,}"
    r"|glpat-[\w-]{16,}|A[KS]IA[0-9A-Z]{16})"
)


def is_secret_name(name: str) -> bool:
    """Whether a flag, variable or configuration key of this name holds a secret."""
    spaced = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name)
    words = [word for word in re.split(r"[^A-Za-z0-9]+", spaced.lower()) if word]
    for before, word in zip(["", *words], words, strict=False):
        if word in _SECRET_WORDS:
            return True
        if word == "key" and before in _KEY_OWNERS:
            return True
    return words[-1:] == ["token"] and not _PLAIN_TOKENS.intersection(words[-2:-1])


def redact_text(text: str) -> str:
    """`text` with secret values, URL user parts and well-known access keys hidden."""
    whole = _WHOLE_PAIR.fullmatch(text)
    if whole and is_secret_name(whole["name"]):
        return f"{whole['name']}{whole['between']}{HIDDEN}"
    text = _USERINFO.sub(rf"\g<1>{HIDDEN}@", text)
    text = _PAIR.sub(_hide_pair, text)
    return _KNOWN_SHAPES.sub(HIDDEN, text)


def redact_command(arguments: Sequence[str]) -> list[str]:
    """A command's arguments with secrets hidden, also those that follow their flag."""
    shown: list[str] = []
    hide_next = False
    for argument in arguments:
        if hide_next and not argument.startswith("--"):
            shown.append(HIDDEN)
            hide_next = False
            continue
        shown.append(redact_text(argument))
        hide_next = argument.startswith("-") and "=" not in argument and is_secret_name(argument)
    return shown


def _hide_pair(match: re.Match[str]) -> str:
    if is_secret_name(match["name"]):
        return f"{match['name']}{match['between']}{HIDDEN}"
    return match[0]
