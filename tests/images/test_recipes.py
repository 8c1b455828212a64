"""Recipes: every one is whole, and one runs from data to figure."""

import dataclasses

import pytest

from clipless.folders import RunFolder
from clipless.images import (
    image_config,
    image_recipes,
    open_images,
    resolved_images,
    rule_of,
    run_recipe,
    train_images_run,
)
from clipless.runs import ConfigError, RunConfig, RunData, recipe
from tests.images.small import striped


@pytest.mark.parametrize("name", image_recipes())
def test_recipes_are_whole(name):
    config = image_config(name)
    assert config.privacy.delta == 1e-5
    rule = rule_of(config, examples=50_000)
    assert (rule.lipschitz is not None) == name.endswith("certified")
    assert rule.mirror == name.startswith("cifar10")
    if "epsilon" in name:
        assert name.endswith(f"epsilon{config.privacy.epsilon:g}")


def test_there_are_recipes_for_three_sets():
    assert {image_config(name).data.name for name in image_recipes()} == {
        "mnist", "fashion-mnist", "cifar10",
    }  # fmt: skip


def test_settings_replace_the_rules_and_unknown_ones_are_refused():
    plain = recipe("cifar10-epsilon3")
    changed = RunConfig.from_dict(plain | {"model": plain["model"] | {"steps": 7}})
    assert rule_of(changed, examples=1000).steps == 7
    wrong = RunConfig.from_dict(plain | {"model": plain["model"] | {"stepz": 7}})
    with pytest.raises(ConfigError, match="stepz"):
        rule_of(wrong, examples=1000)


def test_a_recipe_of_another_kind_is_refused():
    with pytest.raises(ConfigError, match="mnist-epsilon3"):
        run_recipe("mnist-epsilon3")


def test_a_recipe_runs_from_data_to_figure(monkeypatch):
    train, test = striped(300, seed=0), striped(100, seed=1)
    data = RunData(train=train, test=test, kind="images", input_shape=(1, 8, 8), classes=2,
                   unit="pixels")  # fmt: skip
    from clipless.images import _recipes

    few = rule_of(image_config("fashion-mnist-epsilon3"), examples=300)
    few = dataclasses.replace(few, steps=10, learning_rate=0.02)
    monkeypatch.setattr(_recipes, "rule_of", lambda config, *, examples: few)
    result, trained = run_recipe("fashion-mnist-epsilon3", data=data, seed=5, device="cpu")
    assert set(result.to_dict()) == {
        "dataset", "recipe", "epsilon", "delta", "seed", "accuracy", "seconds",
    }  # fmt: skip
    assert 2.5 < result.epsilon <= 3.0
    assert result.seed == 5
    assert result.accuracy == trained.accuracy(*test)


def test_a_run_folder_can_be_opened_again(tmp_path):
    train, test = striped(300, seed=0), striped(50, seed=1)
    data = RunData(train=train, test=test, kind="images", input_shape=(1, 8, 8), classes=2,
                   unit="pixels")  # fmt: skip
    settings = {"name": "scattering", "steps": 10, "learning_rate": 0.02}
    config = RunConfig.from_dict({
        "data": {"name": "mnist"}, "model": settings, "privacy": {"epsilon": 3.0},
        "training": {"seed": 1, "device": "cpu"},
    })  # fmt: skip
    full = resolved_images(config, data)
    assert RunConfig.from_dict(full.to_dict()) == full
    run = train_images_run(full, data, RunFolder(tmp_path), resume=False, progress=False)
    model = open_images(RunFolder(tmp_path), full, input_shape=(1, 8, 8), classes=2)
    right = (model(test[0]).argmax(1) == test[1]).double().mean().item()
    assert right == run.metrics["accuracy"]
    assert (tmp_path / "ledger.jsonl").exists()
    with pytest.raises(ConfigError, match="in one go"):
        train_images_run(full, data, RunFolder(tmp_path), resume=True, progress=False)
