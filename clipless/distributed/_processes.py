"""Several processes that train one model together: what they tell each other.

All of it is control: errors, names, keys, one small message a step. It goes between CPUs, so that
no accelerator is waited for. Gradients and weights travel elsewhere (`_ownership`).
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from clipless.common import not_set_error
from clipless.errors import CliplessError, PrivacyError

if dist.is_available():
    # Its functions have the default group of the moment as a default argument. Whoever loads it
    # after a group was made (torch does, at odd moments) would hold that group to the end.
    import torch.distributed.nn.functional

Value = TypeVar("Value")


class Processes:
    """The processes of the default process group, seen from one of them.

    Every method is called by all processes, in the same order. Process 0 keeps the ledger and the
    run folder; where it fails, all do.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # Not held: while a group is, `destroy_process_group` leaves its threads running, and one
        # that still has a message in hand when Python ends takes the process down with it.
        self._known_group = weakref.ref(_control_group())
        self.stop_wanted = False
        """Set by whoever wants training to end after the present step."""
        self.stop_agreed = False
        """Whether a process wanted it when they last met: the same answer on all of them."""

    @property
    def _group(self) -> Any:
        group = self._known_group()
        if group is None:
            raise PrivacyError(
                "the process group in which training began was destroyed; resume from the last "
                "checkpoint in a new one"
            )
        return group

    @property
    def first(self) -> bool:
        """Whether this is process 0."""
        return self.rank == 0

    def from_first(self, produce: Callable[[], Value]) -> Value:
        """Let process 0 call `produce`, and return what it returns, or raise what it raises."""
        parcel: list[Any] = [None, None]
        failure: Exception | None = None
        if self.first:
            try:
                parcel[0] = produce()
            except Exception as error:
                failure = error
                told = isinstance(error, CliplessError)
                parcel[1] = error if told else RuntimeError(f"{type(error).__name__}: {error}")
        with _Lost():
            dist.broadcast_object_list(parcel, src=0, group=self._group)
        if failure is not None:
            raise failure
        if parcel[1] is not None:
            raise parcel[1]
        return parcel[0]

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all processes, by rank."""
        values: list[Any] = [None] * self.size
        with _Lost():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def compare(self, description: Mapping[str, object]) -> None:
        """Refuse to go on unless all processes describe themselves alike."""
        mine = {name: str(value) for name, value in description.items()}
        everybody = self.gather(mine)
        lines = [
            f"  {name}: {_short(everybody[0].get(name))} in process 0, "
            f"{_short(other.get(name))} in process {rank}"
            for rank, other in enumerate(everybody)
            for name in sorted({*everybody[0], *other})
            if other.get(name) != everybody[0].get(name)
        ]
        if lines:
            raise PrivacyError(
                "the processes are not about to train the same model on the same data:\n"
                + "\n".join(lines)
                + "\nRun the same program with the same data and arguments in all of them."
            )

    def meet(self, *, state: object, failed: bool) -> None:
        """Wait for all processes, and go on only if none has failed and all are in one `state`.

        The small message of a step: four numbers.
        """
        digest = _digest(state)
        message = torch.tensor(
            [self.rank + 1 if failed else 0, int(self.stop_wanted), digest, -digest]
        )
        with _Lost():
            dist.all_reduce(message, op=dist.ReduceOp.MAX, group=self._group)
        failure, stop, largest, negated = message.tolist()
        self.stop_agreed = bool(stop)
        if failed:
            return
        if failure:
            raise PrivacyError(
                f"process {failure - 1} has refused this step, for a reason that it gives itself. "
                "No process takes it; it may have been counted."
            )
        if largest != -negated:
            raise PrivacyError(
                "the processes are no longer in step: they are at different batches, have changed "
                "their noise differently, or hold different weights. No process takes this step. "
                "Draw the same number of batches everywhere, and let the optimizer alone change "
                "the weights; then resume from the last checkpoint."
            )


class SingleProcess:
    """A process that trains alone: the first of one."""

    rank, size, first = 0, 1, True

    def from_first(self, produce: Callable[[], Value]) -> Value:
        """Return what `produce` returns."""
        return produce()

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all processes: this one's."""
        return [value]

    def compare(self, description: Mapping[str, object]) -> None:
        """Go on: one process is like itself."""


def processes_present() -> Processes | None:
    """The processes of the default group, be it one, or None if there is no process group."""
    if dist.is_available() and dist.is_initialized():
        return Processes()
    return None


def rank_and_size() -> tuple[int, int]:
    """Which process this is, of how many."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


class _Lost:
    """Turns the many ways in which a connection ends into one error."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, CliplessError):
            raise process_lost(error) from error


def process_lost(error: BaseException) -> PrivacyError:
    """Another process is gone, or does not answer in time."""
    return PrivacyError(
        f"another process has ended or does not answer ({_first_line(error)}). Training stops "
        "here. Everything that was released is in the ledger: start again, with any number of "
        "processes, to go on from the last checkpoint."
    )


_control_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _control_group() -> Any:
    """A group whose messages go between CPUs; made once for every default group."""
    default = dist.group.WORLD
    if default is None:
        raise not_set_error("default")
    if torch.device("cpu") in default._device_types:
        return default
    if default not in _control_groups:
        _control_groups[default] = dist.new_group(backend="gloo")
    return _control_groups[default]


def _digest(state: object) -> int:
    """A number below 2^62, the same in every process for the same text."""
    return int.from_bytes(hashlib.sha256(repr(state).encode()).digest()[:8]) >> 2


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _short(text: str | None) -> str:
    return "nothing" if text is None else text if len(text) < 200 else f"{text[:200]}..."
