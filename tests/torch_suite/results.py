"""Outcomes of a suite, counted by group of tests."""

from __future__ import annotations

import unittest
from collections import Counter
from collections.abc import Collection
from typing import Any

# "by torch": skipped by the suite itself, such as what needs a GPU.
OUTCOMES = ("passed", "skipped", "by torch", "failed")


def name_of(test: unittest.TestCase) -> str:
    return test.id().rsplit(".", 1)[-1]


class Result(unittest.TextTestResult):
    """unittest's result that counts each outcome by group too."""

    title = "test"
    reasons: Collection[str] = ()  # of tests that are skipped by us

    def group_of(self, test: unittest.TestCase) -> str:
        return name_of(test)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counts: dict[str, Counter[str]] = {}

    def _count(self, test: unittest.TestCase, outcome: str) -> None:
        self.counts.setdefault(self.group_of(test), Counter())[outcome] += 1

    def addSuccess(self, test: unittest.TestCase) -> None:
        super().addSuccess(test)
        self._count(test, "passed")

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addExpectedFailure(test, err)
        self._count(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self._count(test, "skipped" if reason in self.reasons else "by torch")

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
        rows: list[tuple[str, ...]] = [(self.title, *OUTCOMES)]
        total: Counter[str] = Counter()
        for name, counts in sorted(self.counts.items()):
            rows.append((name, *(str(counts[outcome]) for outcome in OUTCOMES)))
            total += counts
        rows.append(("all", *(str(total[outcome]) for outcome in OUTCOMES)))
        return "\n".join(
            f"{name:<28}" + "".join(f"{cell:>10}" for cell in cells) for name, *cells in rows
        )
