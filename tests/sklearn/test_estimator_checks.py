"""scikit-learn's own checks, all of them."""

import warnings

import pytest
from sklearn.utils.estimator_checks import check_estimator

from clipless.sklearn import CliplessClassifier, CliplessRegressor

# The checks that demand of a few dozen rows what privacy is there to prevent: that they are learnt.
LEARNS_FROM_FEW_ROWS = {
    "check_classifiers_train": "demands 83% accuracy on 300 rows",
    "check_classifiers_classes": "demands that 30 to 50 rows are learnt by heart",
    "check_regressors_train": "demands R2 above 0.5 on 200 rows",
}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("estimator", [CliplessClassifier(), CliplessRegressor()], ids=type)
def test_check_estimator(estimator):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(
            estimator, expected_failed_checks=LEARNS_FROM_FEW_ROWS, on_fail=None, on_skip=None
        )
    failed = {r["check_name"]: r["exception"] for r in results if r["status"] == "failed"}
    assert not failed
    passed = sum(r["status"] == "passed" for r in results)
    assert passed >= 40
