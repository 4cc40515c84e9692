"""Which choice is best: short fits, judged by rows that their members have not seen."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy, deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from .training.rows import Rows, Scaled

if TYPE_CHECKING:
    from .perceptron import BayesianMLP, Choice

ROUNDS, FINER = 4, 3
"""Of L-BFGS, after which only the best choice is trained further. Finer choices gain more in the first rounds
than in the end, and would win too often with as many."""


class Trial(NamedTuple):
    """A fitted estimator with the rows that it was fitted to."""

    estimator: BayesianMLP
    data: Scaled
    rounds: int
    """Of L-BFGS that it has had; with Adam it has no meaning."""


def leader(estimator: BayesianMLP, choice: Choice, rows: Rows, folds: int) -> Trial:
    """The best of a first choice and those that the best so far suggests, in three steps.

    The estimator stays as it is.
    """
    most = estimator._rounds(len(rows))

    def trial(choice: Choice, rounds: int = ROUNDS) -> Trial:
        found = copy(estimator)
        found._start(choice, rows, folds)
        data = found._scaled(rows, folds)
        options: dict[str, Any] = {} if most is None else {"epochs": min(rounds, most)}
        found._train_members(data, **options)
        return Trial(found, data, rounds)

    best = trial(choice)
    trials = [best]
    steps: list[tuple[Callable[[BayesianMLP], list[Choice]], int]] = [
        (lambda best: best._other_kinds(rows.y), ROUNDS),
        (lambda best: best._other_shares(rows.y), ROUNDS),
        (lambda best: best._finer_choices(rows), FINER),
    ]
    for others, rounds in steps:
        trials += [trial(other, rounds) for other in others(best.estimator)]
        best = max(trials, key=_score)
    best.estimator.candidates_ = pd.DataFrame(
        [{**one.estimator.choices_, "log-likelihood": _score(one)} for one in trials]
    )
    return best


def _score(trial: Trial) -> float:
    return trial.estimator.oof_log_likelihood_


def trained_further(best: Trial) -> Trial:
    """After the rounds of L-BFGS that follow the race, if they make the out-of-fold log-likelihood better."""
    estimator, data, done = best
    rounds = estimator._rounds(len(data.x))
    if rounds is None or rounds <= done:
        return best
    longer = copy(estimator)
    longer.members_ = deepcopy(estimator.members_)
    longer.elbo_ = longer.members_[0]
    longer._train_members(data, epochs=rounds - done, warm_up=0)
    return max(best, Trial(longer, data, rounds), key=_score)
