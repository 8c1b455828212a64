"""scikit-learn's own checks, all of them."""

import warnings

import pytest
from sklearn.utils.estimator_checks import check_estimator

from clipless.sklearn import CliplessClassifier, CliplessRegressor

# The checks that demand what privacy is there to prevent.
LEARNS_FROM_FEW_ROWS = {
    "check_classifiers_train": "demands 83% accuracy on 300 rows",
    "check_classifiers_classes": "demands that 30 to 50 rows are learnt by heart",
    "check_regressors_train": "demands R2 above 0.5 on 200 rows",
}
SAME_NOISE_TWICE = dict.fromkeys(
    (
        "check_fit_idempotent",
        "check_classifier_data_not_an_array",
        "check_regressor_data_not_an_array",
        "check_regressors_int",
        "check_supervised_y_2d",
    ),
    "demands the same result of two fits with one random_state: their noise would cancel",
)
TELLS_OF_ONE_ROW = {
    "check_supervised_y_no_nan": "demands an error if some row has no target: it contributes "
    "nothing instead, since an error would tell of that row",
}


@pytest.mark.usefixtures("quick")
# Classes of the ten rows that the checks have can be told with a large budget only.
@pytest.mark.parametrize("estimator", [CliplessClassifier(100.0), CliplessRegressor()], ids=type)
def test_check_estimator(estimator):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(
            estimator,
            expected_failed_checks=LEARNS_FROM_FEW_ROWS | SAME_NOISE_TWICE | TELLS_OF_ONE_ROW,
            on_fail=None,
            on_skip=None,
        )
    failed = {r["check_name"]: r["exception"] for r in results if r["status"] == "failed"}
    assert not failed
    passed = sum(r["status"] == "passed" for r in results)
    assert passed >= 36
