"""Trials of the running model: one example changes, or is left out, and no other must notice.

That examples stay apart is proved by the trace of the model. The model that runs may be another one
(globals, hooks inside of objects, compiled code with a fault), so it is put to the test now and
then, on rows of the batch at hand, in the way it runs: before steps 0, 1, 2, 4, 8, ... Nothing of a
trial is released; all that comes of it is an error, which ends the run, or a warning.

What the training loop does to batches before the model gets them cannot be run again. If it treats
every example by itself, an example that is sampled twice arrives twice as the same input: that is
what is looked at where the data are tensors, which hold the same rows whenever they are read.
"""

from __future__ import annotations

import contextlib
import functools
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from clipless.bounds import seed_generators
from clipless.errors import PrivacyError
from clipless.privacy.step._enforcement import BackwardPass
from clipless.privacy.step._output_guard import without_autocast

if TYPE_CHECKING:
    from clipless.privacy.sampling._batches import StepSample
    from clipless.privacy.step._parts import StepParts

_ROWS = 8
"""So few rows that what mixes them cannot hide in a large mean; compiled code takes all of them."""
_HUGE = 1e3
"""Cotangents of one row alone, relative to what the output guard lets through: bounds must act."""
_SMALL = 0.05
"""Those of the other rows: far from their bounds, which would hide what else has changed."""
_ROUNDING = 1e-4
"""How much results may differ that are computed twice, relative to their norm."""
_OTHER_KERNELS = {"float32": 0.01, "tf32": 0.05, "bfloat16": 0.05}
"""The same between batches of two sizes: other kernels may run, and a tie go another way."""
_KEPT = 1 << 22
"""How many numbers of a batch are kept at most, until its examples are sampled again."""


Pass = Callable[..., tuple[Tensor, BackwardPass | None]]
"""How the model is run: from its inputs to its output, and its backward pass if not autograd's."""


class RowTrial:
    """Tries, before some of the steps, whether examples stay apart and bounds are kept."""

    def __init__(self, session: StepParts) -> None:
        self._session = session
        self.due_at = 0
        """After how many steps the next trial is to be held."""
        self.looks_at_inputs = False
        """Whether the inputs of the pass under way are to be compared with earlier ones."""
        self._seen: tuple[dict[int, int], list[Tensor]] = {}, []
        """Inputs of an earlier batch, and the row in them of each example."""
        self.draws: bool | None = None
        """Whether a pass of the model has drawn random numbers; None if none was tried yet."""

    def hold(self, inputs: Sequence[Any], run: Pass | None) -> bool:
        """Hold a trial if one is due, of the model itself and of the way in which it is run."""
        session = self._session
        rows = min((x.shape[0] for x in inputs if isinstance(x, Tensor)), default=0)
        if rows < 2 or session.group.sharded or session._book.progress is not None:
            return False
        self.due_at = max(1, 2 * session.steps_taken)
        self.looks_at_inputs = session.loader.repeats_rows
        few = [x[:_ROWS] if isinstance(x, Tensor) else x for x in inputs]
        self.check(few, self._eager)
        if rows > 2:
            self.check_left_out(few)
        if run is not None:
            self.check(inputs, run)
        return True

    @torch.no_grad()
    def compare_inputs(self, inputs: Sequence[Any], sample: StepSample) -> None:
        """Warn if an example is another input to the model than in an earlier step."""
        self.looks_at_inputs = False
        now = [x.detach() for x in inputs if isinstance(x, Tensor)]
        examples = sample.indices.tolist()
        if any(len(x) != sample.rows for x in now):
            return  # something else than the batch: refused when its loss is asked for
        known, before = self._seen
        both = [(row, known[each]) for row, each in enumerate(examples) if each in known]
        for x, earlier in zip(now, before if both else (), strict=False):
            rows, places = map(list, zip(*both, strict=True))
            if x.shape[1:] == earlier.shape[1:] and not _same(earlier[places], x[rows].cpu()):
                warnings.warn(
                    "an example came to the model as another input than in an earlier step, though "
                    "the data hold it unchanged: what the training loop does to a batch depends on "
                    "chance, or on the other examples in it (their mean, their largest value, "
                    "mixup). In the latter case no sensitivity bounds what one example does to the "
                    "others, and the stated epsilon does not hold: treat each example by itself, "
                    "with public constants. Random augmentation has a place of its own, "
                    "BatchOptions(augment=...), where it is tried out.",
                    stacklevel=2,
                )
        count = min([len(examples), *(_KEPT // max(1, x[:1].numel()) for x in now)])
        self._seen = (
            {each: row for row, each in enumerate(examples[:count])},
            [x[:count].cpu().clone() for x in now],
        )

    def check(self, inputs: Sequence[Any], run: Pass) -> None:
        """Raise `PrivacyError` if an example touches another, or exceeds its bound."""
        rows = next(x.shape[0] for x in inputs if isinstance(x, Tensor))
        with _undisturbed(self._session._trainable[0].device):
            row = random.randrange(rows)
            changed = [_with_another(x, row) if isinstance(x, Tensor) else x for x in inputs]
            first, again, other = (
                self._pass(each, run, row, alone=False) for each in (inputs, inputs, changed)
            )
            alone = self._pass(inputs, run, row, alone=True)
        # A model that draws numbers of its own differs from itself: nothing can be told from it.
        if _alike(first, again) and not _alike(first, other):
            raise PrivacyError(
                "when one example of a batch was replaced, what the model computes for the others "
                "changed. Its forward or backward pass mixes examples in a way that its trace did "
                "not show (statistics of the batch, a hook, state kept between calls), and then "
                "no sensitivity is bounded. Keep every operation within one example."
            )
        plan = self._session.plan
        for parameter, gradient in zip(plan.parameters, alone[1:], strict=True):
            limit = plan.sensitivities[parameter.name] / plan.views
            if gradient is not None and not torch.linalg.vector_norm(gradient.double()) <= limit:
                raise PrivacyError(
                    f"one example's gradient of {parameter.name} exceeded its bound {limit:g} in a "
                    "trial: what runs (compiled code, perhaps) does not keep it. Train uncompiled, "
                    "and report this."
                )

    def check_left_out(self, inputs: Sequence[Any]) -> None:
        """Raise `PrivacyError` if the others notice that an example is not in the batch.

        A sample without it is smaller, and what comes after it has other places. (What a model
        draws at random falls on other examples then: of such a one nothing can be told.)
        """
        rows = next(x.shape[0] for x in inputs if isinstance(x, Tensor))
        with _undisturbed(self._session._trainable[0].device):
            row = random.randrange(rows - 1)
            kept = [each for each in range(rows) if each != row]
            fewer = [x[kept] if isinstance(x, Tensor) else x for x in inputs]
            whole = self._pass(inputs, self._eager, row, alone=False)
            if self.draws or not _alike(whole, whole):  # of what is not finite neither
                return
            rest = self._pass(fewer, self._eager, row, alone=False, left_out=True)
        output, allowed = whole[0], _OTHER_KERNELS[self._session.plan.precision]
        if output is None or not _alike([output[kept], *whole[1:]], rest, allowed):
            raise PrivacyError(
                "when one example was left out of a batch, what the model computes for the others "
                "changed: it depends on how many examples there are, or on their places in the "
                "batch. Then a sample without an example differs from one with it in all the "
                "others, too, and no sensitivity is bounded. Keep every operation within one "
                "example."
            )

    def _eager(self, *inputs: Any) -> tuple[Tensor, None]:
        return self._session.run_eagerly(inputs), None

    def _pass(
        self, inputs: Sequence[Any], run: Pass, row: int, *, alone: bool, left_out: bool = False
    ) -> list[Tensor | None]:
        """Return the output and the gradients of one row `alone`, or of all but that one.

        One row alone has cotangents far above what the output guard lets through, so that bounds
        have to act. A row that is `left_out` is not among the inputs, and all others have the
        cotangents that they have beside it.
        """
        session = self._session
        session.enforcement.begin_pass(inputs)
        seed_generators(session.model)
        random.seed(0)
        np.random.seed(0)
        before = _generator_states(device := session._trainable[0].device)
        output, backward = run(*inputs)
        self.draws = bool(self.draws) or before != _generator_states(device)
        limit = session.plan.loss_lipschitz / session.plan.loss_divisor
        limit *= _HUGE if alone else _SMALL
        rows = output.shape[0] + left_out
        size = rows * output.shape[1:].numel()
        trial = torch.linspace(0.5, 1.5, size, device=output.device) * limit
        trial = trial.view(rows, *output.shape[1:]).to(output.dtype)
        chosen = torch.arange(rows, device=output.device) == row
        if left_out:
            trial, chosen = trial[~chosen], chosen[~chosen]
        chosen = (chosen if alone else ~chosen).view(-1, *[1] * (output.ndim - 1))
        backward = backward or functools.partial(session.enforcement.gradients, output)
        with without_autocast(output.device.type):
            found = backward(torch.where(chosen, trial, 0.0))
        return [torch.where(chosen, output.detach(), 0.0), *found]


def _generator_states(device: torch.device) -> tuple[object, ...]:
    """Where the generators are that a model may draw from."""
    own = [torch.get_rng_state()]
    if device.type == "cuda":
        own.append(torch.cuda.get_rng_state(device))
    states = [state.numpy().tobytes() for state in own]
    return (*states, random.getstate(), str(np.random.get_state()))


def _alike(
    one: Sequence[Tensor | None], other: Sequence[Tensor | None], rounding: float = _ROUNDING
) -> bool:
    return all(_close(*pair, rounding) for pair in zip(one, other, strict=True))


def _close(one: Tensor | None, other: Tensor | None, rounding: float) -> bool:
    if one is None or other is None:
        return one is other
    difference = torch.linalg.vector_norm((one - other).double())
    return bool(difference <= rounding * torch.linalg.vector_norm(one.double()))


def _same(rows: Tensor, others: Tensor) -> bool:
    """Whether inputs are the same ones, up to a rounding that depends on how many come together."""
    if rows.dtype in (torch.float16, torch.bfloat16) or others.dtype != rows.dtype:
        rows, others = rows.bfloat16(), others.bfloat16()
    if torch.equal(rows, others):
        return True
    allowed = 2 * torch.finfo(torch.bfloat16).eps if rows.dtype == torch.bfloat16 else _ROUNDING
    one, other = (torch.nan_to_num(each.double(), 0.0, 0.0, 0.0) for each in (rows, others))
    return bool(torch.linalg.vector_norm(one - other) <= allowed * torch.linalg.vector_norm(one))


def _with_another(x: Tensor, row: int) -> Tensor:
    """The batch with one row replaced by something else of the same kind."""
    x = x.clone()
    other = x[(row + 1) % x.shape[0]]
    x[row] = 1 - 2 * other if x.is_floating_point() else other
    return x


@contextlib.contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Leave all generators as they were found, and checkpoints of activations to themselves."""
    states = random.getstate(), np.random.get_state()
    try:
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
        ):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
