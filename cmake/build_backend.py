"""scikit-build-core, behind one check: is torch here?

An isolated build has no torch, and pip would first fetch gigabytes of another one to satisfy the
package's dependencies. So the check comes in the first hook that pip calls, and names the command.
"""

import sys

import find_torch

try:
    from scikit_build_core import build as _build
    from scikit_build_core.build import *  # noqa: F403
except ImportError:
    sys.exit(f"tradewind: the build needs scikit-build-core. Run:\n    {find_torch.COMMAND}")


def _check() -> None:
    try:
        find_torch.main()
    except SystemExit as missing:
        if missing.code:
            print(missing.code, file=sys.stderr)
            raise RuntimeError(str(missing.code)) from None


def get_requires_for_build_wheel(config_settings=None):
    _check()
    return _build.get_requires_for_build_wheel(config_settings)


def get_requires_for_build_editable(config_settings=None):
    _check()
    return _build.get_requires_for_build_editable(config_settings)
