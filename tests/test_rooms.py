"""What rooms may not import, checked in a process of its own."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("room", ["clipless.accounting", "clipless.folders", "clipless.ledger"])
def test_costs_books_and_folders_need_no_torch(room):
    code = f"import sys, {room}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
