"""Measurements that take turns, so that whatever else the machine does affects all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median, quantiles
from typing import TypeAlias

Times: TypeAlias = dict[str, list[float]]
"""The seconds of each contestant, round by round."""
LEAST = 2e-3
"""Seconds that a turn lasts at least; a quick contestant runs several times in its turn."""


def take_turns(
    runs: Mapping[str, Callable[[], object]],
    seconds: float,
    clock: Callable[[], float] = time.process_time,
    rounds: tuple[int, int] = (3, 200),
) -> Times:
    """The time of each run in each round.

    :param seconds: how long it may take by that clock, within the least and the largest number of rounds.
    """

    def turn(run: Callable[[], object], repeats: int) -> float:
        began = clock()
        for _ in range(repeats):
            run()
        return (clock() - began) / repeats

    for run in runs.values():
        run()
    repeats = {name: max(1, round(LEAST / max(turn(run, 1), 1e-6))) for name, run in runs.items()}
    times: Times = {name: [] for name in runs}
    began = clock()
    for k in range(rounds[1]):
        if k >= rounds[0] and clock() - began > seconds:
            break
        for name, run in runs.items():
            times[name].append(turn(run, repeats[name]))
    return times


def compared(times: Times, base: str) -> dict[str, dict[str, float]]:
    """The median seconds of each contestant, and its ratio to the base in the same round with its quartiles.

    >>> compared({"plain": [1.0, 2.0, 4.0], "vbp": [3.0, 6.0, 12.0]}, "plain")["vbp"]["ratio"]
    3.0
    """
    found = {}
    for name, values in times.items():
        ratios = [a / b for a, b in zip(values, times[base], strict=True)]
        low, ratio, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        found[name] = {"seconds": median(values), "ratio": ratio, "low": low, "high": high}
    return found
