"""One private training run in progress: the hooks, and the order in which things must happen.

A step is: a sample is drawn; each of its micro-batches goes through the model, the criterion and a
backward pass, once; then the optimizer steps. Gradients are kept by the session until then: what
the optimizer finds in `parameter.grad` has its noise already. After the step, weights are
projected. Anything else is refused, or counted as if it were a step.
"""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from clipless.bounds import sensitivity
from clipless.bounds._sensitivity import Shape, input_shapes
from clipless.bounds._structure import structure_of
from clipless.errors import BudgetExhaustedError, PrivacyError
from clipless.losses import Loss
from clipless.nn import ConstrainedModule, certify, project
from clipless.nn._base import scaled_modules, set_loss_scale
from clipless.privacy._batches import StepSample, sample_of
from clipless.privacy._budget import BudgetMeter
from clipless.privacy._following import Followers, planned_queries
from clipless.privacy._guards import ForwardCall, call_of, cut_off, public_mean, tap
from clipless.privacy._hooks import SessionHook
from clipless.privacy._inspection import (
    WeightSeal,
    check_criterion,
    check_global_hooks,
    check_gradient_hooks,
    check_inputs,
    check_optimizer,
    check_precision,
    check_scaler,
    check_target,
    mark_used,
    used_for,
)
from clipless.privacy._ledger import Ledger
from clipless.privacy._loader import PrivateLoader
from clipless.privacy._mechanism import FullBatch
from clipless.privacy._noise import GaussianNoise
from clipless.privacy._plan import Plan, planned_parameters


@dataclass
class StepProgress:
    """How far the present step has come."""

    step: int
    micro_batches: int
    structure: tuple[Any, ...]
    seen: set[int] = field(default_factory=set)
    delivered: int = 0
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """The summed gradients so far, without noise, by the parameter's place in the plan."""


class TrainingSession:
    """Holds a model, its optimizer, loader and criterion to the plan."""

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: PrivateLoader,
        criterion: Loss,
        plan: Plan,
        ledger: Ledger,
        noise: GaussianNoise,
        meter: BudgetMeter | None,
        input_shape: Shape,
        projection: bool,
        grad_scaler: Any,
    ) -> None:
        self.model, self.optimizer, self.criterion = model, optimizer, criterion
        self.loader, self.plan, self.ledger, self.noise = loader, plan, ledger, noise
        self.steps_taken = 0
        self._meter, self._projection, self._scaler = meter, projection, grad_scaler
        self._input_shapes = input_shapes(input_shape)
        self._last_step = loader.next_step - 1
        self._progress: StepProgress | None = None
        self._inside_forward = False
        self._parameters = dict(model.named_parameters())
        self._trainable = [self._parameters[p.name] for p in plan.parameters]
        self._own_gradients: list[Tensor] = []
        self._delivering = threading.Lock()
        # Kept on the criterion, since another session may have changed it already.
        self._original_reduction: str = vars(criterion).setdefault(
            "_clipless_reduction", criterion.reduction
        )
        self._handles: list[Any] = []
        check_optimizer(optimizer, self._parameters)
        check_scaler(grad_scaler, optimizer)
        self._attach()
        self._structure = structure_of(model, numbers=True)
        self._deviations = list(plan.noise_deviations.values())
        self._seal = WeightSeal(model)
        self._followers: Followers | None = None
        if plan.queries:
            report = sensitivity(model, loss=criterion, input_shape=self._input_shapes)
            self._followers = Followers(model, report, plan.expected_batch_size)

    # --- attaching and detaching -----------------------------------------------------------------

    def _attach(self) -> None:
        model, criterion, optimizer = self.model, self.criterion, self.optimizer
        self._drop_gradients()  # of whatever came before
        set_loss_scale(model, 1 / self.plan.expected_batch_size)
        criterion.reduction = "none"
        keep = self._handles.append
        keep(model.register_forward_pre_hook(SessionHook(model, self._before_forward)))
        keep(model.register_forward_hook(SessionHook(model, self._after_forward), always_call=True))
        for module in model.modules():
            if module is not model and isinstance(module, ConstrainedModule):
                keep(module.register_forward_pre_hook(SessionHook(module, self._inner_call)))
        keep(criterion.register_forward_pre_hook(SessionHook(criterion, self._before_criterion)))
        keep(criterion.register_forward_hook(SessionHook(criterion, self._after_criterion)))
        keep(optimizer.register_step_pre_hook(SessionHook(optimizer, self._before_step)))
        keep(optimizer.register_step_post_hook(SessionHook(optimizer, self._after_step)))

    def detach(self) -> None:
        """Take all hooks off: model, criterion and optimizer are ordinary again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._progress = None
        self.criterion.reduction = self._original_reduction  # type: ignore[assignment]
        set_loss_scale(self.model, 1.0)

    @property
    def attached(self) -> bool:
        """Whether the hooks are on."""
        return bool(self._handles)

    def shares(self, *objects: object) -> bool:
        """Whether the session holds one of these objects."""
        mine = (self.model, self.optimizer, self.criterion, self.loader)
        return any(one is other for one in objects for other in mine)

    def set_noise_multiplier(self, noise_multiplier: float) -> None:
        """Use another amount of noise from the next step on."""
        if self._progress is not None:
            raise PrivacyError("a step is under way: change the noise between steps")
        if not self._projection and noise_multiplier != 0:
            raise PrivacyError("without projection there are no bounds to scale noise by")
        self.plan = replace(self.plan, noise_multiplier=float(noise_multiplier))
        self._deviations = list(self.plan.noise_deviations.values())

    @property
    def allows_scaling(self) -> bool:
        """Whether a known gradient scaler multiplies the loss."""
        return self._scaler is not None

    # --- the forward pass ------------------------------------------------------------------------

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if model.training:
            check_inputs(inputs, self._input_shapes)
            check_precision(inputs)
            check_global_hooks()
            self._check_weights()
            structure = structure_of(model, numbers=True)
            if structure != self._structure:
                self._adopt_structure(structure)
        self._inside_forward = True

    def _after_forward(self, model: nn.Module, inputs: Any, output: Any) -> Tensor | None:
        self._inside_forward = False
        if output is None or not torch.is_grad_enabled() or not model.training:
            return None
        if not isinstance(output, Tensor):
            raise PrivacyError(
                f"the model returned a {type(output).__name__} instead of a tensor, whose "
                "gradients cannot be held back. Return the output for the criterion alone."
            )
        sample = self._sample_behind(inputs)
        call = ForwardCall(session=self, output=output, sample=sample, structure=self._structure)
        return cut_off(call)

    def _sample_behind(self, inputs: tuple[Any, ...]) -> StepSample:
        """Tell which sample the inputs are: by their mark, or else the one drawn last."""
        marks = [mark for each in inputs if (mark := sample_of((each,)) or used_for(each))]
        if any(mark is not marks[0] for mark in marks):
            raise PrivacyError(
                "the model was called on tensors of several batches at once. Call it on what the "
                "private loader handed out together."
            )
        if marks:
            return marks[0]
        sample = self.loader.current
        if sample is None:
            raise PrivacyError(
                "the model was called in training mode before a batch was drawn from the private "
                "loader. Iterate over the loader that make_private returned; for anything but "
                "training use model.eval() or torch.no_grad()."
            )
        begun = self._last_step if self._progress is None else self._progress.step
        if sample.weights is not None and sample.step > begun + 1:
            self._count_skipped(sample.step - self._last_step)
            self._progress = None
            raise PrivacyError(
                "several batches were drawn since the last step, and the model's input was moved "
                "or transformed, so that nothing tells which of them it is and which of its rows "
                "are padding. Draw a batch, take its step, then draw the next. What was drawn is "
                "counted."
            )
        drawn = sample.step < self.loader.next_step  # and not set by hand as the current one
        if drawn and not isinstance(self.plan.sampling, FullBatch):  # always the same examples
            mark_used(inputs, sample)
        return sample

    def _inner_call(self, module: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling() or self._inside_forward:
            return
        if self.model.training and torch.is_grad_enabled():
            raise PrivacyError(
                f"{type(module).__name__} was called outside the model it is part of. Gradients "
                "must come through the whole model and the criterion: call the model itself, or "
                "use torch.no_grad() if this is not for training."
            )

    def _adopt_structure(self, structure: tuple[Any, ...]) -> None:
        """The model has changed since the plan was made: prove its bounds anew."""
        report = sensitivity(self.model, loss=self.criterion, input_shape=self._input_shapes)
        now = dict(self.model.named_parameters())
        if [(n, id(p)) for n, p in now.items()] != [
            (n, id(p)) for n, p in self._parameters.items()
        ]:
            raise PrivacyError(
                "parameters of the model were replaced by other tensors (a new layer, or "
                "load_state_dict(assign=True)). Call make_private again with an optimizer for the "
                "new ones; the ledger goes on from what is spent."
            )
        scale = 1 / self.plan.expected_batch_size
        for path, module in scaled_modules(self.model):
            if module.loss_scale != scale:
                raise PrivacyError(
                    f"{path}.loss_scale was changed to {module.loss_scale:g}. It is 1 over the "
                    f"expected batch size, {scale:g}, in private training; change `norm` or "
                    "`weight_clip` instead."
                )
        planned = [(p.name, p.size) for p in self.plan.parameters]
        if [(p.name, p.size) for p in planned_parameters(report)] != planned:
            raise PrivacyError(
                "the trainable parameters of the model are no longer those of the plan: layers "
                "were added, removed, frozen or unfrozen. Call make_private again; the ledger "
                "goes on from what is spent."
            )
        if planned_queries(self.model, report) != self.plan.queries:
            raise PrivacyError(
                "layers whose threshold follows a quantile were added or removed. Call "
                "make_private again; the ledger goes on from what is spent."
            )
        if any(p.dtype != self._trainable[0].dtype for p in self._trainable):
            raise PrivacyError("parameters changed their dtype. Call make_private again.")
        self.plan = self.plan.with_bounds(report)
        self._deviations = list(self.plan.noise_deviations.values())
        self._structure = structure

    def _check_weights(self) -> None:
        """Certify the weights again if somebody has edited or loaded them."""
        if self._projection and self._seal.broken():
            dtypes = {p.dtype for p in self._trainable}
            if dtypes - {torch.float32, torch.float64} or len(dtypes) > 1:
                raise PrivacyError(
                    f"parameters were converted to {', '.join(map(str, dtypes))}. The slack in "
                    "the sensitivities covers float32: convert them back, and call make_private."
                )
            certify(self.model)
            self._seal.renew()

    # --- the criterion ---------------------------------------------------------------------------

    def _before_criterion(self, criterion: Any, arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            return None
        if len(arguments) != 2:
            raise PrivacyError("call the private criterion as criterion(output, target)")
        if criterion.reduction != "none":
            raise PrivacyError(
                "the criterion's reduction was changed. In private training it sums over examples "
                "and divides by the public batch size: leave it alone."
            )
        check_criterion(criterion)
        call = call_of(arguments[0])
        if call is not None and call.session is not self and call.session.criterion is criterion:
            return None  # the output of another private model, which has a session of its own
        if call is None and not self.model.training:
            return None
        if call is None or call.session is not self:
            raise PrivacyError(
                "the private criterion was given something else than the output of the private "
                "model in training mode. Pass the model's output itself, unchanged: even a reshape "
                "could mix examples. For evaluation use torch.no_grad()."
            )
        check_target(arguments[1], call.sample)
        self._admit(call)
        return (tap(call), *arguments[1:])

    def _after_criterion(self, criterion: Any, arguments: Any, losses: Tensor) -> Tensor:
        call = call_of(arguments[0]) if torch.is_grad_enabled() else None
        if call is None and losses.ndim:
            return _reduce(losses, self._original_reduction)
        if call is None or call.session is not self:
            return losses
        assert self._progress is not None
        self._progress.seen.add(call.sample.micro_batch)
        call.through_criterion = True
        weights = call.sample.weights
        return public_mean(losses, None if weights is None else weights.to(losses), call)

    def _admit(self, call: ForwardCall) -> None:
        """Check that this pass is the next micro-batch of the present step."""
        sample, rows = call.sample, call.output.shape[0]
        if sample.step <= self._last_step:
            raise PrivacyError(
                "no new batch was drawn from the private loader since the last step, or an old "
                "one was used again. Iterate over the loader that make_private returned, one step "
                "for each batch."
            )
        if call.structure != self._structure:
            raise PrivacyError(
                "the model was changed and called again between this forward pass and its "
                "criterion; the noise would be that of another model. Change it between steps."
            )
        if self._progress is None or sample.step != self._progress.step:
            self._begin_step(sample)
        progress = self._progress
        assert progress is not None
        if sample.micro_batch in progress.seen or call.through_criterion:
            raise PrivacyError(
                "this batch went through the criterion before. Every sampled example may "
                "contribute once to a step: draw the next batch from the private loader."
            )
        if rows != sample.rows:
            raise PrivacyError(
                f"the batch drawn from the private loader has {sample.rows} rows, but "
                f"{rows} went through the model. Feed it whole and once: dropping, "
                "repeating or splitting examples changes what was sampled."
            )

    def _begin_step(self, sample: StepSample) -> None:
        self._count_skipped(sample.step - self._last_step - 1)
        self._require_budget()
        self._progress = StepProgress(sample.step, sample.micro_batches, self._structure)
        if self._followers is not None:
            self._followers.forget()

    def _count_skipped(self, count: int) -> None:
        """Steps that were drawn and never taken cost what they would have cost."""
        if count <= 0:
            return
        warnings.warn(
            f"{count} drawn batch(es) did not lead to a step of the optimizer. They are counted "
            "all the same, since skipping may depend on the data; their gradients are discarded. "
            "For several backward passes a step, use micro_batch_size.",
            stacklevel=2,
        )
        for _ in range(count):
            allowed = self._require_budget()
            self.ledger.spend(self.plan.mechanism, label="skipped step", limit=allowed)
            self._last_step += 1

    # --- the backward pass -----------------------------------------------------------------------

    def deliver(self, call: ForwardCall, cotangents: Tensor) -> None:
        """Run the backward pass of one forward pass, and keep the gradients."""
        progress = self._progress
        if progress is None or call.sample.step != progress.step:
            raise PrivacyError(
                "backward was called after the step it belongs to was taken, or after another "
                "batch was begun. Call backward before drawing the next batch."
            )
        if self._projection and self._seal.broken():
            raise PrivacyError(
                "weights were edited between the forward pass and its backward pass; the "
                "gradients would belong to neither. Edit them between steps."
            )
        check_gradient_hooks(self._trainable)
        if not self._delivering.acquire(blocking=False):
            raise PrivacyError(
                "two threads run backward at once, and their gradients would get mixed up. Run "
                "the backward passes of a step one after the other."
            )
        try:
            self._check_no_gradients()
            self._drop_gradients()
            torch.autograd.backward(call.output, cotangents, inputs=self._trainable)
            for index, parameter in enumerate(self._trainable):
                if parameter.grad is None:
                    continue
                known = progress.gradients.get(index)
                gradient = parameter.grad if known is None else known.add_(parameter.grad)
                progress.gradients[index] = gradient
            progress.delivered += 1
        finally:  # also if it was interrupted, nobody gets to see gradients without noise
            self._drop_gradients()
            call.output = call.output.detach()  # the graph behind it has done its work
            self._delivering.release()
        if self.allows_scaling:  # a scaler wants to see gradients; it may have these
            for parameter in self._trainable:
                parameter.grad = torch.zeros_like(parameter)
            self._remember_gradients()

    def _drop_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def _remember_gradients(self) -> None:
        self._own_gradients = [p.grad for p in self._parameters.values() if p.grad is not None]

    def _check_no_gradients(self) -> None:
        """All gradients there are were put there by this session."""
        own = set(map(id, self._own_gradients))
        if any(p.grad is not None and id(p.grad) not in own for p in self._parameters.values()):
            self._drop_gradients()
            raise PrivacyError(
                "a parameter has a gradient that did not come through the private criterion: "
                "another loss was differentiated, or `grad` was assigned. It was discarded. Only "
                "the private loss may be differentiated, and gradients cannot be edited."
            )

    # --- the optimizer step ----------------------------------------------------------------------

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        closure = kwargs.get("closure") if len(args) < 2 else args[1]
        if closure is not None:
            raise PrivacyError(
                "the optimizer was given a closure, which may evaluate the gradient any number of "
                "times in one step. Use an optimizer that steps on the gradients it finds."
            )
        progress = self._check_complete()
        check_optimizer(self.optimizer, self._parameters)
        self._check_no_gradients()
        if structure_of(self.model, numbers=True) != progress.structure:
            raise PrivacyError(
                "the model was changed between its forward pass and the optimizer's step; the "
                "gradients belong to another model. Change it between steps."
            )
        if self._projection and self._seal.broken():
            raise PrivacyError(
                "weights were edited between the backward pass and the optimizer's step. Edit "
                "them between steps, and do not step with another optimizer."
            )
        allowed = self._require_budget()
        self.ledger.spend(self.plan.mechanism, limit=allowed)
        self._last_step = progress.step
        self._release(progress)

    def _check_complete(self) -> StepProgress:
        progress = self._progress
        if progress is None and not self.model.training:
            self._drop_gradients()
            raise PrivacyError(
                "the optimizer was asked to step while the model is in evaluation mode, in which "
                "losses do not count and gradients have no noise; they were discarded. Call "
                "model.train() before the model, the criterion and backward."
            )
        if progress is None:
            raise PrivacyError(
                "the optimizer was asked to step without a batch: draw one from the private "
                "loader, then call the model, the criterion and backward, once each."
            )
        missing = progress.micro_batches - len(progress.seen)
        if missing:
            raise PrivacyError(
                f"{missing} of the {progress.micro_batches} micro-batches of this step have not "
                "gone through the criterion. Step once for every sample, after its last "
                "micro-batch (loader.current.is_last)."
            )
        if progress.delivered != progress.micro_batches:
            raise PrivacyError(
                f"backward was called for {progress.delivered} of the {progress.micro_batches} "
                "batches of this step. Call backward on every private loss, once."
            )
        return progress

    def _require_budget(self) -> int | None:
        if self._meter is None:
            return None
        try:
            return self._meter.require(self.plan.mechanism)
        except BudgetExhaustedError:
            self._progress = None
            raise

    @torch.no_grad()
    def _release(self, progress: StepProgress) -> None:
        """Give the optimizer the gradients, with their noise."""
        gradients = [
            progress.gradients.get(index, torch.zeros_like(parameter))
            for index, parameter in enumerate(self._trainable)
        ]
        followers = self._followers
        counts = [] if followers is None else followers.fractions(gradients[0].device)
        self.noise.add_([*gradients, *counts], self._deviations)
        if followers is not None:
            followers.move(counts)
        self._drop_gradients()
        for parameter, gradient in zip(self._trainable, gradients, strict=True):
            parameter.grad = gradient
        self._remember_gradients()
        self._progress = None

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._projection:
            project(self.model, include_frozen=False)
        self._seal.renew()
        self._inside_forward = False
        self.steps_taken += 1


def _reduce(losses: Tensor, reduction: str) -> Tensor:
    """The ordinary reduction, for evaluation."""
    if reduction == "none":
        return losses
    return losses.sum() / (max(losses.shape[0], 1) if reduction == "mean" else 1)
