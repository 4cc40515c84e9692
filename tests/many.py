"""How many cases hypothesis draws: the same few in the suite, or as many as a long run asks for.

`python -m experiments.many_cases` asks for a long run, and learns from a file how many cases were tried.
"""

from __future__ import annotations

import json
import os
import resource
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings

MANY = int(os.environ.get("VARPROP_EXAMPLES", "0"))
"""Examples of each test in a long run, each time others; 0 in the suite."""
TRIED = Counter[str]()
"""How many cases of each kind were tried; an example may have several."""


def examples(few: int) -> settings:
    """Settings for a test that draws so many examples in the suite."""
    return settings(
        max_examples=MANY or few,
        derandomize=not MANY,
        database=None,
        deadline=None,
        # An example is mostly the seed of a generator, which does not get simpler by getting smaller.
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def write_counts() -> None:
    """Tell a long run what was tried, and how much memory it took at most."""
    if file := os.environ.get("VARPROP_TRIED"):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        Path(file).write_text(json.dumps({"tried": TRIED, "peak_mb": peak}))
