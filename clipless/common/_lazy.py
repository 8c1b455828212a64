"""Public names that are imported when they are first used (PEP 562).

Torch alone takes seconds to import. Packages that the command line reads for `--help` and for the
checks of its arguments therefore name where their contents live, and load them on demand.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, names: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package.

    Args:
        package: its `__name__`.
        names: from every public name to the module that it is imported from; a name that maps to
            itself, below the package, is a module.

    Example:
        >>> find, _ = lazy_names("clipless", {"errors": "clipless.errors"})
        >>> find("errors").__name__
        'clipless.errors'
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        source = names[name]
        module = importlib.import_module(source)
        value = module if source == f"{package}.{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)  # the next use finds it at once
        return value

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names})

    return find, listed
