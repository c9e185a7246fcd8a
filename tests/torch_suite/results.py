"""Outcomes of the suite, counted by optimizer."""

from __future__ import annotations

import re
import unittest
from collections import Counter
from typing import Any

from optimizers import LIKE
from skips import SKIPS

# "by torch": skipped by the suite itself, such as what needs a GPU.
OUTCOMES = ("passed", "skipped", "by torch", "failed")


def name_of(test: unittest.TestCase) -> str:
    return test.id().rsplit(".", 1)[-1]


def optimizer_of(test: unittest.TestCase) -> str:
    found = re.search(rf"_({'|'.join(LIKE)})_(cpu|cuda)", name_of(test))
    return found[1] if found else "(several)"


class Result(unittest.TextTestResult):
    """unittest's result that counts each outcome by optimizer too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counts: dict[str, Counter[str]] = {}

    def _count(self, test: unittest.TestCase, outcome: str) -> None:
        self.counts.setdefault(optimizer_of(test), Counter())[outcome] += 1

    def addSuccess(self, test: unittest.TestCase) -> None:
        super().addSuccess(test)
        self._count(test, "passed")

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addExpectedFailure(test, err)
        self._count(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self._count(test, "skipped" if reason in SKIPS.values() else "by torch")

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addFailure(test, err)
        self._count(test, "failed")

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        super().addError(test, err)
        self._count(test, "failed")

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        super().addUnexpectedSuccess(test)
        self._count(test, "failed")

    def table(self) -> str:
        rows: list[tuple[str, ...]] = [("optimizer", *OUTCOMES)]
        total: Counter[str] = Counter()
        for name, counts in sorted(self.counts.items()):
            rows.append((name, *(str(counts[outcome]) for outcome in OUTCOMES)))
            total += counts
        rows.append(("all", *(str(total[outcome]) for outcome in OUTCOMES)))
        return "\n".join(
            f"{name:<12}" + "".join(f"{cell:>10}" for cell in cells) for name, *cells in rows
        )
