"""PyTorch's tests of DistributedDataParallel, with `tw.GradientSharing` in its place.

Those of `torch.testing._internal.distributed`, which torch installs, run everywhere, in two
processes over Gloo. Those of test/distributed/test_c10d_gloo.py, with what it takes from
test_c10d_common.py, are not installed: they come from the folder that
TRADEWIND_TORCH_TEST_DISTRIBUTED names, from build/torch_suite, or by download; where they cannot be
had, one line says so. Tests that ask for GPUs run on the CPU (host_as_gpu.py).

    python tests/torch_suite/distributed.py [-k PATTERN] [--installed]
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import inspect
import logging
import os
import sys
import unittest
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from distributed_skips import SKIPS
from source import NotAvailable, find_distributed

NUM_RANKS = 2
TIMEOUT_S = 60
# A test is of DistributedDataParallel where it, or a method that it calls, makes one.
MAKES_ONE = ("DistributedDataParallel(", "DDP(")


def replace_torchs() -> None:
    """Our class into DistributedDataParallel's place, and ranks that fork from this process: they
    then find it there too, and need not import torch again."""
    import host_as_gpu
    import in_ddps_place
    import torch
    from torch.testing._internal import common_distributed

    in_ddps_place.install()
    case = common_distributed.MultiProcessTestCase
    run_test = case.run_test

    def run_on_host(self: Any, *args: Any) -> None:
        torch.set_num_threads(1)
        host_as_gpu.install(NUM_RANKS)
        run_test(self, *args)

    def fork(self: Any) -> None:
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    case.run_test = run_on_host
    case._spawn_processes = fork


def installed_case() -> type[unittest.TestCase]:
    suite: Any = import_module("torch.testing._internal.distributed.distributed_test")

    class InstalledTests(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._spawn_processes()

    InstalledTests.__qualname__ = "InstalledTests"
    return InstalledTests


def gloo_case(folder: Path) -> type[unittest.TestCase]:
    sys.path.insert(0, str(folder))
    module: ModuleType = import_module("test_c10d_gloo")
    case: type[unittest.TestCase] = module.DistributedDataParallelTest
    common = import_module("torch.testing._internal.common_utils")
    for owner in case.__mro__:
        if any(hasattr(member, "parametrize_fn") for member in vars(owner).values()):
            common.instantiate_parametrized_tests(owner)
    return case


def names_of(case: type[unittest.TestCase]) -> list[str]:
    """The case's tests of DistributedDataParallel."""
    methods = _methods(case)
    chosen = {name for name, text in methods.items() if any(m in text for m in MAKES_ONE)}
    while True:
        callers = {
            name
            for name, text in methods.items()
            if any(f"self.{called}(" in text for called in chosen)
        }
        if callers <= chosen:
            break
        chosen |= callers
    return [n for n in unittest.TestLoader().getTestCaseNames(case) if n in chosen]


def _methods(case: type) -> dict[str, str]:
    """Source text by name, of what the case adds to unittest's."""
    added = (name for name in dir(case) if not hasattr(unittest.TestCase, name))
    functions = ((name, inspect.unwrap(getattr(case, name))) for name in added)
    return {name: inspect.getsource(f) for name, f in functions if inspect.isfunction(f)}


def tests_of(cases: list[type[unittest.TestCase]], pattern: str) -> Iterator[unittest.TestCase]:
    for case in cases:
        for name in names_of(case):
            if not fnmatch.fnmatchcase(name, pattern):
                continue
            skipped = _skip_of(name)
            if skipped is None:
                yield case(name)
            else:
                yield _Skipped(case, name, SKIPS[skipped])


def _skip_of(name: str) -> str | None:
    return next((p for p in SKIPS if fnmatch.fnmatchcase(name, p)), None)


class _Skipped(unittest.TestCase):
    """In the place of a test, for which no process needs to start."""

    def __init__(self, case: type, name: str, reason: str) -> None:
        super().__init__("skip")
        self._id = f"{case.__module__}.{case.__qualname__}.{name}"
        self._reason = reason

    def id(self) -> str:
        return self._id

    def __str__(self) -> str:
        return self._id

    def skip(self) -> None:
        self.skipTest(self._reason)


def run(pattern: str, *, only_installed: bool) -> bool:
    """Run what matches; print failures and the table of counts. False where something failed."""
    replace_torchs()
    from results import Result

    cases, missing = [installed_case()], None
    if not only_installed:
        import torch

        try:
            cases.append(gloo_case(find_distributed(torch.__version__)))
        except NotAvailable as reason:
            missing = reason

    class ByCase(Result):
        title = "tests"
        reasons = frozenset(SKIPS.values())

        def group_of(self, test: unittest.TestCase) -> str:
            return test.id().split(".")[-2]

    tests = list(tests_of(cases, pattern))
    result = unittest.TextTestRunner(resultclass=ByCase).run(unittest.TestSuite(tests))
    assert isinstance(result, ByCase)
    print(result.table())
    if missing is not None:
        print(f"SKIPPED: test_c10d_gloo.py: {missing}")
    names = [name for case in cases for name in names_of(case)]
    unused = [] if missing or only_installed else [p for p in SKIPS if not fnmatch.filter(names, p)]
    for skipped in unused:
        print(f"distributed_skips.py: {skipped} matches no test; remove it")
    return result.wasSuccessful() and bool(tests) and not unused


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-k", default="*", metavar="PATTERN", help="names of tests, as in a shell")
    parser.add_argument("--installed", action="store_true", help="only tests that torch installs")
    options = parser.parse_args()
    # torch's test library parses the command line too.
    sys.argv = sys.argv[:1]
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=str(NUM_RANKS),
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(TIMEOUT_S),
        PYTORCH_PRINT_REPRO_ON_FAILURE="0",
    )
    # Each rank would log its traceback line by line; the failure has it too.
    logging.disable(logging.ERROR)
    try:
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_gloo_available():
            raise NotAvailable("this torch is built without Gloo")
        if importlib.util.find_spec("expecttest") is None:
            raise NotAvailable("torch's test library needs expecttest; pip install expecttest")
    except NotAvailable as reason:
        print(f"SKIPPED: {reason}")
        return 0
    try:
        return 0 if run(options.k, only_installed=options.installed) else 1
    except FileNotFoundError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
