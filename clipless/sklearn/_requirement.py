"""The package that this room stands on, or a hint where to get it."""

from importlib.util import find_spec

if find_spec("sklearn") is None:
    raise ImportError("clipless.sklearn needs scikit-learn: pip install 'clipless[sklearn]'")
