"""One private step, stage by stage: what happens to a sample on its way to the weights, and why.

    sample -> forward -> criterion -> backward -> sum -> ledger -> noise -> optimizer -> projection

A step is: a sample is drawn; each of its micro-batches goes through the model, the criterion and a
backward pass, once; then the optimizer steps. Each stage says what it contributes to the proof that
a neighbouring data set moves what is released by at most the planned sensitivity. Anything that is
not such a step is refused, or counted as if it were one. Who calls the stages (hooks of an eager
model, compiled calls) and the life of a run (`TrainingSession`) are elsewhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clipless.accounting import FullBatch
from clipless.common import not_set_error
from clipless.privacy._quantile_thresholds import QuantileThresholds
from clipless.privacy.enforced._report import EnforcedReport
from clipless.privacy.sampling._batches import StepSample, sample_of
from clipless.privacy.step import _checks as checks
from clipless.privacy.step import _refusals as refusals
from clipless.privacy.step._book import StepProgress
from clipless.privacy.step._enforcement import BackwardPass
from clipless.privacy.step._output_guard import (
    ForwardCall,
    call_of,
    detach_output,
    loss_with_cotangents,
    main_output,
    public_mean,
    with_main_output,
    without_autocast,
)
from clipless.privacy.step._parts import StepParts


class PrivateStep(StepParts):
    """The stages of a step, in their order, one method each."""

    # --- 1. sample: each example is in it by chance, as the accountant was told -------------------

    def sample(self, inputs: tuple[Any, ...]) -> StepSample:
        """Return the sample that the inputs are: by their mark, or else the one drawn last.

        Privacy: amplification by sampling holds for a sample that the private loader drew for this
        run and that is released once. Inputs of which that cannot be told are refused.
        """
        marked = _marked_sample(inputs)
        if marked is not None:
            if marked.origin is not self.loader.origin:
                raise refusals.another_loader()
            return marked
        sample = self.loader.current
        if sample is None:
            raise refusals.no_batch_drawn()
        begun = self._book.last_step if self._book.progress is None else self._book.progress.step
        if sample.weights is not None and sample.step > begun + 1:
            self._book.count_skipped(sample.step - self._book.last_step, self.plan)
            self._book.progress = None
            raise refusals.several_batches_drawn()
        drawn = sample.step < self.loader.next_step  # and not set by hand as the current one
        if drawn and not isinstance(self.plan.sampling, FullBatch):  # always the same examples
            _mark_used(inputs, sample)
        return sample

    # --- 2. forward: the proved model, on examples that stay apart --------------------------------

    def before_forward(
        self, inputs: Any, run: Callable[..., Any] | None = None, named: Mapping[str, Any] = {}
    ) -> None:
        """Prepare a forward pass; `run` is how it is run, unless by the model itself.

        Privacy: the bounds hold for this model, with weights in their constraint sets, on inputs of
        this shape, computed in this precision. Each is checked, or proved anew if it has changed.
        While the pass runs, parameters are reached through bounded leaves alone (`Enforcement`).
        """
        if self._runs_elsewhere():
            raise refusals.two_threads()
        self._pass.close()  # a pass that was interrupted
        if not torch.is_grad_enabled():
            return
        training = self.model.training
        if training:
            if isinstance(self.report, EnforcedReport):
                inputs = self._tensors_of_call(self.report, inputs, named)
            else:
                self._check_inputs(inputs)
            self._check_arithmetic(inputs)
            self.group.check_forward()
            if self._guard.seal.broken():
                self._guard.certify()
            with self.group.without_sharding(self.model):
                changed = self._guard.snapshot.changed()
            if changed:
                self._renew_bounds()
            if run is None and self.plan.precision == "bfloat16":  # else `run` casts by itself
                self._pass.enter_context(self.casts())
            self._pass.enter_context(self.enforcement.stand_in())
        self.inside_forward, self._thread = True, threading.current_thread()
        self._pass.callback(setattr, self, "inside_forward", False)
        if training:
            if self.steps_taken >= self.trial.due_at and self.trial.hold(inputs, run):
                self.enforcement.renew_leaves()
            self._pass.enter_context(self.secret_draws())
            self.enforcement.begin_pass(inputs)

    def _check_inputs(self, inputs: tuple[Any, ...]) -> None:
        """Look at shapes, and at what is behind the inputs; in detail only if something is new."""
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        usual = tuple([x.shape[1:] for x in tensors]) == self._input_shapes
        if not usual or any(x.grad_fn is not None for x in tensors):
            checks.check_inputs(inputs, self._input_shapes)

    def _check_arithmetic(self, inputs: Sequence[Any]) -> None:
        """Check the precision of products; on a CPU whose settings are as they were, it holds."""
        settings = _settings_of_cpu() if self._trainable[0].device.type == "cpu" else None
        if settings is None or settings != self._settings_as_checked:
            checks.check_precision(inputs, self.plan.precision)
            self._settings_as_checked = settings

    def after_forward(self, inputs: Any, output: Any, backward: BackwardPass | None = None) -> Any:
        """Return the output as everybody sees it: detached from the graph to the parameters.

        Privacy: what is not differentiated through the criterion cannot be differentiated at all.
        """
        if self._runs_elsewhere():
            return None
        self._pass.close()
        if output is None or not torch.is_grad_enabled() or not self.model.training:
            return None
        main = output if self.thresholds is None else main_output(output)
        if not isinstance(main, Tensor):
            raise refusals.not_one_tensor(main)
        sample = self.sample(inputs)
        if self.trial.looks_at_inputs:
            self.trial.compare_inputs(inputs, sample)
        if (self.plan.user_records is None) != (sample.shares is None):
            raise refusals.another_loader()
        backward = backward or self.enforcement.backward_pass(main, sample.shares)
        call = ForwardCall(
            session=self, output=main, backward=backward, sample=sample, plan=self.plan
        )
        return with_main_output(output, detach_output(call))

    def _runs_elsewhere(self) -> bool:
        """Whether another thread is in a forward pass, which has the model to itself."""
        elsewhere = self._thread is not threading.current_thread()
        return self.inside_forward and elsewhere and self._thread.is_alive()

    # --- 3. criterion: a sum over examples, divided by a public number ----------------------------

    def before_criterion(self, arguments: Any) -> ForwardCall:
        """Return the forward pass whose loss is asked for: the next micro-batch of the step.

        Privacy: every sampled example has one loss, whose gradient at the output is at most the
        criterion's Lipschitz constant, and goes through once.
        """
        if len(arguments) != 2 or self.criterion.reduction != "none":
            checks.check_criterion_call(self.criterion, arguments)
        if self._criterion_as_checked is None or self._criterion_as_checked.changed():
            checks.check_criterion(self.criterion)
        call = call_of(arguments[0])
        if call is None or call.session is not self:
            raise refusals.not_the_output()
        drawn = sample_of((arguments[1],))
        if drawn is not None and drawn is not call.sample:
            raise refusals.other_targets()
        if call.sample.step <= self._book.last_step:
            raise refusals.no_new_batch()
        progress = self._book.progress
        if progress is None or call.sample.step != progress.step:
            repeats = self.outcomes.repeats(call.sample.step)
            progress = self._book.begin(call.sample, self.plan, repeats=repeats)
        progress.check_next(call)
        return call

    def after_criterion(self, call: ForwardCall, losses: Tensor) -> Tensor:
        """Return the loss of the step: the examples' sum over the expected batch size, not theirs.

        Privacy: the divisor is public; one by the size of the sample would tell who is in it.
        """
        self._book.saw(call)
        sample = call.sample
        weights = None if sample.weights is None else checks.weights_on(sample, losses.device)
        return public_mean(losses, None if weights is None else weights.to(losses), call)

    def after_fused_criterion(self, call: ForwardCall, loss: Tensor, cotangents: Tensor) -> Tensor:
        """Return the loss of the step where its clipped cotangents were computed along with it."""
        self._book.saw(call)
        return loss_with_cotangents(call, loss, cotangents)

    # --- 4. backward: each example's gradient, within its bound -----------------------------------

    def backward(self, call: ForwardCall, cotangents: Tensor) -> None:
        """Run the backward pass of one forward pass, and keep the gradients.

        Privacy: cotangents arrive clipped to the criterion's constant, row by row. On the way down,
        `Enforcement` scales what one example adds to a parameter to the bound of the plan. Nobody
        else sees the result.
        """
        progress = self._book.progress
        if progress is None or call.sample.step != progress.step:
            raise refusals.backward_too_late()
        if self._guard.seal.touched():
            raise refusals.edited_before_backward()
        if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in self._trainable):
            raise refusals.gradient_hook()
        if not self._delivering.acquire(blocking=False):
            raise refusals.two_threads()
        try:
            self._gradients.check_own()
            if self._followers is not None:
                self._followers.expect(rows=call.output.shape[0], shares=call.sample.shares)
            self._add_gradients(call, cotangents, progress.gradients)
            if self._followers is not None:
                self._followers.add_to(progress.counts)
            progress.delivered += 1
        finally:
            # What is behind the output has done its work.
            call.output, call.backward = call.output.detach(), None
            self._delivering.release()
        if self.allows_scaling:  # a scaler wants to see gradients; it may have these
            self._gradients.put([torch.zeros_like(parameter) for parameter in self._trainable])
        elif progress.delivered == progress.micro_batches and not self.group.sharded:
            self._gradients.withhold()

    # --- 5. sum: over the examples of all micro-batches -------------------------------------------

    def _add_gradients(
        self, call: ForwardCall, cotangents: Tensor, sums: dict[int, Tensor]
    ) -> None:
        """Add the gradients behind an output to `sums`, by the parameter's place.

        Privacy: one example is in one micro-batch, so that it moves the sum by its bound. Also if
        this is interrupted, nobody gets to see gradients without noise.
        """
        if call.backward is None:
            raise not_set_error("the backward pass")
        try:
            self._gradients.drop()
            with without_autocast(call.output.device.type):
                found = call.backward(cotangents.to(call.output.dtype))
            for index, gradient in enumerate(found):
                if gradient is not None:
                    known = sums.get(index)
                    sums[index] = gradient if known is None else known.add_(gradient)
        finally:
            self._gradients.drop()

    # --- 6. ledger: spent before anything is released ---------------------------------------------

    def before_optimizer(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Account for the step, add its noise and hand the gradients to the optimizer.

        Returns the arguments that the optimizer steps with: a closure, which runs the passes of
        the step, is called here, once, and the optimizer neither gets it nor the loss, which
        has no noise.
        """
        checks.refuse_closures(type(self.optimizer))  # type: ignore[arg-type]  # classes hash
        closure = kwargs.get("closure") if len(args) < 2 else args[1]
        if closure is not None:
            with torch.enable_grad():
                closure()
        if not self._delivering.acquire(blocking=False):
            raise refusals.two_threads()
        try:
            with self.group.all_or_none(self._state, model=self.model, step=self.steps_taken):
                progress = self._account_for_step()
            self._release(progress)
        finally:
            self._delivering.release()
        return args[:1], {name: each for name, each in kwargs.items() if name != "closure"}

    def _account_for_step(self) -> StepProgress:
        """Check that the step may be taken, and write it down.

        Privacy: what is in the ledger was perhaps not released; what is released is in the ledger,
        whatever interrupts the program after this line. Steps beyond the budget are refused.
        """
        progress = self._book.progress
        if progress is None:
            if not self.model.training:
                self._gradients.drop()
            raise refusals.step_without_batch(training=self.model.training)
        progress.check_complete()
        held = [id(p) for group in self.optimizer.param_groups for p in group["params"]]
        if held != self._held_as_checked:
            checks.check_optimizer(self.optimizer, self._parameters)
            self._held_as_checked = held
        self._gradients.check_own()
        if self._guard.seal.broken():
            raise refusals.edited_before_step()
        self.outcomes.account(progress.step)
        return progress

    def _state(self) -> tuple[object, ...]:
        """Return what must be the same wherever this step is taken."""
        progress = self._book.progress
        if progress is None:
            raise not_set_error("the step under way")
        return progress.step, progress.micro_batches, self.plan.noise_multiplier

    # --- 7. noise, and 8. optimizer: it finds gradients that are public ---------------------------

    @torch.no_grad()
    def _release(self, progress: StepProgress) -> None:
        """Give the optimizer the gradients, with their noise.

        Privacy: the Gaussian mechanism, on the sum of this sample, with the deviation that the plan
        has for its sensitivity. Whatever the optimizer does with the result is post-processing.
        """
        found = progress.gradients
        gradients = [
            found[index] if index in found else torch.zeros_like(parameter, dtype=torch.float64)
            for index, parameter in enumerate(self._trainable)
        ]
        followers = self._followers
        counts = [] if followers is None else followers.fractions(progress.counts, gradients[0])
        self._book.progress = None
        add_noise = partial(self.outcomes.add_noise, progress.step)
        self._gradients.release(
            self.group.release(gradients, counts, add_noise, progress.plan.releases)
        )

    # --- 9. projection: the next step's bounds hold for the weights it begins with ----------------

    def after_optimizer(self) -> None:
        """Project the weights, and move thresholds that follow a quantile.

        Privacy: the bounds are proved for weights in their constraint sets. Projection looks at
        released weights alone, and thresholds at released counts: both are post-processing.
        """
        guard = self._guard
        self.group.project(guard.projection, guard.constrained)
        if guard.rounded is not None:
            guard.rounded.restore()
        self.group.broadcast_weights()
        guard.seal.renew()
        if isinstance(self._followers, QuantileThresholds):
            self._followers.move(self.group.counts)
        elif self._followers is not None:
            self.move_thresholds()
        self.steps_taken += 1


def _marked_sample(inputs: tuple[Any, ...]) -> StepSample | None:
    """Return the sample that the model's inputs are marked with; refuse several at once."""
    marks = [mark for each in inputs if (mark := sample_of((each,)) or _used_for(each))]
    if any(mark is not marks[0] for mark in marks):
        raise refusals.several_batches_at_once()
    return marks[0] if marks else None


def _mark_used(inputs: tuple[Any, ...], sample: StepSample) -> None:
    """Note which sample tensors were used for that the loader did not mark itself."""
    for value in inputs:
        if isinstance(value, Tensor) and not value.is_inference():
            value._clipless_used = (sample, value._version)  # type: ignore[attr-defined]


def _used_for(value: Any) -> StepSample | None:
    """Return the sample that this tensor was used for before, unless it was filled anew."""
    sample, version = getattr(value, "_clipless_used", (None, None))
    return sample if isinstance(sample, StepSample) and value._version == version else None


_CPU_PRODUCTS = tuple(
    part
    for name in ("matmul", "conv")
    if (part := getattr(torch.backends.mkldnn, name, None)) is not None
)


def _settings_of_cpu() -> tuple[object, ...]:
    """What decides how products are rounded on the CPU."""
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    return autocast, *[part.fp32_precision for part in _CPU_PRODUCTS]
