"""What Tradewind costs beside the step: memory at adoption, import time, build time.

python benchmarks/footprint.py [--json] [--skip-build]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import machine, show, summary, text

ROOT = Path(__file__).resolve().parents[1]

ADOPTION = """
import json, torch, tradewind as tw

def status(name):
    for line in open("/proc/self/status"):
        if line.startswith(name):
            return int(line.split()[1]) * 1024

tw.Engine(torch.nn.Linear(2, 2), tw.SGD(lr=0.1)).close()  # everything is loaded
model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(32)))
bytes_ = sum(p.nbytes for p in model.parameters())
open("/proc/self/clear_refs", "w").write("5")  # peak := now
before = status("VmRSS")
engine = tw.Engine(model, tw.SGD(lr=0.1))
print(json.dumps({"peak": (status("VmHWM") - before) / bytes_,
                  "after": (status("VmRSS") - before) / bytes_}))
"""

IMPORT = """
import json, time
a = time.perf_counter(); import tradewind as tw; b = time.perf_counter()
import torch; c = time.perf_counter()
tw.Engine, tw.AdamW; d = time.perf_counter()
print(json.dumps({"import_s": b - a, "torch_s": c - b, "first_use_s": d - c}))
"""


def in_new_process(code: str) -> dict[str, float]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def repeated(code: str, repeats: int) -> dict[str, list[float]]:
    runs = [in_new_process(code) for _ in range(repeats + 1)][1:]
    return {name: [run[name] for run in runs] for name in runs[0]}


def measure_build() -> dict[str, float]:
    """Seconds of a clean build without CUDA, and of one after touching one rule."""
    ninja = shutil.which("ninja", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if ninja is None or cmake is None:
        raise SystemExit("footprint: cmake and ninja are needed; pip install cmake ninja")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        for name in ("CMakeLists.txt", "cmake", "csrc"):
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
            source.mkdir(exist_ok=True)
            copy(ROOT / name, source / name)
        build = str(Path(folder) / "build")
        configure = [cmake, "-G", "Ninja", "-S", str(source), "-B", build, "-DTRADEWIND_CUDA=OFF"]
        options = [f"-DPython_EXECUTABLE={sys.executable}", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        clean_s = timed([*configure, *options], [ninja, "-C", build])
        (source / "csrc/step/rules/adamw.h").touch()
        return {"clean_build_s": clean_s, "one_rule_build_s": timed([ninja, "-C", build])}


def timed(*commands: list[str]) -> float:
    began = time.perf_counter()
    for command in commands:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--skip-build", action="store_true")
    options = parser.parse_args()
    adoption = repeated(ADOPTION, 5)
    imports = repeated(IMPORT, 7)
    figures: dict[str, Any] = {
        "adoption_peak_in_copies": summary(adoption["peak"]),
        "adoption_after_in_copies": summary(adoption["after"]),
        "import_s": summary(imports["import_s"]),
        "import_torch_s": summary(imports["torch_s"]),
        "first_use_after_torch_s": summary(imports["first_use_s"]),
    }
    if not options.skip_build:
        figures |= {name: summary([value]) for name, value in measure_build().items()}
    rows = [["footprint", "median (min to max)"]]
    rows += [[name, text(figure, digits=3)] for name, figure in figures.items()]
    show({"machine": machine(), **figures}, rows, as_json=options.json)


if __name__ == "__main__":
    main()
