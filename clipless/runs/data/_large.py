"""Tables of a run that are read in pieces, where they would fill the memory."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Any

import numpy as np

from clipless.data import LargeTable, Piece, Repeated
from clipless.runs.config._errors import ConfigError
from clipless.runs.config._sections import DataConfig

_MOST_BYTES = 1 << 30
"""Files of more bytes than that are read in pieces, unless the configuration says otherwise."""
_MOST_TEST_ROWS = 100_000
_ARROW = (".arrow", ".ipc", ".feather")


def reads_pieces(config: DataConfig) -> bool:
    """Whether a table is read in pieces: by its kind and size, which are public, or as it says."""
    file = config.file or ""
    several = os.path.isdir(file) or (glob.has_magic(file) and not os.path.isfile(file))
    alone = config.text is None and config.unit is None
    if several or file.lower().endswith(_ARROW) or config.pieces:
        if not alone:
            raise ConfigError(
                f"{file} is read in pieces, for which there is neither data.text nor data.unit: "
                "give one file that fits into memory"
            )
        return True
    fits = config.pieces is False or not os.path.isfile(file)
    return alone and not fits and os.path.getsize(file) > _MOST_BYTES


def large_parts(config: DataConfig, target: str) -> tuple[LargeTable, Any, Any]:
    """Return the training rows of a table in pieces, and the test rows and their target in memory.

    Test rows are drawn by the seed of the split: the part that was asked for, and 100,000 at most.
    """
    table = LargeTable(Path(config.file or ""), separator=config.separator)
    if target not in table.names:
        raise ConfigError(
            f"{table.name} has no column {target!r} to predict. It has {', '.join(table.names)}."
        )
    count = len(table)
    tests = min(round(config.test_fraction * count), _MOST_TEST_ROWS)
    if not 0 < tests < count:
        raise ConfigError(f"{table.name} has {count} rows, too few to train and to test on")
    is_test = np.zeros(count, dtype=bool)
    random = np.random.default_rng(config.split_seed)
    is_test[random.choice(count, tests, replace=False, shuffle=False)] = True
    is_trained = ~is_test
    if config.limit is not None:
        is_trained &= np.cumsum(is_trained) <= config.limit
    test = in_memory(table.where(is_test))
    return table.where(is_trained), test.drop(columns=target), test[target]


def in_memory(table: LargeTable) -> Any:
    """Return a table that was read in pieces as a data frame."""
    import pandas

    frames = [table.types, *(pandas.DataFrame(_plain(piece)) for piece in table.pieces())]
    return pandas.concat(frames[1:] or frames, ignore_index=True)


def _plain(piece: Piece) -> dict[str, Any]:
    return {
        name: column.values[column.places] if isinstance(column, Repeated) else np.asarray(column)
        for name, column in piece.items()
    }
