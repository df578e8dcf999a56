"""Tests of numerics as other processors run them: python -m tests.instruction_sets [--ci]

Each setting is a run of pytest of its own, two at a time, in which torch, oneDNN, MKL, OpenBLAS (numpy's) and the
native code are held to an instruction set, with one thread or two. `--ci`: the tests with tolerances alone, under the
two settings that are furthest from the plain run, without emulated kernels of a GPU and tests of several processes.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
FOLDERS = ("model", "kernels", "engine", "train", "quant", "quantize", "parallel", "checkpoint")
LEVELS = ("DEFAULT", "AVX2", "AVX512")
"""As torch calls them; a processor has those up to its own. DEFAULT is SSE4.2 at the most, or what is not x86."""
LIBRARIES = {  # what holds each of them to a level; the native code follows the first
    "ATEN_CPU_CAPABILITY": ("default", "avx2", "avx512"),
    "ONEDNN_MAX_CPU_ISA": ("SSE41", "AVX2", "AVX512_CORE"),
    "MKL_ENABLE_INSTRUCTIONS": ("SSE4_2", "AVX2", "AVX512"),
    "OPENBLAS_CORETYPE": ("Nehalem", "Haswell", "SkylakeX"),
}


class Setting(NamedTuple):
    """`held`: the level of each library that is held to one."""

    threads: int
    held: Mapping[str, int]

    def __str__(self) -> str:
        values = [f"{name}={LIBRARIES[name][level]}" for name, level in self.held.items()]
        return " ".join([*values, f"OMP_NUM_THREADS={self.threads}"])

    def environment(self) -> dict[str, str]:
        others = {name: value for name, value in os.environ.items() if name not in LIBRARIES}
        held = {name: LIBRARIES[name][level] for name, level in self.held.items()}
        # Threads that wait for others leave the core to them: a test with two, beside other processes, took 11 times as
        # long where they did not.
        return others | held | {"OMP_NUM_THREADS": str(self.threads), "OMP_WAIT_POLICY": "passive"}


ALL_AT = [dict.fromkeys(LIBRARIES, level) for level in range(len(LEVELS))]
CI = [Setting(1, ALL_AT[0]), Setting(2, ALL_AT[1])]
LEFT_OUT_OF_CI = (
    "*_cuda.py", "*_triton.py", "*combinations.py", "*distribution.py", "*order.py", "*parts.py", "*ranks.py",
    "*served.py", "*shared_model.py", "*sharded_rows.py",
)  # fmt: skip
SETTINGS = [
    *(Setting(threads, held) for held in ALL_AT for threads in (1, 2)),
    Setting(2, {}),
    *(Setting(1, {name: level}) for name in list(LIBRARIES)[:3] for level in (0, 1)),
]


class Counts(NamedTuple):
    passed: int
    failed: int


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.instruction_sets", description=__doc__)
    parser.add_argument("--ci", action="store_true", help="two settings, and tests with tolerances alone")
    args = parser.parse_args()
    has = LEVELS.index(capability())
    fewer = ["-p", "tests.tolerances", *(f"--ignore-glob={name}" for name in LEFT_OUT_OF_CI)]
    wanted, choice = (CI, fewer) if args.ci else (SETTINGS, [])
    possible = [one for one in wanted if max(one.held.values(), default=0) <= has]
    for one in wanted:
        if one not in possible:
            print(f"{one}: left out, this processor has no {LEVELS[max(one.held.values())]}", flush=True)
    with ThreadPoolExecutor(2) as pool:
        counts = list(pool.map(lambda one: run(one, choice), possible))
    print(f"{sum(one.passed for one in counts)} passed, {sum(one.failed for one in counts)} failed")
    return int(any(one.failed or not one.passed for one in counts))


def capability() -> str:
    """What torch uses on this processor where it is not held to less."""
    code = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    done = subprocess.run(
        [sys.executable, "-c", code], env=Setting(1, {}).environment(), capture_output=True, text=True, check=True
    )
    return said if (said := done.stdout.strip()) in LEVELS else LEVELS[0]


def run(setting: Setting, choice: list[str]) -> Counts:
    """The tests in a process of their own; what failed is printed."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        quick = ["-m", "not slow and not long and not gpu"]
        options = ["-qq", "--tb=short", "-p", "no:cacheprovider", *quick, f"--junitxml={report}"]
        folders = [f"tests/unit/{name}" for name in FOLDERS]
        command = [sys.executable, "-m", "pytest", *options, *choice, f"--torch-threads={setting.threads}", *folders]
        done = subprocess.run(command, env=setting.environment(), cwd=ROOT, capture_output=True, text=True)
        counts = read(report) if report.exists() else Counts(0, 0)
    if done.returncode and not counts.failed:  # it ended before it could say
        counts = Counts(counts.passed, 1)
    if counts.failed:
        print(f"{setting}:\n{done.stdout}{done.stderr}", flush=True)
    print(f"{setting}: {counts.failed} of {sum(counts)} wrong, {time.monotonic() - began:.0f} s", flush=True)
    return counts


def read(report: Path) -> Counts:
    suite = ElementTree.parse(report).getroot()[0]
    tests, failures, errors, skipped = (int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped"))
    return Counts(tests - failures - errors - skipped, failures + errors)


if __name__ == "__main__":
    sys.exit(main())
