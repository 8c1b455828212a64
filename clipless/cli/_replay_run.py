"""Replaying a short training of a run on neighbours of its data."""

from __future__ import annotations

import csv
import io
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipless.audit import ReplayResult, record, with_empty_record
from clipless.folders import RunFolder
from clipless.runs import RunConfig, RunProcesses, TrainedRun, train_on, train_run

if TYPE_CHECKING:
    from clipless.runs import Run, RunData

_EXAMPLES = 256
"""So many examples of a data set that is no table take part: what is tested is the code."""
_ODD = "?"
"""A text that no column holds: in one of numbers, it would change what the column seems to be."""

Replays = list[tuple[str, ReplayResult]]


def replay_run(run: Run, data: RunData, *, records: int, steps: int) -> Replays:
    """Train shortly by the configuration of a run, and replay that on neighbours.

    The first and the last record are tried, and others at random. A table in a text file is read,
    split and trained on as `clipless train` does; of other data, a few hundred examples are.
    """
    path = Path(run.config.data.file or "")
    if run.config.data.is_table and path.suffix.lower() in (".csv", ".tsv"):
        return _replay_table(run.config, path, data.train[0].index, records, steps)
    size = min(data.size, _EXAMPLES)
    pair = tuple(part[:size] for part in data.train)
    config = _short(run.config, size=size, steps=steps)

    def train(examples: Any, folder: Path) -> dict[str, Any]:
        part = replace(data, train=examples)
        return _public(train_on(config, part, RunFolder(folder), False, False, (), RunProcesses()))

    recording = record(train, pair, with_folder=True)
    results = []
    for place in _places(range(size), records):
        results.append(
            (f"record {place} emptied", recording.replay(with_empty_record(pair, place)))
        )
        for name, other in _replaced(pair, place):
            results.append((f"record {place} {name}", recording.replay(other)))
    return results


def _replaced(pair: Any, place: int) -> Iterator[tuple[str, Any]]:
    """The data with one record replaced by something awkward."""
    inputs, targets = pair
    if not hasattr(inputs, "is_floating_point"):
        return
    for name, value in (("far away", 1e30), ("not a number", math.nan)):
        other = inputs.clone()
        other[place] = value
        yield name, (other, targets)


def _replay_table(
    config: RunConfig, path: Path, trained: Sequence[int], records: int, steps: int
) -> Replays:
    """Replay what is done with a file; of its rows, those are changed that were trained on."""
    separator = config.data.separator or ("\t" if path.suffix.lower() == ".tsv" else ",")
    with path.open(newline="") as file:
        header, *rows = list(csv.reader(file, delimiter=separator))

    def train(rows: list[list[str]], folder: Path) -> dict[str, Any]:
        text = io.StringIO()
        csv.writer(text, delimiter=separator).writerows([header, *rows])
        # The rows are private, and no part of what is compared.
        table = folder.with_name(f"{folder.name}-table{path.suffix}")
        table.write_text(text.getvalue())
        try:
            chosen = _short(config, size=None, steps=steps)
            chosen = replace(chosen, data=replace(chosen.data, file=str(table)))
            return _public(train_run(chosen, folder / "run", progress=False, report=False))
        finally:
            table.unlink()

    recording = record(train, rows, with_folder=True)
    results = []
    for place in _places(sorted(trained), records):
        for name, row in (
            ("is a copy of another", rows[place - 1]),
            ("is full of gaps", [""] * len(header)),
            ("is odd", [_ODD] * len(header)),
        ):
            other = [*rows[:place], row, *rows[place + 1 :]]
            results.append((f"row {place + 1} {name}", recording.replay(other)))
    return results


def _places(among: Sequence[int], records: int) -> list[int]:
    """The first, the last, and others at random."""
    between = max(0, min(records, len(among)) - 2)
    others = random.SystemRandom().sample(list(among[1:-1]), between)
    return [int(place) for place in (among[0], among[-1], *sorted(others))][:records]


def _short(config: RunConfig, *, size: int | None, steps: int) -> RunConfig:
    """The configuration for a few steps on `size` examples, half of them in each batch."""
    training = replace(
        config.training, epochs=None, steps=steps, seed=None, device="cpu", check_bounds=0,
        validate=False, compile=False,
    )  # fmt: skip
    settings = dict(config.model.settings)
    if "steps" in settings:  # models that follow a rule have their training among their settings
        training = replace(config.training, seed=None, device="cpu")
        settings["steps"] = steps
        if size is not None:
            settings["batch_size"] = size if settings["full_batch"] else size // 2
    elif size is not None:
        training = replace(training, batch_size=size // 2)
    return replace(config, model=replace(config.model, settings=settings), training=training)


def _public(trained: TrainedRun) -> dict[str, Any]:
    """What is public of a finished run and not in its folder."""
    return {key: value for key, value in trained.record().items() if key != "seconds"}
