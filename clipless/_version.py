"""The version of the package, in one place: `pyproject.toml` and `clipless` read it here."""

__version__ = "1.0.0"
