"""Committed results: every figure with the machine, date, versions and command behind it."""

import json
import os
import platform
import shutil
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import torch

COMMITTED = Path(__file__).parent / "results"
RESULTS = COMMITTED
if os.environ.get("CLIPLESS_COMMIT_RESULTS") != "1":
    RESULTS = Path(tempfile.gettempdir()) / "clipless-results"
    if not RESULTS.exists():  # what is drawn from earlier figures needs them
        shutil.copytree(COMMITTED, RESULTS)
"""Where results go: to a scratch folder, unless CLIPLESS_COMMIT_RESULTS=1 asks for `results/`.

A benchmark that is merely tried does not overwrite figures that the documentation quotes.
"""


def machine() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(":")[1].strip() if names else cpu
    found = {"cpu": cpu, "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def about(notes: str) -> dict[str, Any]:
    import clipless

    return {
        "command": " ".join(["python", *sys.argv]),
        "date": date.today().isoformat(),
        "machine": machine(),
        "versions": {
            "clipless": clipless.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "notes": notes,
    }


def save(name: str, results: Any, *, notes: str = "") -> Path:
    """Write `results/<name>.json`: the results and what is behind them."""
    return _write(name, {**about(notes), "results": results})


def save_rows(name: str, rows: list[dict[str, Any]], *, notes: str = "", **facts: Any) -> Path:
    """Write `results/<name>.json`, a plain list, and `<name>.about.json`, what is behind it."""
    _write(f"{name}.about", {**about(notes), **facts})
    return _write(name, rows)


def _write(name: str, content: Any) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(content, indent=2) + "\n")
    if RESULTS != COMMITTED:
        print(f"kept in {RESULTS}; CLIPLESS_COMMIT_RESULTS=1 writes to {COMMITTED}")
    return path


def save_figure(figure: Any, path: Path) -> Path:
    """Write a figure of `clipless.plots` as SVG, the same file for the same figures."""
    import matplotlib as mpl

    with mpl.rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
        figure.savefig(path, transparent=True, metadata={"Date": None})
    return path
