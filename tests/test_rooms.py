"""What rooms may not import, checked in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

import clipless


@pytest.mark.parametrize("room", ["clipless.accounting", "clipless.folders", "clipless.ledger"])
def test_costs_books_and_folders_need_no_torch(room):
    code = f"import sys, {room}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


MOST_MODULES = 15


def test_every_room_can_be_taken_in_at_a_glance():
    package = Path(clipless.__file__).parent
    sizes = {
        str(room.relative_to(package)): len([m for m in room.glob("*.py") if m.stem[0:2] != "__"])
        for room in [package, *package.rglob("*/")]
        if room.is_dir()
    }
    assert len(sizes) > 50
    large = {room: size for room, size in sizes.items() if size > MOST_MODULES}
    assert not large, "divide these rooms into smaller ones, each with a subject"
