"""Configurations: by name, as plain data, and refused where they are wrong."""

import json
import math
import tomllib
from dataclasses import FrozenInstanceError, dataclass, fields, replace

import pytest

from clipless import models
from tests.models.small import DEFAULT, SMALL, config


@pytest.mark.parametrize("table", [SMALL, DEFAULT], ids=["small", "default"])
@pytest.mark.parametrize("name", models.names())
def test_round_trip_through_json(name, table):
    described = config(name, table, output_bias=0.5, clip_gradient=0.1)
    data = json.loads(json.dumps(models.to_dict(described)))
    assert data["name"] == name
    assert models.from_dict(data) == described
    assert type(models.from_dict(data)) is type(described)


def test_toml_describes_a_model():
    data = tomllib.loads("""
        name = "lenet"
        input_shape = [1, 28, 28]
        classes = 10
        channels = [8, 16]
        input_norm = 7
    """)
    described = models.from_dict(data)
    assert described == models.LeNetConfig(
        input_shape=(1, 28, 28), classes=10, channels=(8, 16), input_norm=7.0
    )
    assert None not in models.to_dict(described).values()  # TOML could not say it


def test_name_and_configuration_build_the_same():
    by_name = models.build("lenet", input_shape=(1, 28, 28), classes=10, hidden=32)
    by_config = models.build(models.LeNetConfig(input_shape=(1, 28, 28), classes=10, hidden=32))
    assert str(by_name) == str(by_config)


def test_configurations_are_frozen_and_comparable():
    described = config("mixer")
    with pytest.raises(FrozenInstanceError):
        described.width = 8
    assert replace(described, width=8) != described
    assert hash(replace(described)) == hash(described)


def test_single_numbers_stand_for_tuples_of_one():
    assert models.MLPConfig(input_shape=20, classes=2, hidden=64) == models.MLPConfig(
        input_shape=(20,), classes=2, hidden=[64]
    )


def test_the_guard_follows_from_the_shape():
    image = models.LeNetConfig(input_shape=(1, 28, 28), classes=10)
    assert image.guard_norm == pytest.approx(math.sqrt(784) / 4)
    assert replace(image, input_mode="sphere").guard_norm == 1.0
    assert replace(image, input_norm=3.0).guard_norm == 3.0
    assert models.HeadConfig(features=16, classes=2).guard_norm == 1.0
    assert models.HeadConfig(features=16, classes=2).input_shape == (16,)


def refused(match, name, **settings):
    with pytest.raises(ValueError, match=match):
        models.build(name, **settings)


def test_unknown_names_and_settings_are_refused_with_the_known_ones():
    refused(r"no model 'alexnet'.*The models are head, lenet, mixer", "alexnet", classes=2)
    refused(r"lenet has no setting depth, widht.*Its settings are input_shape, classes, .*hidden",
            "lenet", input_shape=(1, 8, 8), classes=2, widht=3, depth=2)  # fmt: skip
    refused("head has no setting input_shape", "head", features=8, classes=2, input_shape=(8,))
    refused("lenet needs input_shape, classes", "lenet")
    refused("head needs classes, features", "head")
    with pytest.raises(ValueError, match="name is missing; the models are head"):
        models.from_dict({"classes": 2})
    with pytest.raises(ValueError, match="is complete: hidden"):
        models.build(config("mlp"), hidden=3)


@pytest.mark.parametrize(
    ("match", "settings"),
    [
        ("classes must be an integer of at least 1, got 0", {"classes": 0}),
        ("classes must be an integer of at least 1, got True", {"classes": True}),
        ("classes must be an integer of at least 1, got 2.0", {"classes": 2.0}),
        ("every number in input_shape must be an integer", {"input_shape": (1, 0, 8)}),
        ("every number in input_shape must be an integer", {"input_shape": "28"}),
        (r"input_shape must be \(channels, height, width\), got \(8, 8\): .*\(1, 8, 8\)",
         {"input_shape": (8, 8)}),
        ("input_norm must be finite and greater than 0", {"input_norm": 0.0}),
        ("input_norm must be a number", {"input_norm": "1"}),
        ("input_mode must be one of 'clip', 'sphere', got 'ball'", {"input_mode": "ball"}),
        ("constraint must be one of 'orthogonal', 'ball'", {"constraint": "none"}),
        ("output_bias must be finite", {"output_bias": -1.0}),
        ("clip_gradient must be finite", {"clip_gradient": float("nan")}),
        ("hidden must be even, because GroupSort sorts pairs of channels: got 7, take 8",
         {"hidden": 7}),
        ("every number in channels must be even", {"channels": (4, 5)}),
        ("channels must name", {"channels": ()}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["lenet", "vgg", "resnet"])
def test_wrong_values_are_refused(name, match, settings):
    good = {"input_shape": (1, 8, 8), "classes": 2}
    refused(match, name, **(good | settings))


@pytest.mark.parametrize("name", ["lenet", "vgg", "resnet"])
def test_images_too_small_for_the_stages_are_refused(name):
    more = {"kernel_sizes": (3, 3, 3)} if name == "lenet" else {}
    settings = {"classes": 2, "channels": (2, 2, 2), **more}
    refused(r"images of 7 x 32 are too small to be halved 3 times, once for every entry of "
            r"channels=\(2, 2, 2\): give it at most 2",
            name, input_shape=(1, 7, 32), **settings)  # fmt: skip
    assert models.build(name, input_shape=(1, 8, 32), **settings) is not None


def test_wrong_values_of_single_models_are_refused():
    refused("one entry for each", "lenet", input_shape=(1, 8, 8), classes=2, channels=(4, 4, 4))
    refused("every width in hidden must be even", "mlp", input_shape=4, classes=2, hidden=(4, 3))
    refused("every width in hidden must be even", "head", features=4, classes=2, hidden=3)
    refused('"clip" needs input_norm', "head", features=4, classes=2, input_mode="clip")
    image = {"input_shape": (1, 6, 6), "classes": 2}
    refused("patch=4 does not divide the image of 6 x 6", "mixer", **image)
    refused("width must be even", "mixer", **image, patch=3, width=3)
    refused("tokens must be even", "mixer", **image, patch=3, tokens=5)
    refused("skip must be a bool", "mixer", **image, patch=3, skip=1)


def test_every_setting_has_a_docstring():
    """The fields of a configuration are what users type: each is described in its class or base."""
    for name in models.names():
        kind = type(config(name))
        described = f"{kind.__doc__}{models.ModelConfig.__doc__}"
        for field in fields(kind):
            assert f"        {field.name}: " in described, f"{name}: {field.name}"


def test_own_models_are_registered_once():
    @dataclass(frozen=True, kw_only=True)
    class OwnConfig(models.ModelConfig):
        depth: int = 1

    with pytest.raises(ValueError, match="configuration of no registered model"):
        models.build(OwnConfig(input_shape=4, classes=2))
    with pytest.raises(ValueError, match="there is a model 'mlp' already"):
        models.register("mlp", OwnConfig)
    with pytest.raises(ValueError, match="MLPConfig already belongs"):
        models.register("own", models.MLPConfig)
