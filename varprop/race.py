"""Which choice is best: short fits, judged by rows that their members have not seen."""

from __future__ import annotations

from copy import copy, deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from .training.rows import Rows, Scaled

if TYPE_CHECKING:
    from .perceptron import BayesianMLP, Choice

ROUNDS = 4
"""Of L-BFGS, after which only the best choice is trained further."""
LEAD = 0.1
"""Nats by which a finer choice must lead then: it learns faster than it is better, and loses in gaps."""


class Trial(NamedTuple):
    """A fitted estimator with the rows that it was fitted to."""

    estimator: BayesianMLP
    data: Scaled


def leader(estimator: BayesianMLP, choice: Choice, rows: Rows, lead: float = LEAD) -> Trial:
    """The best of a first choice, those that its fit suggests, and those that the best of these suggests.

    The estimator stays as it is.

    :param lead: by which the last ones must be better.
    """
    folds, rounds = estimator._fold_count(len(rows)), estimator._rounds(len(rows))
    options: dict[str, Any] = {} if rounds is None else {"epochs": min(ROUNDS, rounds)}

    def trial(choice: Choice) -> Trial:
        found = copy(estimator)
        found._start(choice, rows, folds)
        data = found._scaled(rows, folds)
        found._train_members(data, **options)
        return Trial(found, data)

    first = trial(choice)
    trials = [first, *(trial(other) for other in first.estimator._other_choices(rows.y))]
    best = max(trials, key=_score)
    finer = [trial(other) for other in best.estimator._finer_choices(rows)]
    trials += finer
    best = max([best, *(one for one in finer if _score(one) > _score(best) + lead)], key=_score)
    best.estimator.candidates_ = pd.DataFrame(
        [{**e.choices_, "log-likelihood": e.oof_log_likelihood_} for e, _ in trials]
    )
    return best


def _score(trial: Trial) -> float:
    return trial.estimator.oof_log_likelihood_


def trained_further(best: Trial) -> Trial:
    """After the rounds of L-BFGS that follow the race, if they make the out-of-fold log-likelihood better."""
    estimator, data = best
    rounds = estimator._rounds(len(data.x))
    if rounds is None or rounds <= ROUNDS:
        return best
    longer = copy(estimator)
    longer.members_ = deepcopy(estimator.members_)
    longer.elbo_ = longer.members_[0]
    longer._train_members(data, epochs=rounds - ROUNDS, warm_up=0)
    return max(best, Trial(longer, data), key=_score)
