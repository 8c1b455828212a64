"""Public names that are imported when they are first used (PEP 562).

Torch alone takes seconds to import, and scikit-learn most of one. Packages that the command line
reads for `--help` and for the checks of its arguments import their contents under `TYPE_CHECKING`
only, where type checkers and readers find them; what stands there is loaded on demand.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package, by its imports under `TYPE_CHECKING`.

    Example:
        >>> find, _ = lazy_names("clipless")
        >>> find("errors").__name__
        'clipless.errors'
    """
    homes = _homes(ast.parse(inspect.getsource(sys.modules[package])))

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        if home == package:  # a module of the package itself
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(home), name)
        setattr(sys.modules[package], name, value)  # the next use finds it at once
        return value

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return find, listed


def _homes(source: ast.Module) -> dict[str, str]:
    """Return the modules that names are imported from under `if TYPE_CHECKING`."""
    return {
        alias.name: statement.module
        for block in source.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for statement in block.body
        if isinstance(statement, ast.ImportFrom) and statement.module
        for alias in statement.names
    }
