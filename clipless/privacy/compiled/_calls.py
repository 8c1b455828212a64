"""What a compiled session does when its model or its criterion is called."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clipless.bounds import TRIAL_RUN
from clipless.common import not_set_error
from clipless.errors import PrivacyError
from clipless.kernels import CompiledFunction
from clipless.losses import Loss, PerExample
from clipless.privacy.compiled import _functions as _compile
from clipless.privacy.compiled._functions import (
    GRAPH_MODES,
    compiled_criterion,
    compiled_model,
    kept_bytes,
    uncompilable,
)
from clipless.privacy.compiled._recorded import Recorded, RecordedPasses
from clipless.privacy.enforced._enforcement import ThresholdEnforcement
from clipless.privacy.sampling._samplers import largest_sample
from clipless.privacy.step._checks import weights_on
from clipless.privacy.step._output_guard import call_of, limit_of, values_of

if TYPE_CHECKING:
    from clipless.privacy.step._session import TrainingSession


class CompiledCalls:
    """Stands in for the calls of a session's model and criterion, with the session's checks.

    Modules have a place for it, which `nn.Module.compile` uses too: the objects stay what they
    are, and copies of them are not compiled.
    """

    def __init__(self, session: TrainingSession, *, backend: str, mode: str | None) -> None:
        self._session = session
        self._fixed = session.loader.rows is not None
        if mode in GRAPH_MODES:
            _check_one_batch(session, mode)
        self._backend, self._mode = backend, mode
        self._graphs = (
            (mode is None or mode in GRAPH_MODES)
            and self._fixed and session.on_cuda and _is_one_batch(session)
            and session.thresholds is None  # whose counts are no part of what is recorded
        )  # fmt: skip
        self._whatever_size = mode in GRAPH_MODES
        reason = uncompilable(session.model)
        self._forward: CompiledFunction | None = None
        self.compilations = 0
        """How often the model was compiled: once, and again when it or its inputs have changed."""
        self._passes: RecordedPasses | None = None
        self._losses: CompiledFunction | None = None
        if reason is not None:
            warnings.warn(f"the model runs uncompiled: {reason}.", stacklevel=4)
        else:
            self._compile_model()
            session.model._compiled_call_impl = self._call_model
        if session.on_accelerator:  # elsewhere labels are read and checked, which is worth more
            self._compile_criterion(backend)

    def _compile_model(self) -> None:
        session = self._session
        self._enforcement = session.enforcement
        self.compilations += 1
        forward = compiled_model(
            session, backend=self._backend, mode=GRAPH_MODES.get(self._mode, self._mode),
            fixed=self._fixed or session.thresholds is not None, joined=session.on_accelerator,
        )  # fmt: skip

        def pays(*inputs: Any) -> bool:
            if not self._graphs or not forward.works:
                return False
            kept = 0.0 if self._whatever_size else kept_bytes(forward.plain, inputs)
            return kept <= _compile.GRAPHED_BYTES

        self._forward = forward
        self._passes = RecordedPasses(
            forward, session.enforcement, wanted=pays,
            parts=lambda: [session._guard.snapshot],
            tensors=lambda: session._guard.snapshot.tensors,
        )  # fmt: skip

    def _compile_criterion(self, backend: str) -> None:
        criterion = self._session.criterion
        losses = compiled_criterion(criterion, backend=backend, fixed=self._fixed)
        self._losses = losses
        self._criterion = Recorded(
            losses, name="the criterion", parts=lambda: list(vars(criterion).values()),
            # A function of the user's own may read what changes from step to step.
            wanted=lambda *_: self._graphs and losses.works and is_our_own(criterion),
        )  # fmt: skip
        criterion._compiled_call_impl = self._call_criterion

    def remove(self) -> None:
        """Let model and criterion be called as usual again."""
        for module, call in (
            (self._session.model, self._call_model),
            (self._session.criterion, self._call_criterion),
        ):
            if module._compiled_call_impl == call:
                del module._compiled_call_impl

    @property
    def works(self) -> bool:
        """Whether the model runs compiled."""
        return self._forward is not None and self._forward.works

    @property
    def uses_graphs(self) -> bool:
        """Whether the model's passes are launched as CUDA graphs."""
        return self._passes is not None and bool(self._passes.active)

    def _call_model(self, *inputs: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return _untraced(self._run_model, *inputs, **options)
        return self._run_model(*inputs, **options)

    def _call_criterion(self, *arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return _untraced(self._run_criterion, *arguments, **options)
        return self._run_criterion(*arguments, **options)

    def _run_model(self, *inputs: Any, **options: Any) -> Any:
        session, model = self._session, self._session.model
        named = options if session.thresholds is not None else {}
        if len(named) < len(options) or TRIAL_RUN.here or not (
            model.training and torch.is_grad_enabled()
        ):  # fmt: skip
            return model._call_impl(*inputs, **options)
        output, backward = None, None
        given = (*inputs, *named.values())
        tensors = tuple(each for each in given if isinstance(each, Tensor)) if named else inputs
        try:
            session.before_forward(inputs, self._run_passes, named)
            output, backward = self._run_passes(*tensors)
        finally:
            seen = session.after_forward(given, output, backward)
        if isinstance(session.enforcement, ThresholdEnforcement):
            return session.enforcement.as_returned(seen)
        return seen

    def _run_passes(self, *tensors: Any) -> Any:
        """The passes of the model as it is now: with other thresholds, they are compiled anew."""
        if self._session.enforcement is not self._enforcement:
            self._compile_model()
        if self._passes is None:
            raise not_set_error("passes")
        return self._passes(*tensors)

    def _run_criterion(self, *arguments: Any, **options: Any) -> Any:
        session, criterion = self._session, self._session.criterion
        call = call_of(arguments[0]) if arguments and torch.is_grad_enabled() else None
        if options or call is None or call.session is not session:
            return criterion._call_impl(*arguments, **options)  # type: ignore[no-untyped-call]
        session.before_criterion(arguments)
        loss, cotangents = self._criterion(
            values_of(call), arguments[1], weights_on(call.sample, call.output.device),
            session.plan.loss_divisor, limit_of(session),
        )  # fmt: skip
        return session.after_fused_criterion(call, loss, cotangents)


def _untraced(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call from within somebody else's compiled code: our checks are not to become part of it."""
    # Wrapped now and not by a decorator, which would load the compiler with this library.
    return torch.compiler.disable(call)(*arguments, **options)


def is_our_own(criterion: Loss) -> bool:
    """Whether a loss is computed by nothing but what this library brings."""
    known = type(criterion).__module__.startswith("clipless.losses.")
    return known and not isinstance(criterion, PerExample)


def _is_one_batch(session: TrainingSession) -> bool:
    return session.loader._count_micro_batches(largest_sample(session.plan.sampling)) == 1


def _check_one_batch(session: TrainingSession, mode: str | None) -> None:
    """CUDA graphs write all results to the same place again, so a step must be one batch."""
    if not _is_one_batch(session):
        raise PrivacyError(
            f"mode={mode!r} records CUDA graphs, whose gradients the next batch overwrites, and "
            "the steps of this loader consist of several batches. Compile without a mode, or leave "
            "micro_batch_size out."
        )
