"""JSON schema of the files that describe sweeps."""

from __future__ import annotations

from typing import Any

from clipless.runs import config_schema, section_schema
from clipless.sweeps._definition import SweepOptions
from clipless.sweeps.selection._repetitions import Repetitions


def sweep_schema() -> dict[str, Any]:
    """Return the JSON schema of a sweep: that of a run, with the sections of a search.

    Example:
        >>> sweep_schema()["properties"]["sweep"]["properties"]["pruner"]["enum"]
        ['usual', 'hyperband', 'none']
    """
    schema = config_schema()
    when = {"type": "object", "description": "Only where these settings have these values."}
    number = {"type": "number"}
    span = {
        "type": "object",
        "properties": {
            "low": number,
            "high": number,
            "log": {"type": "boolean", "default": True},
            "integer": {"type": "boolean", "default": False},
            "when": when,
        },
        "required": ["low", "high"],
        "additionalProperties": False,
    }
    values = {
        "type": "object",
        "properties": {"values": {"type": "array", "minItems": 1}, "when": when},
        "required": ["values"],
        "additionalProperties": False,
    }
    listed = {"type": "array", "minItems": 1}
    return {
        **{key: value for key, value in schema.items() if key != "required"},
        "title": "A sweep of clipless",
        "properties": {
            **schema["properties"],
            "sweep": section_schema(SweepOptions, "How to search."),
            "space": {
                "type": "object",
                "description": 'Settings that are searched, by dotted names: "training.steps".',
                "additionalProperties": {"anyOf": [span, values, listed]},
            },
            "repetitions": section_schema(Repetitions, "How the number of runs is drawn."),
        },
    }
