"""No check of the package disappears under `python -O`."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "clipless"


def asserts(file):
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]


@pytest.mark.parametrize("folder", sorted(p.name for p in PACKAGE.iterdir() if p.is_dir()))
def test_checks_raise(folder):
    found = {
        f"{folder}/{file.name}": lines
        for file in (PACKAGE / folder).rglob("*.py")
        if (lines := asserts(file))
    }
    assert found == {}


def test_files_beside_the_folders():
    assert {f.name: lines for f in PACKAGE.glob("*.py") if (lines := asserts(f))} == {}
