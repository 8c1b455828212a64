"""What the tests of audits share."""

import tempfile
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")


@pytest.fixture
def quick_folders(monkeypatch):
    """Temporary folders in memory, where there is such a place: replays make many of them."""
    if MEMORY.is_dir():
        monkeypatch.setattr(tempfile, "tempdir", str(MEMORY))
