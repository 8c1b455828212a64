"""The examples in docstrings run."""

import doctest
import importlib
import pkgutil

import pytest
import torch

import clipless

MODULES = sorted(
    m.name for m in pkgutil.walk_packages(clipless.__path__, "clipless.") if "losses" not in m.name
)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    from clipless.bounds import _rule

    module = importlib.import_module(name)
    rules = dict(_rule._RULES)
    outcome = doctest.testmod(module, extraglobs={"clipless": clipless, "torch": torch})
    _rule._RULES.clear()
    _rule._RULES.update(rules)
    assert outcome.failed == 0
