"""Pieces and products: what they let a line see, and how far they can move."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from clipless.privacy import Ledger, Relation
from clipless.sklearn import CliplessClassifier, CliplessRegressor, TabularRule, load
from clipless.sklearn.tables._encoder import Encoder
from clipless.sklearn.tables._pieces import find_knots, piecewise
from clipless.statistics import PrivateRows, Scaling, fit_covariance, fit_scaling

pytestmark = pytest.mark.filterwarnings("ignore::clipless.sklearn.RepeatedFitWarning")

ROWS = 20_000


def scaled(x, noise=15.0):
    ledger = Ledger.in_memory(dataset_size=len(x), relation=Relation.ZERO_OUT)
    rows = PrivateRows(x, torch.zeros(len(x), 0), ledger=ledger, insecure_seed=0)
    found = fit_scaling(
        rows, numbers=lambda x, codes: x, numeric=x.shape[1], noise_multiplier=noise
    )
    return rows, found


def gains(rows=ROWS):
    """A column that is 0 for most, a few thousand for some, and one that is spread evenly."""
    random = torch.Generator().manual_seed(0)
    column = torch.zeros(rows, dtype=torch.float64)
    some = torch.rand(rows, generator=random) < 0.08
    column[some] = 2000 + 12_000 * torch.rand(int(some.sum()), generator=random).double()
    return torch.stack([column, torch.rand(rows, generator=random).double() * 40 - 20], 1)


def bent(columns=3, directions=0, mixed=True):
    """An encoder with pieces, of columns that vary together."""
    random = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, columns, generator=random, dtype=torch.float64)
    x[:, 1] = x[:, 0] + 0.2 * x[:, 1]
    x = 5 + 3 * x
    rows, scaling = scaled(x)
    encoder = Encoder.from_scaling(scaling, step=0.75)
    covariance = fit_covariance(
        rows, features=lambda x, codes: encoder(x, codes).unsqueeze(-1), noise_multiplier=25.0
    )
    if directions:
        return encoder.with_products(
            covariance if mixed else None, noise=25 / ROWS, directions=directions
        ), x
    return (encoder.decorrelated(covariance, noise=25 / ROWS) if mixed else encoder), x


def test_knots_lie_where_rows_are():
    _, scaling = scaled(gains())
    rare, even = find_knots(scaling, step=0.75)
    assert rare[0] == 0
    assert {4096.0, 8192.0} <= set(rare.tolist())
    assert rare.max() <= 16_384
    assert len(even) >= 4
    assert even.min() >= -32
    assert even.max() <= 32
    for places in (rare, even):
        assert (places.diff() > 0).all()


def test_octaves_know_their_sign():
    x = torch.full((ROWS, 2), -6.0, dtype=torch.float64)
    x[:, 1], x[: ROWS // 2, 1] = 3.0, 0.0
    _, scaling = scaled(x)
    assert scaling.occupied[0].tolist() == [[-8.0, -4.0]]
    assert scaling.occupied[1].tolist() == [[0.0, 0.0], [2.0, 4.0]]
    assert scaling.switches.tolist() == [True, True]


def test_pieces_go_from_one_end_to_the_other():
    knots = (torch.tensor([0.0, 1.0, 3.0]).double(),)
    x = torch.tensor([[-5.0], [0.5], [2.0], [9.0], [torch.nan]]).double()
    expected = [[-0.5, -0.5], [0.0, -0.5], [0.5, 0.0], [0.5, 0.5], [0.0, 0.0]]
    assert piecewise(x, knots).tolist() == expected


def test_bounds_that_are_public_have_knots_inside():
    none = torch.zeros(1, dtype=torch.float64)
    ends = (torch.tensor([[0.0, 10.0]]).double(),)
    public = Scaling(none + 5, none + 10 / 12**0.5, none, none.bool(), (), 0.0, ends)
    (places,) = find_knots(public, step=0.75)
    assert len(places) == 5
    assert 0 <= places.min() < places.max() <= 10


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("directions", [0, 4])
def test_rows_move_no_farther_than_the_constant_of_certificates(mixed, directions):
    """Steps over which all pieces of a row move, and small ones at random places."""
    encoder, x = bent(directions=directions, mixed=mixed)
    assert sum(len(each) for each in encoder.knots) >= 9
    limit = encoder.lipschitz()
    codes = torch.zeros(2000, 0)
    random = torch.Generator().manual_seed(2)
    nearest = 0.0
    for size in (1e-3, 0.1, 1.0):
        begin = x[:2000] + torch.randn(2000, x.shape[1], generator=random).double()
        step = size * torch.randn(2000, x.shape[1], generator=random).double()
        moved = (encoder(begin + step * encoder.spread, codes) - encoder(begin, codes)).double()
        ratio = moved.norm(dim=1) / step.norm(dim=1)
        assert ratio.max() <= limit * (1 + 1e-3)
        nearest = max(nearest, float(ratio.max()))
    assert nearest > 0.05 * limit  # it is a bound of this map, not of any map


def test_rows_apart_stay_apart_and_norms_are_bounded():
    encoder, x = bent(directions=4)
    codes = torch.zeros(len(x), 0)
    whole = encoder(x, codes)
    assert whole.shape == (ROWS, encoder.features)
    assert torch.equal(whole[7:9], encoder(x[7:9], codes[7:9]))
    assert whole.norm(dim=1).max() <= 2**0.5 + 1e-5
    linear = whole[:, : encoder.features - 10].norm(dim=1)
    assert (linear > 1 - 1e-5).double().mean() > 0.5  # most rows fill the ball


@pytest.mark.parametrize("directions", [0, 4])
def test_pieces_and_products_are_saved(directions):
    encoder, x = bent(directions=directions)
    restored = Encoder.from_dict(encoder.to_dict())
    codes = torch.zeros(10, 0)
    assert torch.equal(restored(x[:10], codes), encoder(x[:10], codes))
    assert restored.features == encoder.features == encoder(x[:1], codes[:1]).shape[1]
    assert restored.lipschitz() == encoder.lipschitz()


def test_structure_follows_from_public_numbers():
    few, more, many = (
        TabularRule.choose(rows=rows, columns=10, epsilon=1.0) for rows in (1000, 30_000, 500_000)
    )
    assert few.knot_step == 0 < more.knot_step
    assert [each.hidden for each in (few, more, many)] == [0, 0, 128]
    assert few.product_directions(rows=1000, features=30) == 0
    assert few.product_directions(rows=1000, features=15) == 15
    assert more.product_directions(rows=30_000, features=30) == 24
    assert more.product_directions(rows=30_000, features=80) == 0
    assert 0 < more.product_directions(rows=5_000_000, features=20) < 10  # they must fit in memory
    assert TabularRule.choose(rows=1000, columns=10, epsilon=8.0).knot_step > 0
    assert TabularRule.choose_for_vectors(rows=30_000, epsilon=1.0).directions == 0


def interaction(rows=12_000):
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 4))
    return x, (x[:, 0] * x[:, 1] + np.where(np.abs(x[:, 2]) > 1, 1.0, -0.5)) > 0


def test_a_line_on_them_sees_thresholds_and_interactions(tmp_path):
    x, y = interaction()
    fitted = CliplessClassifier(1.0, random_state=0).fit(x[:8000], y[:8000])
    score = roc_auc_score(y[8000:], fitted.decision_function(x[8000:]))
    assert fitted.rule_.hidden == 0
    assert fitted._encoder.directions is not None
    assert score > 0.9  # a line on the columns has one half
    path = tmp_path / "model.safetensors"
    fitted.save(path)
    loaded = load(path)
    assert np.array_equal(loaded.decision_function(x[:50]), fitted.decision_function(x[:50]))
    parts = fitted.contributions(x[:20])
    centre = fitted._encoder.center.numpy()[None]
    difference = fitted.decision_function(x[:20]) - fitted.decision_function(centre)
    assert np.abs(parts.sum(1) - difference).max() < 1e-3
    assert fitted.feature_importances_[:3].min() > 2 * fitted.feature_importances_[3]


def test_certificates_hold_where_features_bend():
    """No move within its radius changes a prediction: rows are moved towards the other class."""
    x, y = interaction(6000)
    fitted = CliplessClassifier(4.0, random_state=0).fit(x, y)
    radii = fitted.certified_radius(x[:300])
    assert (radii > 0).mean() > 0.9
    predicted = fitted.predict(x[:300])
    random = np.random.default_rng(1)
    for _ in range(50):
        step = random.normal(size=(300, 4))
        step *= (radii / np.linalg.norm(step, axis=1))[:, None] * (1 - 1e-6)
        moved = x[:300] + step * fitted._encoder.spread.numpy()
        assert (fitted.predict(moved) == predicted).all()


def test_a_regressor_bends_too():
    random = np.random.default_rng(0)
    x = random.normal(size=(8000, 3))
    y = 10 * x[:, 0] * x[:, 1] + 5 * np.abs(x[:, 2])
    bends = CliplessRegressor(2.0, random_state=0).fit(x, y)
    rule = replace(bends.rule_, knot_step=0.0, directions=0)
    line = CliplessRegressor(2.0, random_state=0, rule=rule).fit(x, y)
    assert bends.score(x, y) > line.score(x, y) + 0.3
