"""Configurations: typed, refused by name, the same from every format, layered."""

import json

import pytest

from clipless.accounting import chosen_delta
from clipless.data import datasets
from clipless.runs import (
    ConfigError,
    RunConfig,
    as_type,
    merge_config_layers,
    parse_value,
    recipe,
    recipes,
)
from clipless.runs.config._files import parse_config

SMALL = {"data": {"name": "digits"}, "privacy": {"epsilon": 3}}


def test_numbers_are_what_they_should_be():
    config = RunConfig.from_dict(SMALL)
    assert config.privacy.epsilon == 3.0
    assert isinstance(config.privacy.epsilon, float)
    assert config.training.steps is None


def test_plain_data_and_back():
    config = RunConfig.from_dict(
        {
            **SMALL,
            "model": {"name": "mlp", "hidden": [8, 4]},
            "loss": {"name": "hinge_kr", "alpha": 2.0},
            "training": {"augment": ["flip"], "average": "none", "epochs": 2},
        }
    )
    data = json.loads(json.dumps(config.to_dict()))
    assert RunConfig.from_dict(data) == config
    assert data["training"]["average"] is None
    assert data["model"] == {"name": "mlp", "hidden": [8, 4]}


def test_it_is_frozen():
    config = RunConfig.from_dict(SMALL)
    with pytest.raises(AttributeError):
        config.privacy = None
    with pytest.raises(AttributeError):
        config.privacy.epsilon = 8.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainig": {}}, "Did you mean 'training'"),
        ({"training": {"bach_size": 3}}, "Did you mean 'batch_size'"),
        ({"training": 3}, r"\[training\] must be a table"),
        ({"model": "mlp"}, r"\[model\] must be a table"),
        ({"model": {"name": 3}}, "model.name must be text"),
        ({"training": {"batch_size": "many"}}, "training.batch_size must be a whole number"),
        ({"training": {"batch_size": True}}, "training.batch_size must be a whole number"),
        ({"training": {"batch_size": 0}}, "training.batch_size must be above 0"),
        ({"training": {"steps": 3, "epochs": 2}}, "not both"),
        ({"training": {"optimizer": "lion"}}, "one of layer_adam, adam, sgd"),
        ({"training": {"momentum": 0.9}}, "momentum is for sgd"),
        ({"training": {"momentum": 1.0, "optimizer": "sgd"}}, "below 1"),
        ({"training": {"average": 2}}, r"average must lie in \[0, 1\]"),
        ({"training": {"precision": "float16"}}, "one of float32, tf32, bfloat16"),
        ({"training": {"compile": "yes"}}, "training.compile must be true or false"),
        ({"training": {"clip_quantile": 1.0}}, "clip_quantile must lie between 0 and 1"),
        ({"training": {"clip_quantile": 0.9, "compile": True}}, "needs a fixed threshold"),
        ({"training": {"learning_rate": float("nan")}}, "must be finite"),
        ({"training": {"pad": 1}}, "true or false"),
        ({"privacy": {"epsilon": 0}}, "privacy.epsilon must be above 0"),
        ({"privacy": {}}, "give privacy.epsilon"),
        ({"privacy": {"epsilon": 1, "delta": 1}}, "privacy.delta must lie between"),
        ({"privacy": {"epsilon": 1, "sampling": "shuffle"}}, "privacy.sampling must be one of"),
        ({"data": {}}, "one of the two"),
        ({"data": {"name": "mnist", "file": "x.npz"}}, "one of the two"),
        ({"data": {"name": "mnist", "target": "x"}}, "for tables"),
        ({"data": {"name": "mnist", "task": "regression"}}, "for tables"),
        ({"data": {"name": "mnist", "test_fraction": 1.0}}, "test_fraction"),
        ({"data": {"name": "mnist", "limit": 1}}, "data.limit"),
    ],
)
def test_refusals_name_the_key(changes, message):
    with pytest.raises(ConfigError, match=message):
        RunConfig.from_dict({**SMALL, **changes})


def test_formats_say_the_same(tmp_path):
    texts = {
        "run.toml": '[data]\nname = "digits"\n[privacy]\nepsilon = 3\n[training]\naverage = "none"',
        "run.yaml": "data: {name: digits}\nprivacy: {epsilon: 3}\ntraining: {average: null}",
        "run.json": '{"data": {"name": "digits"}, "privacy": {"epsilon": 3}, '
        '"training": {"average": null}}',
    }
    found = []
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        found.append(RunConfig.from_file(tmp_path / name))
    assert found[0] == found[1] == found[2]
    assert found[0].training.average is None


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "[data", "a.toml is not valid"),
        ("a.yaml", "a: [1", "a.yaml is not valid"),
        ("a.yaml", "- 1", "sections"),
        ("a.json", "{", "a.json is not valid"),
        ("a.ini", "x", "ends in .toml"),
    ],
)
def test_bad_files(name, text, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(text, name=name)


def test_yaml_makes_no_objects():
    with pytest.raises(ConfigError, match="not valid"):
        parse_config("data: !!python/object/apply:os.getcwd []", name="a.yaml")


def test_layers():
    base = {
        "data": {"name": "mnist", "limit": 100},
        "model": {"name": "lenet", "channels": [2, 4]},
        "training": {"epochs": 3, "pad": True},
    }
    assert merge_config_layers(base, {"data": {"file": "a.npz"}})["data"] == {
        "limit": 100,
        "file": "a.npz",
    }
    assert merge_config_layers(base, {"model": {"name": "mlp"}})["model"] == {"name": "mlp"}
    assert merge_config_layers(base, {"model": {"hidden": 4}})["model"]["channels"] == [2, 4]
    assert merge_config_layers(base, {"model": {"name": "lenet", "hidden": 4}})["model"][
        "channels"
    ] == [2, 4]
    assert merge_config_layers(base, {"training": {"steps": 5}})["training"] == {
        "pad": True,
        "steps": 5,
    }
    assert base["training"] == {"epochs": 3, "pad": True}


def test_values_on_the_command_line():
    given = ("3", "0.5", "1e-5", "true", "none", "sphere", "16,32", "flip,crop:2", '"3"', "[1]")
    expected = [3, 0.5, 1e-5, True, "none", "sphere", [16, 32], ["flip", "crop:2"], "3", [1]]
    assert [parse_value(text) for text in given] == expected
    assert as_type("none", float | None, where="x") is None


def test_recipes():
    """Every recipe that is shipped is a configuration, and one of them is the benchmark's."""
    assert "mnist-epsilon3" in recipes()
    for name in recipes():
        assert RunConfig.from_dict(recipe(name)).model.name is not None
    with pytest.raises(ConfigError, match="mnist-epsilon3"):
        recipe("nothing")


@pytest.mark.parametrize("name", recipes())
def test_the_delta_of_a_recipe_is_accepted_for_its_data(name):
    """1e-5 is above 0.1/N for all of them, which has to be said: else no recipe would train."""
    config = RunConfig.from_dict(recipe(name))
    size = datasets()[config.data.name].train_size
    with pytest.warns(UserWarning, match=r"above 0\.1/N"):
        assert chosen_delta(config.privacy.delta, size) == 1e-5
    again = RunConfig.from_dict(config.to_dict())
    with pytest.warns(UserWarning, match=r"above 0\.1/N"):
        chosen_delta(again.privacy.delta, size)


def test_the_mnist_recipe_builds_the_network_of_the_benchmark():
    import importlib.util
    import sys
    from pathlib import Path

    import torch

    from clipless.runs import build_loss
    from clipless.runs._build import build_model

    folder = Path(__file__).parents[3] / "benchmarks"
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location("mnist_benchmark", folder / "mnist.py")
        benchmark = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(benchmark)
    finally:
        sys.path.remove(str(folder))
    given = merge_config_layers(
        recipe("mnist-epsilon3"), {"model": {"input_shape": [1, 28, 28], "classes": 10}}
    )
    config = RunConfig.from_dict(given)
    torch.manual_seed(0)
    ours = build_model(config)
    torch.manual_seed(0)
    theirs = benchmark.lenet()
    assert [type(layer) for layer in ours] == [type(layer) for layer in theirs]
    x = torch.rand(2, 1, 28, 28)
    assert torch.equal(ours(x), theirs(x))
    expected = benchmark.RECIPE
    training = config.training
    assert build_loss(config.loss).tau == expected["temperature"]
    assert training.batch_size == expected["batch_size"]
    assert training.steps == expected["steps"]
    assert training.learning_rate == expected["learning_rate"]
    assert training.product_clip == expected["product_clip_fraction"]
    assert training.average == expected["average_decay"]
    assert training.pad
    assert (config.privacy.epsilon, config.privacy.delta) == (benchmark.EPSILON, benchmark.DELTA)
