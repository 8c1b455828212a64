"""scikit-learn's own searches: each fit draws fresh noise, and a shared ledger adds up."""

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from clipless.errors import BudgetExhaustedError, PrivacyError
from clipless.privacy import Ledger, Relation, epsilon
from clipless.sklearn import CliplessClassifier, RepeatedFitWarning

pytestmark = pytest.mark.usefixtures("quick")


def test_cross_validation_warns_of_the_sum(table):
    with pytest.warns(RepeatedFitWarning, match="by adding up"):
        scores = cross_val_score(CliplessClassifier(2.0, random_state=0), *table, cv=3)
    assert len(scores) == 3
    assert np.isfinite(scores).all()


@pytest.mark.filterwarnings("ignore::clipless.sklearn.RepeatedFitWarning")
def test_searches_and_pipelines_run_and_no_two_fits_share_noise(table):
    model = make_pipeline(FunctionTransformer(np.abs), CliplessClassifier(2.0, random_state=0))
    search = GridSearchCV(model, {"cliplessclassifier__epsilon": [1.0, 2.0]}, cv=2)
    search.fit(*table)
    assert search.best_params_["cliplessclassifier__epsilon"] in (1.0, 2.0)
    one, two = (clone(model).fit(*table)[-1] for _ in range(2))
    assert (one.network_[1].weight != two.network_[1].weight).any()
    assert (one._encoder.center != two._encoder.center).all()


@pytest.mark.filterwarnings("ignore::clipless.sklearn.RepeatedFitWarning")
def test_fits_with_one_ledger_stay_within_one_budget(table):
    x, y = table
    ledger = Ledger.in_memory(dataset_size=len(x), relation=Relation.ZERO_OUT)
    first = CliplessClassifier(1.0, ledger=ledger).fit(x, y)
    spent = ledger.releases
    with pytest.raises(BudgetExhaustedError):
        CliplessClassifier(1.0, ledger=ledger).fit(x, y)
    assert ledger.releases == spent
    CliplessClassifier(2.0, ledger=ledger).fit(x, y)
    total = epsilon(ledger.history(), first.privacy_.delta)
    assert 1.0 < total <= 2.0
    assert ledger.releases == 2 * spent
    # Folds have fewer rows than the ledger is kept for: no sum of other tables is written there.
    with pytest.raises(PrivacyError, match="one ledger for each data set"):
        CliplessClassifier(3.0, ledger=ledger).fit(x[:200], y[:200])
