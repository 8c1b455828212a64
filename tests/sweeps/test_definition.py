"""Spaces, presets and definitions: what they mean, and what is refused."""

from dataclasses import replace

import optuna
import pytest
import torch

from clipless.runs import ConfigError, RunConfig, RunData, resolved_config
from clipless.sweeps import Choices, Range, Space, Sweep, preset, presets
from clipless.sweeps._planned import declared_runs, example_config
from clipless.sweeps._space import flat, nested
from clipless.sweeps._storage import make_pruner, make_sampler

RATE = {"training.learning_rate": {"low": 1e-3, "high": 1.0}}
RUN = {"data": {"name": "digits"}, "privacy": {"epsilon": 2.0}}


def suggestions(space, *, decided=None, count=60):
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    return [space.suggest(study.ask(), decided=decided or {}) for _ in range(count)]


def images(side, channels):
    x, y = torch.zeros(12_000, channels, side, side), torch.zeros(12_000, dtype=torch.int64)
    return RunData(
        train=(x, y), test=(x[:8], y[:8]), kind="images", input_shape=(channels, side, side),
        classes=10, unit="pixels",
    )  # fmt: skip


def vectors():
    x, y = torch.zeros(12_000, 9), torch.zeros(12_000, dtype=torch.int64)
    return RunData(
        train=(x, y), test=(x[:8], y[:8]), kind="vectors", input_shape=(9,), classes=2, unit=""
    )


def test_values_lie_in_their_ranges_and_conditions_hold():
    space = Space.from_dict({
        "loss.name": ["cross_entropy", "hinge_kr"],
        "loss.tau": {"low": 0.1, "high": 18.0, "when": {"loss.name": "cross_entropy"}},
        "loss.alpha": {"low": 0.01, "high": 2e3, "when": {"loss.name": "hinge_kr"}},
        "training.batch_size": {"low": 512, "high": 10_000, "integer": True},
        "model.channels": [[16, 32], [32, 64]],
    })  # fmt: skip
    found = suggestions(space)
    assert {each["loss.name"] for each in found} == {"cross_entropy", "hinge_kr"}
    assert {tuple(each["model.channels"]) for each in found} == {(16, 32), (32, 64)}
    for each in found:
        assert ("loss.tau" in each) == (each["loss.name"] == "cross_entropy")
        assert ("loss.alpha" in each) == (each["loss.name"] == "hinge_kr")
        assert isinstance(each["training.batch_size"], int)
        assert 512 <= each["training.batch_size"] <= 10_000
    # A logarithmic scale has half of its values below the geometric mean.
    small = sum(each["training.batch_size"] < 2263 for each in found)
    assert 15 <= small <= 45


def test_a_condition_may_rest_on_what_is_decided():
    space = Space.from_dict({"loss.tau": {"low": 1, "high": 2, "when": {"loss.name": "x"}}})
    assert all(suggestions(space, decided={"loss.name": "x"}, count=3))
    assert not any(suggestions(space, decided={"loss.name": "y"}, count=3))


def test_flat_and_nested_undo_each_other():
    assert nested(flat(RUN)) == RUN


@pytest.mark.parametrize("name", presets())
def test_presets_are_valid_in_every_corner(name):
    sweep = Sweep.from_dict({
        "sweep": {"preset": name}, "privacy": {"epsilon": 3.0},
        **({"data": {"name": "shuttle"}} if name == "tabular" else {}),
    })  # fmt: skip
    data = {
        "tabular": vectors, "mnist": lambda: images(28, 1), "fashion-mnist": lambda: images(28, 1),
        "cifar10": lambda: images(32, 3),
    }[name]()  # fmt: skip
    choices = {
        key: each.values
        for key, each in sweep.space.parameters.items()
        if isinstance(each, Choices)
    }
    corners = [{}] + [{key: value} for key, values in choices.items() for value in values]
    for corner in corners:
        config = example_config(sweep, corner)
        assert isinstance(resolved_config(config, data), RunConfig)
    assert make_sampler(sweep).__class__.__name__ == "TPESampler"
    assert make_pruner(sweep).__class__.__name__ == "HyperbandPruner"


@pytest.mark.parametrize(
    ("name", "key", "low", "high"),
    [
        ("tabular", "training.batch_size", 512, 10_000),
        ("tabular", "loss.tau", 1e-2, 100.0),
        ("tabular", "training.learning_rate", 1e-5, 1.0),
        ("mnist", "model.input_norm", 0.1, 1.0),
        ("mnist", "training.batch_size", 512, 10_000),
        ("mnist", "loss.alpha", 1e-2, 2e3),
        ("mnist", "loss.tau", 1e-2, 18.0),
        ("fashion-mnist", "training.batch_size", 5_000, 10_000),
        ("fashion-mnist", "loss.tau", 1e-2, 40.0),
        ("fashion-mnist", "loss.floor", 1e-2, 1.0),
        ("cifar10", "model.input_norm", 1e-2, 1.0),
        ("cifar10", "loss.tau", 1e-3, 32.0),
        ("cifar10", "loss.floor", 1e-2, 1.0),
    ],
)
def test_presets_have_the_ranges_of_the_paper(name, key, low, high):
    space = Space.from_dict(preset(name)["space"])
    parameter = space.parameters[key]
    assert (parameter.low, parameter.high, parameter.log) == (low, high, True)


@pytest.mark.parametrize("name", presets())
def test_presets_clip_loss_gradients_as_the_paper_does(name):
    given = {"sweep": {"preset": name}, "data": {"name": "digits"}, "privacy": {"epsilon": 3.0}}
    assert example_config(Sweep.from_dict(given), {}).training.clip_quantile == 0.9
    given["training"] = {"clip_quantile": "none"}
    assert example_config(Sweep.from_dict(given), {}).training.clip_quantile is None


def test_what_is_fixed_leaves_a_preset():
    sweep = Sweep.from_dict({
        "sweep": {"preset": "mnist", "sampler": "gp"}, "privacy": {"epsilon": 3.0},
        "training": {"batch_size": 4096}, "space": {"loss.tau": {"low": 1.0, "high": 2.0}},
    })  # fmt: skip
    assert "training.batch_size" not in sweep.space.parameters
    assert sweep.space.parameters["loss.tau"] == Range(low=1.0, high=2.0)
    assert sweep.base["data"] == {"name": "mnist"}
    assert make_sampler(sweep).__class__.__name__ == "GPSampler"


@pytest.mark.parametrize("pruner", ["hyperband", "none"])
def test_a_pruner_is_the_one_that_was_named(pruner):
    sweep = Sweep.from_dict({"space": RATE, "sweep": {"pruner": pruner}})
    assert sweep.pruner == pruner
    assert Sweep.from_dict(sweep.to_dict()).pruner == pruner


def test_a_file_is_read(tmp_path):
    path = tmp_path / "sweep.toml"
    path.write_text(
        '[sweep]\ntrials = 7\nradius = 0.1\n[space]\n"loss.name" = ["cross_entropy", "hinge_kr"]\n'
        '"loss.alpha" = {low = 0.1, high = 10, when = {"loss.name" = "hinge_kr"}}\n'
        '[data]\nname = "digits"\n[privacy]\nepsilon = 2.0\n'
    )
    sweep = Sweep.from_file(path)
    assert (sweep.trials, sweep.radius, len(sweep.space.parameters)) == (7, 0.1, 2)
    assert Sweep.from_dict(sweep.to_dict()) == sweep


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"space": {}}, "empty"),
        ({}, "needs a space"),
        ({"space": {"learning_rate": [1]}}, "section.key"),
        ({"space": {"optimizer.rate": [1]}}, "section.key"),
        ({"space": {"training.steps": {"low": 3}}}, "low and high"),
        ({"space": {"training.steps": {"low": 3, "high": 2}}}, "below high"),
        ({"space": {"training.steps": {"low": 0, "high": 2}}}, "log scale"),
        ({"space": {"training.steps": {"low": 0.5, "high": 2, "integer": True}}}, "integers"),
        ({"space": {"training.steps": {"low": "a", "high": 2}}}, "finite"),
        ({"space": {"training.steps": {"low": 1, "high": 2, "lag": True}}}, "lag"),
        ({"space": {"training.steps": 3}}, "list of values"),
        ({"space": {"training.steps": []}}, "at least one"),
        ({"space": {"training.steps": [1, 1]}}, "repeated"),
        (
            {"space": {"loss.tau": {"low": 1, "high": 2, "when": {"loss.name": "x"}},
                       "loss.name": ["x"]}},
            "come before",
        ),
        ({"space": RATE, "training": {"learning_rate": 0.1}}, "both fixed and searched"),
        ({"space": RATE, "sweep": {"trials": 0}}, "at least 1"),
        ({"space": RATE, "sweep": {"scale": 2.0}}, "scale"),
        ({"space": RATE, "sweep": {"radius": -1.0}}, "radius"),
        ({"space": RATE, "sweep": {"sampler": "grid"}}, "one of usual, tpe, gp, random"),
        ({"space": RATE, "sweep": {"preset": "imagenet"}}, "there is no preset"),
        ({"space": RATE, "sweeps": {}}, "sweeps"),
        ({"space": RATE, "repetitions": {"mean": 0.5}}, "above 1"),
        ({"space": RATE, "repetitions": {"distribution": "poisson", "mean": 1e4}}, "at most 500"),
        ({"space": RATE, "repetitions": {"shape": 2.0}}, "negative_binomial"),
        ({"space": RATE, "repetitions": {"distribution": "negative_binomial"}}, "shape"),
        ({"space": RATE, "repetitions": {}, "sweep": {"sampler": "tpe"}}, "sampler='random'"),
        ({"space": RATE, "repetitions": {}, "sweep": {"pruner": "hyperband"}}, "pruner='none'"),
        ({"space": RATE, "repetitions": {}, "sweep": {"seed": 1}}, "seeds"),
        ({"space": RATE, "repetitions": {}, "training": {"seed": 1}}, "seeds"),
        ({"space": {"training.seed": [1, 2]}, "repetitions": {}}, "seed"),
        ({"space": RATE, "repetitions": {}, "sweep": {"scale": 0.5}}, "scale"),
        ({"space": RATE, "repetitions": {}, "sweep": {"public_data": True}}, "public"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        Sweep.from_dict(given)


def test_what_a_run_may_release_must_be_a_finite_list():
    run = {**RUN, "privacy": {"noise_multiplier": 1.0}, "model": {"name": "mlp"}}
    given = {**run, "space": RATE, "repetitions": {"mean": 3.0}}
    (one,) = declared_runs(Sweep.from_dict({**given, "training": {"steps": 5}}))
    assert one[1] == 5
    batches = {**RATE, "training.batch_size": [100, 200]}
    several = declared_runs(Sweep.from_dict({**given, "space": batches}))
    assert [run.sampling.expected_batch_size for run, _ in several] == [100.0, 200.0]
    a_range = {**RATE, "training.batch_size": {"low": 100, "high": 200, "integer": True}}
    with pytest.raises(ConfigError, match="list of values instead of a range"):
        declared_runs(Sweep.from_dict({**given, "space": a_range}))
    many = {**RATE, "training.batch_size": list(range(100, 165))}
    with pytest.raises(ConfigError, match="65 combinations"):
        declared_runs(Sweep.from_dict({**given, "space": many}))
    for name in ("tabular", "scattering"):
        space = Space.from_dict({"model.name": ["mlp", name]})
        by_rule = replace(Sweep.from_dict(given), space=space, base=RUN)
        with pytest.raises(ConfigError, match=f"must not be {name}"):
            declared_runs(by_rule)
        fixed = {**given, "model": {"name": name}, "privacy": {"epsilon": 1.0}}
        with pytest.raises(ConfigError, match=f"of the kind {name} choose their releases"):
            declared_runs(Sweep.from_dict(fixed))
    padded = Sweep.from_dict({**given, "training": {"steps": 5, "pad": True}})
    ((cut, _),) = declared_runs(padded)
    assert cut.sampling.max_batch_size is not None
    replaced = {**given, "privacy": {"epsilon": 1.0, "relation": "replace_one"}}
    with pytest.raises(ConfigError, match="no known price"):
        declared_runs(Sweep.from_dict(replaced))
