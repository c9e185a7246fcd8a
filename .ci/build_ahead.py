"""Builds what the tests of builds will want, on cores that nothing else wants just then.

Most tests keep one core busy, and the C++ suites of test_core_build.py and the copy of
test_add_an_update_rule.py are half an hour of compiling. Here they are built in the background at
idle priority, under the locks of those tests: a test that comes first to its folder builds it, one
that comes later finds it done. What fails here is left for the tests to say.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "python"))

import test_add_an_update_rule as update_rule
import test_core_build as core


def yield_to_others() -> None:
    os.setpgid(0, 0)  # .ci/run ends the whole group
    os.nice(19)
    with contextlib.suppress(AttributeError, OSError):  # Linux has it, but not every sandbox
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    # Left over time is no measure of a build that hangs.
    core.TIMEOUT_S = update_rule.TIMEOUT_S = 2 * 3600


def build(name: str, built: Callable[[], AbstractContextManager[Any]], *targets: str) -> None:
    began = time.monotonic()
    try:
        with built() as folder:
            if targets and folder.has_googletest:
                update_rule.succeed(*update_rule.NINJA, "-C", folder.build, *targets)
        outcome = "built"
    except BaseException as error:  # pytest's skips are no Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        outcome = f"left to its test, as it failed here ({type(error).__name__})"
    print(f"build ahead: {name}: {outcome} after {time.monotonic() - began:.0f} s", file=sys.stderr)


def main() -> None:
    yield_to_others()
    # In the order in which pytest comes to them.
    build("add-an-update-rule", update_rule.built, *update_rule.CPP_TESTS)
    for config in core.CONFIGS:
        build(config.name, lambda config=config: core.built(config))


if __name__ == "__main__":
    main()
