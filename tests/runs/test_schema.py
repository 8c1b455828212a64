"""JSON schemas say of configuration files what the code that reads them says."""

import copy
import itertools
import json

import pytest

from clipless.runs import (
    ConfigError,
    RunConfig,
    config_schema,
    merge_config_layers,
    read_config_file,
    recipe,
    recipes,
)
from clipless.sweeps import Sweep, sweep_schema
from tests.cli.shell import here

PYTHON = {
    "string": str, "boolean": bool, "integer": int, "number": (int, float), "object": dict,
    "array": list,
}  # fmt: skip


def accepts(schema, value):
    """A validator of the part of JSON schema that is used; an unknown keyword is an error."""
    known = {"$schema", "title", "description", "default", "type", "enum", "anyOf", "properties",
             "additionalProperties", "required", "items", "minItems"}  # fmt: skip
    assert set(schema) <= known, set(schema) - known
    if "type" in schema:
        kind = PYTHON[schema["type"]]
        if not isinstance(value, kind) or (
            isinstance(value, bool) and schema["type"] in ("integer", "number")
        ):
            return False
    if "enum" in schema and not any(value is v or value == v for v in schema["enum"]):
        return False
    if "anyOf" in schema and not any(accepts(each, value) for each in schema["anyOf"]):
        return False
    if isinstance(value, dict):
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        if not set(schema.get("required", ())) <= set(value):
            return False
        for name, each in value.items():
            inner = properties.get(name, others)
            if inner is False or (inner is not True and not accepts(inner, each)):
                return False
    if isinstance(value, list):
        if len(value) < schema.get("minItems", 0):
            return False
        return all(accepts(schema.get("items", {}), each) for each in value)
    return True


GOOD = {
    "data": {"name": "digits"},
    "model": {"name": "mlp", "hidden": 32},
    "loss": {"name": "cross_entropy", "tau": 10.0},
    "privacy": {"epsilon": 3.0},
    "training": {"steps": 20, "batch_size": 200, "augment": ["flip"], "average": "none"},
}
SCHEMA = config_schema()


@pytest.mark.parametrize("name", recipes())
def test_recipes_are_accepted(name):
    assert accepts(SCHEMA, recipe(name))


def test_what_a_run_writes_down_is_accepted():
    assert accepts(SCHEMA, RunConfig.from_dict(GOOD).to_dict())


VALUES = ["text", 3, 2.5, True, None, "none", [], ["flip"], {"a": 1}]
KEYS = [
    (section, key)
    for section in ("data", "privacy", "training")
    for key in SCHEMA["properties"][section]["properties"]
]


def read_or_refused_for_its_meaning(config):
    """Whether the types of a configuration are right; what it means may still be refused."""
    try:
        RunConfig.from_dict(config)
    except ConfigError as error:
        words = (
            "must be a whole", "must be a number", "must be one of", "must be text",
            "must be true", "has no setting",
        )  # fmt: skip
        return not any(word in str(error) for word in words)
    return True


def test_schema_and_reader_agree_on_types():
    """Every key with values of all types: what one refuses for its type, the other does."""
    differ = []
    for (section, key), value in itertools.product(KEYS, VALUES):
        config = copy.deepcopy(GOOD)
        config[section][key] = value
        if accepts(SCHEMA, config) != read_or_refused_for_its_meaning(config):
            differ.append((section, key, value))
    assert differ == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"privacy": {"epsilon": "three"}},
        {"privacy": {"epsilom": 3.0}},
        {"privacy": {"accountant": "gdp"}},
        {"trainning": {}},
        {"training": {"optimizer": "adamw"}},
    ],
)
def test_mistakes_are_refused_by_both(wrong):
    config = merge_config_layers(GOOD, wrong)
    assert not accepts(SCHEMA, config)
    with pytest.raises(ConfigError):
        RunConfig.from_dict(config)


def test_settings_have_their_meaning_and_default():
    training = SCHEMA["properties"]["training"]["properties"]
    assert training["learning_rate"]["default"] == 0.01
    assert "initial weights" in training["seed"]["description"]
    model = SCHEMA["properties"]["model"]["properties"]
    assert "mixer" in model["patch"]["description"]


def test_sweeps():
    schema = sweep_schema()
    file = {
        "sweep": {"trials": 4, "sampler": "random"},
        "space": {
            "training.learning_rate": {"low": 1e-3, "high": 0.1},
            "training.batch_size": [512, 1024],
            "loss.tau": {"values": [1, 2], "when": {"loss.name": "cross_entropy"}},
        },
        "repetitions": {"distribution": "geometric", "mean": 5.0},
        "privacy": {"epsilon": 3.0},
        "data": {"name": "digits"},
    }
    assert accepts(schema, file)
    Sweep.from_dict(file)
    for wrong in ({"sweep": {"trails": 4}}, {"space": {"training.steps": []}}):
        assert not accepts(schema, {**file, **wrong})
        with pytest.raises(ConfigError):
            Sweep.from_dict({**file, **wrong})


def test_a_file_may_name_its_schema(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"$schema": "run.schema.json", **GOOD}))
    assert RunConfig.from_dict(read_config_file(path)) == RunConfig.from_dict(GOOD)


def test_the_command_writes_it(tmp_path):
    assert here("schema").json == SCHEMA
    assert here("schema", "sweep", "--out", tmp_path / "s.json").code == 0
    assert json.loads((tmp_path / "s.json").read_text()) == sweep_schema()
    assert here("schema", "moon").code == 2
