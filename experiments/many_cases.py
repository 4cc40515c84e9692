"""The property tests with many more cases than the suite has time for, in rounds, each with its own seed.

    python -m experiments.many_cases hostile       files from a stranger: 100,000 models, tables and data sets
    python -m experiments.many_cases float_range   rules, divergences, likelihoods and predictions

A round is a process that runs `tests/test_<name>.py`. The result says how many cases were tried, what failed
and how much memory a round took at most.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from . import cells

ROOT = Path(__file__).parent.parent


def run(name: str, rounds: int, examples: int, out: Path) -> list[str]:
    """Run the rounds, write the result after each, and return what failed."""
    tried, failed, peak, began = Counter[str](), list[str](), 0, time.perf_counter()
    for seed in range(rounds):
        found = one_round(name, seed, examples)
        tried.update(found["tried"])
        failed += found["failed"]
        peak = max(peak, found["peak_mb"])
        cells.write(
            out,
            {"tests": f"tests/test_{name}.py", "rounds": seed + 1, "examples": examples},
            tried=dict(tried),
            failed=failed,
            peak_mb=peak,
            minutes=round((time.perf_counter() - began) / 60, 1),
        )
        print(f"round {seed + 1} of {rounds}: {dict(tried)}, {len(failed)} failed", flush=True)
    return failed


def one_round(name: str, seed: int, examples: int) -> dict[str, Any]:
    """What a process tried, with this many examples of each test, and the tests that failed."""
    with tempfile.TemporaryDirectory() as folder:
        tried = Path(folder) / "tried.json"
        words = [
            "-m",
            "pytest",
            f"tests/test_{name}.py",
            "-q",
            "-p",
            "no:cacheprovider",
            "--basetemp",
            f"{folder}/t",
        ]
        done = subprocess.run(
            [sys.executable, *words, f"--hypothesis-seed={seed}"],
            cwd=ROOT,
            env={**os.environ, "VARPROP_EXAMPLES": str(examples), "VARPROP_TRIED": str(tried)},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            print(done.stdout[-20_000:])
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if done.returncode and not failed:
            failed = [f"round {seed} ended with code {done.returncode}"]
        return {
            "tried": {},
            "peak_mb": 0,
            **(json.loads(tried.read_text()) if tried.exists() else {}),
            "failed": failed,
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=("hostile", "float_range"))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--examples", type=int, default=1000, help="Of each test in a round.")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    out = options.out or cells.RESULTS / f"{options.name}.json"
    if run(options.name, options.rounds, options.examples, out):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
