from sklearn.utils.estimator_checks import parametrize_with_checks

from varprop import BayesianMLPClassifier, BayesianMLPRegressor

QUICK = {"epochs": 40, "lr": 0.03, "batch_size": 200}


@parametrize_with_checks([BayesianMLPRegressor(**QUICK), BayesianMLPClassifier(**QUICK)])
def test_contract(estimator, check):
    check(estimator)
