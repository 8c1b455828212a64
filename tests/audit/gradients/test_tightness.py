"""Gradient norms over bounds: measured as training computes them, and a wrong bound is noticed."""

import json
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import clipless
from clipless import losses
from clipless import nn as lip
from clipless.audit import TightnessCallback, tightness
from clipless.bounds import Bound, register, sensitivity, unregister
from clipless.errors import ConstraintError, PrivacyError
from tests.bounds.architectures import MODELS
from tests.training.small import DATA, StopAt, trainer

LOSS = losses.CrossEntropy(tau=4.0)


def data(shape=(6,), count=40, classes=3):
    return torch.randn(count, *shape), torch.randint(classes, (count,))


def by_hand(model, loss, x, y):
    """Gradient norms of single examples, one backward pass at a time."""
    found = []
    for one, target in zip(x, y, strict=True):
        model.zero_grad()
        loss.per_example(model(one[None]), target[None]).sum().backward()
        found.append([p.grad.norm().item() for p in model.parameters() if p.requires_grad])
    model.zero_grad()
    return torch.tensor(found)


@pytest.mark.parametrize("name", MODELS)
def test_agrees_with_single_backward_passes(name):
    build, shape, draw = MODELS[name]
    model = build()
    x, y = data(shape)
    if draw is not None:
        x = draw(40, torch.Generator().manual_seed(0))
    clipless.clip_products(model, fraction=0.2, loss=LOSS, input_shape=shape)
    result = tightness(model, (x, y), loss=LOSS, chunk=16)
    expected = by_hand(model, LOSS, x, y)
    bounds = sensitivity(model, loss=LOSS, input_shape=shape).gradient_bounds
    for column, (parameter, bound) in enumerate(bounds.items()):
        ratios = expected[:, column] / bound
        assert result[parameter].bound == bound
        assert result[parameter].largest == pytest.approx(ratios.max().item(), rel=1e-4)
        assert result[parameter].mean == pytest.approx(ratios.mean().item(), rel=1e-4)
        assert sum(result[parameter].counts) == 40
    assert result.violations == {}


def test_clipping_is_part_of_what_is_measured():
    """Clipped gradients reach their limit, and the bound is that limit."""
    x, y = data()
    model = MODELS["mlp"][0]()
    model.append(lip.ClipGradient(0.05))
    clipless.clip_products(model, fraction=0.3, loss=LOSS, input_shape=(6,))
    result = tightness(model, (x, y), loss=LOSS)
    for name in ("1.weight", "3.weight", "5.weight"):
        assert result[name].largest == pytest.approx(1.0, abs=1e-4)
    assert result["5.weight"].bound < 0.06
    unclipped = by_hand(MODELS["mlp"][0](), LOSS, x, y)
    assert unclipped[:, 4].max() > 4 * result["5.weight"].bound  # clipping left out would show


def test_thresholds_of_a_model_in_training_speak_of_one_example():
    seen = []

    class Look(clipless.training.Callback):
        def on_fit_start(self, trainer):
            seen.append(tightness(trainer.model, DATA, loss=trainer.criterion))

    model = trainer().model
    model.append(lip.ClipGradient(0.1, follow=lip.FollowQuantile()))
    before = tightness(model, DATA, loss=losses.CrossEntropy(tau=4.0))
    trainer(model=model, callbacks=[Look()], steps=2).fit(DATA)
    assert seen[0] == before
    assert seen[0].whole.largest > 0.1


def test_a_loss_beyond_its_constant_is_clipped_as_in_training():
    liar = losses.PerExample(lambda output, target: 9 * output[target], lipschitz=1.0)
    result = tightness(MODELS["mlp"][0](), data(), loss=liar)
    assert result.violations == {}
    assert result["5.bias"].largest == pytest.approx(1.0, abs=1e-4)


class Doubled(nn.Module):
    def forward(self, x):
        return 2.0 * x


@pytest.fixture
def wrong_rule():
    @register(Doubled)
    def doubled(site, x):
        return Bound(lipschitz=1.0, output=x.norm, rows_apart=True)  # a lie: it is 2

    yield
    unregister(Doubled)


def wrong_model():
    return nn.Sequential(
        lip.BoundedInput(1.0, mode="sphere"), lip.SpectralLinear(6, 8), Doubled(),
        lip.SpectralLinear(8, 2),
    )  # fmt: skip


@pytest.mark.usefixtures("wrong_rule")
def test_a_wrong_bound_is_noticed():
    result = tightness(wrong_model(), data(classes=2), loss=losses.CrossEntropy())
    assert "3.weight" in result.violations
    assert 1.2 < result.violations["3.weight"] <= 2.0
    assert "exceeded" in str(result)
    assert json.loads(json.dumps(result.to_dict()))["violations"] == result.violations


@pytest.mark.usefixtures("wrong_rule")
def test_training_with_a_wrong_bound_ends():
    x, y = data(count=60, classes=2)
    options = {"steps": 4, "criterion": losses.CrossEntropy()}
    watch = TightnessCallback((x, y))
    with pytest.raises(PrivacyError, match=r"3\.weight .* does not hold"):
        trainer(model=wrong_model(), callbacks=[watch], **options).fit((x, y))
    lenient = TightnessCallback((x, y), on_violation="warn")
    with pytest.warns(UserWarning, match="does not hold"):
        trainer(model=wrong_model(), callbacks=[lenient], **options).fit((x, y))
    assert [step for step, _ in lenient.results] == [0, 3, 4]


def test_gradients_that_are_no_numbers_are_violations():
    from clipless.audit.gradients._tightness_result import summarise

    norms = torch.tensor([[0.5], [math.nan]], dtype=torch.float64)
    result = summarise(norms, bounds={"w": 1.0}, whole=1.0, loss="", slack=1e-3)
    assert set(result.violations) == {"w", "whole gradient"}
    assert json.loads(json.dumps(result.to_dict()))["violations"] == {
        "w": None, "whole gradient": None,
    }  # fmt: skip


def test_distribution():
    from clipless.audit.gradients._tightness_result import EDGES, summarise

    ratios = torch.tensor([0.0, 5e-5, 0.02, 0.5, 1.0, 1.0005], dtype=torch.float64)
    result = summarise(3 * ratios[:, None], bounds={"w": 3.0}, whole=3.0, loss="", slack=1e-3)
    parameter = result["w"]
    assert parameter.counts[0] == 2
    assert parameter.counts[-1] == 2
    assert sum(parameter.counts) == 6
    place = next(i for i in range(len(EDGES) - 1) if EDGES[i] < 0.02 <= EDGES[i + 1])
    assert parameter.counts[place] == 1
    assert parameter.mean == pytest.approx(ratios.mean().item())
    assert parameter.quantiles[0] == 0.0
    assert result.violations == {}
    with pytest.raises(KeyError):
        result["v"]


def test_kinds_of_data_and_the_subset():
    model = MODELS["mlp"][0]()
    x, y = data(count=30)
    whole = tightness(model, (x, y), loss=LOSS)
    assert whole.examples == 30
    pairs = TensorDataset(x, y)
    assert tightness(model, pairs, loss=LOSS) == whole
    assert tightness(model, DataLoader(pairs, batch_size=4), loss=LOSS) == whole
    assert tightness(model, (x, y), loss=LOSS, examples=7).examples == 7
    for bad in ((x,), (x[:0], y[:0])):
        with pytest.raises(ValueError, match="pairs"):
            tightness(model, bad, loss=LOSS)


def test_nothing_is_touched():
    model = nn.Sequential(
        lip.BoundedInput(1.0), lip.SpectralLinear(6, 8), nn.Dropout(0.5), lip.SpectralLinear(8, 3)
    ).eval()
    state = torch.get_rng_state()
    first = tightness(model, data(), loss=LOSS)
    drawn = torch.get_rng_state()
    torch.set_rng_state(state)
    data()
    assert torch.equal(drawn, torch.get_rng_state())
    assert not model.training
    assert all(p.grad is None for p in model.parameters())
    assert first.whole.largest > 0
    assert first.private is False
    assert "not covered by the guarantee" in " ".join(str(first).split())


def test_weights_outside_their_constraint_are_refused():
    model = MODELS["mlp"][0]()
    with torch.no_grad():
        model[1].weight.mul_(2)
    with pytest.raises(ConstraintError):
        tightness(model, data(), loss=LOSS)


def lines(folder):
    return [json.loads(line) for line in (folder / "tightness.jsonl").read_text().splitlines()]


def test_run_folder_has_start_and_end(tmp_path):
    watch = TightnessCallback(DATA, examples=30)
    trainer(tmp_path, callbacks=[watch]).fit(DATA)
    header, *measured = lines(tmp_path)
    assert "not covered" in header["note"]
    assert [line["step"] for line in measured] == [0, 5, 10, 15, 20, 24]
    assert [line["epoch"] for line in measured] == [0, 1, 2, 3, 4, 5]
    assert all(line["private"] is False and line["violations"] == {} for line in measured)
    assert measured[0]["parameters"] != measured[-1]["parameters"]
    assert len(watch.results) == 6


def test_every_n_steps_and_resuming(tmp_path):
    """A run that is killed goes on with the file, and measures the same where it repeats steps."""
    callbacks, options = [TightnessCallback(DATA, examples=30, every=4)], {"checkpoint_every": 5}
    with pytest.raises(RuntimeError, match="stop"):
        trainer(tmp_path, callbacks=[*callbacks, StopAt(13)], **options).fit(DATA)
    before = lines(tmp_path)
    assert [line.get("step") for line in before] == [None, 0, 4, 8, 12]
    trainer(tmp_path, callbacks=callbacks, **options).fit(DATA)
    after = lines(tmp_path)
    assert [line.get("step") for line in after] == [None, 0, 4, 8, 12, 16, 20, 24]
    assert after[:5] == before


def test_arguments():
    with pytest.raises(ValueError, match="every"):
        TightnessCallback(DATA, every=0)
    with pytest.raises(ValueError, match="on_violation"):
        TightnessCallback(DATA, on_violation="ignore")
    with pytest.raises(ValueError, match="examples"):
        tightness(MODELS["mlp"][0](), DATA, loss=LOSS, examples=0)
