#!/bin/sh
# Prepare .venv in this checkout and build Tradewind into it: scripts/setup.sh demo|test
#
# Keeps a torch that $PYTHON (default python3) can import already, otherwise installs torch 2.13.0.
# Installs system packages only where something is missing and it may (root, or sudo without a
# password); otherwise it names the command to run.
set -eu
extra=${1:?usage: scripts/setup.sh demo|test}
python=${PYTHON:-python3}
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*" >&2; }

# install_system WHY PACKAGE...: by apt-get, where this user may.
install_system() {
    why=$1
    shift
    if command -v apt-get >/dev/null 2>&1; then
        if [ "$(id -u)" = 0 ]; then sudo=
        elif sudo -n true 2>/dev/null; then sudo='sudo -n'
        else
            say "$why; run: sudo apt-get install $*"
            return 1
        fi
        say "$why; installing $*"
        $sudo apt-get install -y -qq "$@" >/dev/null 2>&1 && return 0
        $sudo apt-get update -qq >/dev/null 2>&1
        $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@" >/dev/null && return 0
    fi
    say "$why; please install it (on Debian and Ubuntu: $*)"
    return 1
}

command -v "$python" >/dev/null || { say "$python not found; set PYTHON=..."; exit 1; }
"$python" - <<'CHECK' || exit 1
import sys
if not (3, 10) <= sys.version_info[:2] <= (3, 13):
    sys.exit(f"setup: expected Python 3.10 to 3.13, found {sys.version.split()[0]}; set PYTHON=...")
CHECK
command -v g++ >/dev/null 2>&1 || install_system 'g++ is missing' g++
"$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
    install_system 'the Python headers are missing' python3-dev
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    install_system 'python3-venv is missing' python3-venv

if [ ! -x .venv/bin/python ]; then
    if "$python" -c 'import torch' 2>/dev/null; then
        say "using the torch of $python"
        "$python" -m venv --system-site-packages .venv
        # Where $python is itself a virtual environment, its packages are not the system's.
        "$python" -c 'import site; print("\n".join(site.getsitepackages()))' \
            >"$(.venv/bin/python -c 'import site; print(site.getsitepackages()[0])')/outer.pth"
    else
        "$python" -m venv .venv
    fi
fi
pip() { .venv/bin/python -m pip --disable-pip-version-check install -q "$@"; }

if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
    say 'installing torch 2.13.0 (some minutes on a new machine)'
    pip torch==2.13.0
fi

# Rebuild only when something that is compiled or installed has changed.
stamp=.venv/tradewind-$extra.sum
sum=$( (find python -name '*.py' | LC_ALL=C sort; cat pyproject.toml CMakeLists.txt; find cmake csrc -type f ! -name '*.pyc' | LC_ALL=C sort |
    xargs cat; .venv/bin/python -c 'import torch; print(torch.__version__)') | cksum)
if [ "$(cat "$stamp" 2>/dev/null)" != "$sum" ]; then
    pip 'scikit-build-core>=0.10' 'cmake>=3.25' ninja
    say 'building the native core'
    pip --no-build-isolation -e ".[$extra]"
    [ "$extra" != test ] || pip --only-binary :all: atheris 2>/dev/null || # the extra "fuzz"
        say 'atheris has no wheel for this Python: new inputs for the checkpoint format will not be tried'
    printf '%s' "$sum" >"$stamp"
fi

if [ "$extra" = test ] && ! { [ -e /usr/include/gtest/gtest.h ] || [ -e /usr/local/include/gtest/gtest.h ]; }; then
    install_system 'GoogleTest is missing' libgtest-dev ||
        say 'the tests of the C++ core will be skipped'
fi
if [ "$extra" = test ] && ! command -v strace >/dev/null 2>&1; then
    install_system 'strace is missing' strace ||
        say 'the tests that kill a saving process at every system call will be skipped'
fi
