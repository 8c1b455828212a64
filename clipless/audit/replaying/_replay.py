"""Replaying a run on a neighbouring data set, with the noise that it had (Re:cord-play).

Both runs draw the same samples, begin with the same weights and receive the same noisy results.
What the second would have released is compared with what the first did: each query may have moved
by its declared sensitivity, and everything else must be the same.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipless.audit.replaying._compare import differences, public_files
from clipless.audit.replaying._empty import DataWithEmptyRecord
from clipless.audit.replaying._record import DivergedError, Recorder, Replayer, UnknownPlaceError
from clipless.audit.replaying._result import ReplayResult
from clipless.common import Watcher, watched_by
from clipless.folders import PRIVATE_NAMES
from clipless.training import generator_states, restore_generators


@dataclass
class _Outcome:
    """How a run ended: with a result and files, or an error."""

    result: Any = None
    files: dict[str, Any] | None = None
    error: Exception | None = None


def replay(
    run: Callable[..., Any], data: Any, neighbour: Any, *, with_folder: bool = False
) -> ReplayResult:
    """Run on `data`, then on `neighbour` with the same noisy results, and compare.

    A pass says that on this pair of data sets every release kept its sensitivity, and that nothing
    else told one from the other. It is a test, not a proof: try the records that you fear. To try
    several, run on `data` once: `record(run, data)`. For short runs in one process: everything that
    is released is kept, with and without noise.

    Args:
        run: any function of the data that uses this library. It makes models, engines and ledgers
            anew, and returns what is public: weights, statistics, settings, as plain data, arrays,
            tensors or models; all of it is compared, bit for bit. An error in one run and not in
            the other is a difference.
        data: what `run` takes.
        neighbour: a data set in which one record is replaced by another, where queries may move by
            twice their sensitivity; or `with_empty_record(data, index)`, where they may move by it
            once.
        with_folder: call `run(data, folder)` with an empty folder, in which all files are
            compared but those that the layout of run folders calls private. It is the same path
            in both runs, and is gone afterwards.

    Example:
        >>> from clipless.privacy import Ledger, Relation
        >>> from clipless.audit import with_empty_record
        >>> from clipless.statistics import PrivateRows
        >>> def mean(x):
        ...     ledger = Ledger.in_memory(dataset_size=len(x), relation=Relation.ZERO_OUT)
        ...     rows = PrivateRows(x, ledger=ledger)
        ...     total = rows.noisy_sum(lambda x: x, bound=1.0, noise_multiplier=2.0, label="sum")
        ...     return total / len(x)
        >>> x = torch.ones(50, 1)
        >>> result = replay(mean, x, with_empty_record(x, 0))
        >>> result.passed, [(query.name, query.distance) for query in result.queries]
        (True, [('sum', 1.0)])
        >>> moved = torch.cat([torch.zeros(1, 1), x[1:]])
        >>> replay(lambda x: float(x.mean()), x, moved).differences
        ('result: 1.0, on the neighbour 0.9800000190734863',)
    """
    return record(run, data, with_folder=with_folder).replay(neighbour)


def record(run: Callable[..., Any], data: Any, *, with_folder: bool = False) -> Recording:
    """Run on `data` and keep all that it releases, to be replayed on neighbours; see `replay`.

    The run is a private release like any other, on `data` for real. Noise that comes from elsewhere
    than this library is fresh in each run and shows as a difference; so does everything random
    that follows neither this library nor the global generators of torch, numpy and Python.
    """
    return Recording(run, data, with_folder=with_folder)


class Recording:
    """A run on a data set, with all that it released. Secret: it holds values without noise."""

    def __init__(self, run: Callable[..., Any], data: Any, *, with_folder: bool) -> None:
        self._run = run
        # The path stays the same in all runs, and what is in it is nobody else's to read.
        self._place = tempfile.TemporaryDirectory() if with_folder else None
        self._folder = None if self._place is None else Path(self._place.name) / "run"
        self._generators = generator_states()
        recorder = Recorder()
        self._outcome = self._watched(recorder, data)
        self._transcript = recorder.transcript

    def replay(self, neighbour: Any) -> ReplayResult:
        """Run on a neighbour with the recorded results, and compare; see `replay`."""
        emptied = neighbour if isinstance(neighbour, DataWithEmptyRecord) else None
        replayer = Replayer(
            self._transcript,
            factor=2 if emptied is None else 1,
            empty=None if emptied is None else (emptied.index, emptied.size),
        )
        restore_generators(self._generators)
        first = self._outcome
        with suppress(DivergedError):
            second = self._watched(replayer, neighbour if emptied is None else emptied.data)
            if isinstance(second.error, UnknownPlaceError):
                raise second.error
            if first.error is not None and _same_error(first.error, second.error):
                raise first.error  # it fails whatever the data: there is nothing to compare
            replayer.finish()
            replayer.differences += _compared(first, second)
        return ReplayResult(
            queries=tuple(replayer.queries),
            differences=tuple(replayer.differences),
            relation="replace_one" if emptied is None else "zero_out",
        )

    def _watched(self, watcher: Watcher, data: Any) -> _Outcome:
        with watched_by(watcher), _empty_folder(self._folder) as arguments:
            try:
                result = self._run(data, *arguments)
            except Exception as error:
                return _Outcome(error=error)
            files = [public_files(each, private=PRIVATE_NAMES) for each in arguments]
            return _Outcome(result=result, files=files[0] if files else None)


@contextmanager
def _empty_folder(folder: Path | None) -> Iterator[tuple[Path, ...]]:
    if folder is None:
        yield ()
        return
    folder.mkdir()
    try:
        yield (folder,)
    finally:
        shutil.rmtree(folder)


def _compared(first: _Outcome, second: _Outcome) -> list[str]:
    if first.error is not None or second.error is not None:
        return [f"ended with {_ending(first)}, on the neighbour with {_ending(second)}"]
    found = differences(first.result, second.result, "result")
    return found + differences(first.files, second.files, "files")


def _ending(outcome: _Outcome) -> str:
    error = outcome.error
    return "a result" if error is None else f"{type(error).__name__}: {error}"


def _same_error(one: Exception, other: Exception | None) -> bool:
    return type(one) is type(other) and str(one) == str(other)
