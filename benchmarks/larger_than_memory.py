"""A table larger than memory: how much memory a fit takes, and how long, against one in memory.

Generates a Parquet file of 20 float32 columns and a boolean target, and fits the default
classifier on it in a process of its own; then the same on fewer rows, as a data frame in memory.
Memory is what the process holds of its own (RssAnon), looked at twenty times a second: pages of
files that the system keeps for as long as there is room do not count. Time is that of the clock and
that of the processors, which says more on a machine that others use.

    python benchmarks/larger_than_memory.py [--rows 50000000] [--memory-rows 1000000] [--steps N]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from _results import save

COLUMNS = 20
_GROUP = 250_000


def write_table(path: Path, rows: int) -> None:
    """Write a table in which two columns and the product of two others say something."""
    import pyarrow
    from pyarrow import parquet

    random = np.random.default_rng(0)
    writer = None
    for start in range(0, rows, _GROUP):
        count = min(_GROUP, rows - start)
        x = random.standard_normal((count, COLUMNS), dtype=np.float32)
        y = x[:, 0] + x[:, 1] + x[:, 2] * x[:, 3] + random.standard_normal(count) > 0
        columns = {f"x{place}": x[:, place] for place in range(COLUMNS)} | {"y": y}
        group = pyarrow.table(columns)
        writer = writer or parquet.ParquetWriter(path, group.schema)
        writer.write_table(group)
    if writer is not None:
        writer.close()


class Peak(threading.Thread):
    """Looks at the memory of this process that is its own, and keeps the most."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = 0

    def run(self) -> None:
        while True:
            self.look()
            time.sleep(0.05)

    def look(self) -> None:
        status = Path("/proc/self/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
        self.bytes = max(self.bytes, 1024 * int(line.split()[1]))


def fit(kind: str, path: str, rows: int, steps: int | None) -> dict[str, Any]:
    """Fit in this process; return memory, seconds, and the accuracy on the first rows."""
    import pandas

    from clipless.data import LargeTable
    from clipless.sklearn import CliplessClassifier, TabularRule

    peak = Peak()
    peak.look()
    before = peak.bytes
    peak.start()
    rule = TabularRule.choose(rows=rows, columns=COLUMNS, epsilon=1.0)
    rule = rule if steps is None else replace(rule, steps=steps)
    model = CliplessClassifier(epsilon=1.0, rule=rule, random_state=0)
    first, begun = time.process_time(), time.monotonic()
    if kind == "memory":
        frame = pandas.read_parquet(path)
        model.fit(frame.drop(columns="y"), frame["y"])
    else:
        model.fit(LargeTable(path, scratch=Path(path).parent), "y")
    seconds, processor = time.monotonic() - begun, time.process_time() - first
    peak.look()
    test = next(LargeTable(path).pieces())
    frame = pandas.DataFrame(test)
    return {
        "rows": rows,
        "steps": rule.steps,
        "batch_size": rule.batch_size,
        "epsilon": round(model.privacy_.epsilon, 4),
        "accuracy_on_first_rows": round(float(model.score(frame.drop(columns="y"), frame["y"])), 4),
        "seconds": round(seconds, 1),
        "processor_seconds": round(processor, 1),
        "microseconds_per_row": round(1e6 * seconds / rows, 2),
        "processor_microseconds_per_row": round(1e6 * processor / rows, 2),
        "gib_before": round(before / 2**30, 3),
        "gib_at_most": round(peak.bytes / 2**30, 3),
        "parquet_gib": round(Path(path).stat().st_size / 2**30, 2),
    }


def in_own_process(kind: str, path: Path, rows: int, steps: int | None) -> dict[str, Any]:
    arguments = ["--fit", kind, str(path), str(rows), "default" if steps is None else str(steps)]
    run = subprocess.run(
        [sys.executable, __file__, *arguments], check=True, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    print(kind, found, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=50_000_000)
    parser.add_argument("--memory-rows", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, help="instead of the rule's own number")
    parser.add_argument("--folder", type=Path, help="for files; by default a temporary one")
    parser.add_argument("--fit", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fit is not None:
        kind, path, rows, steps = options.fit
        print(json.dumps(fit(kind, path, int(rows), None if steps == "default" else int(steps))))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = {}
        for kind, rows in (("memory", options.memory_rows), ("disk", options.rows)):
            path = Path(folder) / f"{kind}.parquet"
            write_table(path, rows)
            found[kind] = in_own_process(kind, path, rows, options.steps)
            path.unlink()
    per_row = "processor_microseconds_per_row"
    found["ratio_of_processor_time_per_row"] = round(
        found["disk"][per_row] / found["memory"][per_row], 3
    )
    found["ratio_of_time_per_row"] = round(
        found["disk"]["microseconds_per_row"] / found["memory"]["microseconds_per_row"], 3
    )
    found["load"] = os.getloadavg()
    name = "larger-than-memory" + ("" if options.steps is None else f"-{options.steps}-steps")
    notes = (
        "epsilon 1, default classifier; fixed costs of a fit count in both, and more in the "
        "smaller table"
    )
    print("wrote", save(name, found, notes=notes).name)


if __name__ == "__main__":
    main()
