"""Without Flower, its parts say what is missing."""

import importlib.util

import pytest

from clipless.integrations import flower_client_app


@pytest.mark.skipif(importlib.util.find_spec("flwr") is not None, reason="Flower is installed")
def test_without_flower_it_is_said_what_to_install():
    with pytest.raises(ImportError, match=r"clipless\[flower\]"):
        flower_client_app(lambda context: None)
