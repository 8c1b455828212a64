"""Commands as a user runs them: in a process of their own, or in this one to save time."""

import contextlib
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self):
        """What is on the standard output, which must be one JSON object and nothing else."""
        return json.loads(self.out)


def environment(**changes):
    inherited = {key: value for key, value in os.environ.items() if key != "CLIPLESS_DATA"}
    return {**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **changes}


def shell(*arguments, cwd, **changes):
    """Run a command as a subprocess."""
    done = subprocess.run(
        [sys.executable, "-m", "clipless", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment(**changes),
        timeout=120,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def here(*arguments):
    """Run a command in this process, which saves the seconds that torch takes to import."""
    from clipless.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = int(stop.code or 0)
    return Outcome(code, out.getvalue(), err.getvalue())


def refused(outcome, code, *words):
    """A refusal: its exit code, one paragraph on the standard error, no traceback."""
    assert outcome.code == code, outcome.err
    assert outcome.err.startswith("Error: "), outcome.err
    assert "Traceback" not in outcome.err
    for word in words:
        assert word in outcome.err, outcome.err
    return True
