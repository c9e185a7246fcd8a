"""PyTorch's own optimizer suite, test/test_optim.py, with our classes in the place of torch's.

The file is that of the installed torch's version: the one that TRADEWIND_TORCH_TEST_OPTIM names,
else the one cached in build/torch_suite, else it is downloaded. Where it cannot be had, one line
says so. PYTORCH_TESTING_DEVICE_ONLY_FOR=cuda runs the suite on the GPU.

    python tests/torch_suite/run.py [-k PATTERN] [--quick]
    python tests/torch_suite/run.py --write-docs [FILE]    what is skipped, into the documentation
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import os
import re
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import compatibility
from skips import SKIPS
from source import NotAvailable, find

# What test_optim.py imports from the folder beside it, so that these tests are found there too.
BESIDE = ("optim", "optim.test_lrscheduler", "optim.test_optim", "optim.test_swa_utils")
LARGE = "*large_tensor*"


class Beside(ModuleType):
    """A module in which every public name is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def load(path: Path) -> ModuleType:
    """PyTorch's test module, over our optimizers."""
    import optimizers

    optimizers.replace_torchs()
    sys.modules.update({name: Beside(name) for name in BESIDE})
    spec = importlib.util.spec_from_file_location("test_optim", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def tests_of(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for member in suite:
        if isinstance(member, unittest.TestSuite):
            yield from tests_of(member)
        else:
            yield member


def run(path: Path, pattern: str, quick: bool) -> bool:
    """Run what matches; print failures and the table of counts. False where something failed."""
    module = load(path)
    from optimizers import LIKE
    from results import Result, name_of

    class ByOptimizer(Result):
        title = "optimizer"
        reasons = frozenset(SKIPS.values())

        def group_of(self, test: unittest.TestCase) -> str:
            found = re.search(rf"_({'|'.join(LIKE)})_(cpu|cuda)", name_of(test))
            return found[1] if found else "(several)"

    tests = list(tests_of(unittest.TestLoader().loadTestsFromModule(module)))
    unused = set(SKIPS)
    for test in tests:
        name = name_of(test)
        for skipped in [p for p in SKIPS if fnmatch.fnmatchcase(name, p)]:
            unused.discard(skipped)
            setattr(test, name, unittest.skip(SKIPS[skipped])(lambda: None))
    chosen = [
        test
        for test in tests
        if fnmatch.fnmatchcase(name_of(test), pattern)
        and not (quick and fnmatch.fnmatchcase(name_of(test), LARGE))
    ]
    result = unittest.TextTestRunner(resultclass=ByOptimizer).run(unittest.TestSuite(chosen))
    assert isinstance(result, ByOptimizer)
    print(result.table())
    for skipped in sorted(unused):
        print(f"skips.py: {skipped} matches no test of {path}; remove it")
    return result.wasSuccessful() and bool(chosen) and not unused


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-k", default="*", metavar="PATTERN", help="names of tests, as in a shell")
    parser.add_argument("--quick", action="store_true", help="no tests that take 64 GB of memory")
    parser.add_argument("--write-docs", nargs="?", type=Path, const=compatibility.FILE)
    options = parser.parse_args()
    if options.write_docs:
        compatibility.write(options.write_docs)
        return 0
    # torch's test library parses the command line too.
    sys.argv = sys.argv[:1]
    os.environ.setdefault("PYTORCH_TESTING_DEVICE_ONLY_FOR", "cpu")
    os.environ.setdefault("PYTORCH_PRINT_REPRO_ON_FAILURE", "0")
    import torch

    try:
        if importlib.util.find_spec("expecttest") is None:
            raise NotAvailable("torch's test library needs expecttest; pip install expecttest")
        path = find(torch.__version__)
    except NotAvailable as reason:
        print(f"SKIPPED: {reason}")
        return 0
    except FileNotFoundError as error:
        parser.error(str(error))
    return 0 if run(path, options.k, options.quick) else 1


if __name__ == "__main__":
    sys.exit(main())
