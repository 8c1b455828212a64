"""One private training run in progress: the hooks, and the order in which things must happen.

A step is: a sample is drawn; each of its micro-batches goes through the model, the criterion and a
backward pass, once; then the optimizer steps, on gradients that got their noise just before, and
weights are projected just after. Anything else is refused, or counted as if it were a step.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from clipless.bounds import sensitivity
from clipless.bounds._structure import structure_of
from clipless.errors import BudgetExhaustedError, PrivacyError
from clipless.losses import Loss
from clipless.nn import ClipGradient, ConstrainedModule, certify, project
from clipless.privacy._batches import StepSample
from clipless.privacy._budget import BudgetMeter
from clipless.privacy._guards import ForwardCall, call_of, guard_output, public_mean, tap
from clipless.privacy._hooks import SessionHook
from clipless.privacy._ledger import Ledger
from clipless.privacy._loader import PrivateLoader
from clipless.privacy._noise import GaussianNoise
from clipless.privacy._plan import Plan, planned_parameters

# On devices where reading a value stalls, edited weights are looked for once in this many steps.
_TAMPER_INTERVAL = 64


@dataclass
class StepProgress:
    """How far the present step has come."""

    step: int
    micro_batches: int
    structure: tuple[Any, ...]
    seen: set[int] = field(default_factory=set)
    backwards: int = 0


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
        input_shape: Any,
        projection: bool,
        grad_scaler: Any,
    ) -> None:
        self.model, self.optimizer, self.criterion = model, optimizer, criterion
        self.loader, self.plan, self.ledger, self.noise = loader, plan, ledger, noise
        self.steps_taken = 0
        self._meter, self._projection, self._scaler = meter, projection, grad_scaler
        self._input_shape = input_shape
        self._last_step = loader.next_step - 1
        self._progress: StepProgress | None = None
        self._inside_forward = False
        self._parameters = dict(model.named_parameters())
        self._trainable = [self._parameters[p.name] for p in plan.parameters]
        self._accumulated = dict.fromkeys(map(id, self._trainable), 0)
        self._structure = structure_of(model, numbers=True)
        self._deviations = list(plan.noise_deviations.values())
        self._original_reduction = criterion.reduction
        self._handles: list[Any] = []
        self._norms = self._weight_norms()
        self._attach()

    # --- attaching and detaching -----------------------------------------------------------------

    def _attach(self) -> None:
        model, criterion, optimizer = self.model, self.criterion, self.optimizer
        for module in model.modules():
            if isinstance(module, ClipGradient):
                module.loss_scale = 1 / self.plan.expected_batch_size
        self._structure = structure_of(model, numbers=True)
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
        for parameter in self._trainable:
            hook = SessionHook(parameter, self._gradient_arrived)
            keep(parameter.register_post_accumulate_grad_hook(hook))

    def detach(self) -> None:
        """Take all hooks off: model, criterion and optimizer are ordinary again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.criterion.reduction = self._original_reduction
        for module in self.model.modules():
            if isinstance(module, ClipGradient):
                module.loss_scale = 1.0

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
            self._check_weights()
            structure = structure_of(model, numbers=True)
            if structure != self._structure:
                self._adopt_structure(structure)
        self._inside_forward = True

    def _after_forward(self, model: nn.Module, inputs: Any, output: Any) -> Tensor | None:
        if not torch.is_grad_enabled():
            return None
        self._inside_forward = False
        if not isinstance(output, Tensor):
            return None
        call = ForwardCall(session=self, training=model.training, rows=output.shape[0])
        return guard_output(output, call)

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
        scale = 1 / self.plan.expected_batch_size
        for path, module in self.model.named_modules():
            if isinstance(module, ClipGradient) and module.loss_scale != scale:
                raise PrivacyError(
                    f"{path}.loss_scale was changed to {module.loss_scale:g}. It is 1 over the "
                    f"expected batch size, {scale:g}, in private training; change `norm` instead."
                )
        report = sensitivity(self.model, loss=self.criterion, input_shape=self._input_shape)
        planned = [(p.name, p.size) for p in self.plan.parameters]
        if [(p.name, p.size) for p in planned_parameters(report)] != planned:
            raise PrivacyError(
                "the trainable parameters of the model are no longer those of the plan: layers "
                "were added, removed, frozen or unfrozen. Call make_private again; the ledger "
                "goes on from what is spent."
            )
        self.plan = self.plan.with_bounds(report)
        self._deviations = list(self.plan.noise_deviations.values())
        self._structure = structure

    # --- the criterion ---------------------------------------------------------------------------

    def _before_criterion(self, criterion: nn.Module, arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            return None
        if len(arguments) != 2:
            raise PrivacyError("call the private criterion as criterion(output, target)")
        call = call_of(arguments[0])
        if call is None or call.session is not self:
            raise PrivacyError(
                "the private criterion was given something else than the output of the private "
                "model. Pass the model's output itself, unchanged: even a reshape could mix "
                "examples. For evaluation use torch.no_grad()."
            )
        if not call.training:
            return None
        self._begin(call)
        return (tap(arguments[0], call), *arguments[1:])

    def _after_criterion(self, criterion: nn.Module, arguments: Any, losses: Tensor) -> Tensor:
        call = call_of(arguments[0]) if torch.is_grad_enabled() else None
        if call is None or not call.training:
            return _reduce(losses, self._original_reduction)
        sample = self._sample()
        return public_mean(losses, sample.weights, call)

    def _begin(self, call: ForwardCall) -> None:
        """Check that this pass is the next micro-batch of the present step, and note it."""
        sample = self._sample()
        if self._progress is None or sample.step != self._progress.step:
            self._begin_step(sample)
        progress = self._progress
        assert progress is not None
        if sample.micro_batch in progress.seen or call.through_criterion:
            raise PrivacyError(
                "this batch went through the criterion before. Every sampled example may "
                "contribute once to a step: draw the next batch from the private loader."
            )
        if call.rows != sample.rows:
            raise PrivacyError(
                f"the batch drawn from the private loader has {sample.rows} rows, but "
                f"{call.rows} went through the model. Feed it whole and once: dropping, "
                "repeating or splitting examples changes what was sampled."
            )
        progress.seen.add(sample.micro_batch)
        call.through_criterion = True

    def _sample(self) -> StepSample:
        sample = self.loader.current
        if sample is None or sample.step <= self._last_step:
            raise PrivacyError(
                "no new batch was drawn from the private loader since the last step. Iterate "
                "over the loader that make_private returned, one step for each batch."
            )
        return sample

    def _begin_step(self, sample: StepSample) -> None:
        first = self._last_step + 1
        if self._progress is None and any(self._accumulated.values()):
            raise PrivacyError(
                "gradients have arrived that did not come through the criterion, before it was "
                "called for this batch. Only the private loss may be differentiated."
            )
        self._count_skipped(sample.step - first)
        self._require_budget()
        self._clear_gradients()
        self._progress = StepProgress(sample.step, sample.micro_batches, self._structure)

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

    def _clear_gradients(self) -> None:
        self._accumulated = dict.fromkeys(self._accumulated, 0)
        for parameter in self._trainable:
            parameter.grad = None

    # --- the backward pass -----------------------------------------------------------------------

    def backward_done(self, call: ForwardCall) -> None:
        """Note that the cotangents of one forward pass have been handed to the model."""
        if self._progress is None:
            raise PrivacyError("backward was called after the step it belongs to was taken")
        self._progress.backwards += 1

    def _gradient_arrived(self, parameter: Tensor) -> None:
        self._accumulated[id(parameter)] += 1

    # --- the optimizer step ----------------------------------------------------------------------

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        closure = kwargs.get("closure") if len(args) < 2 else args[1]
        if closure is not None:
            raise PrivacyError(
                "the optimizer was given a closure, which may evaluate the gradient any number of "
                "times in one step. Use an optimizer that steps on the gradients it finds."
            )
        progress = self._check_complete()
        self._check_optimizer()
        if structure_of(self.model, numbers=True) != progress.structure:
            raise PrivacyError(
                "the model was changed between its forward pass and the optimizer's step; the "
                "gradients belong to another model. Change it between steps."
            )
        allowed = self._require_budget()
        self.ledger.spend(self.plan.mechanism, limit=allowed)
        self._last_step = progress.step
        self._add_noise()

    def _check_complete(self) -> StepProgress:
        progress = self._progress
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
        if progress.backwards != progress.micro_batches:
            raise PrivacyError(
                f"backward was called for {progress.backwards} of the {progress.micro_batches} "
                "batches of this step. Call backward on every private loss, once."
            )
        if any(count > progress.backwards for count in self._accumulated.values()):
            raise PrivacyError(
                "a parameter received more gradients than there were private losses: another loss "
                "was differentiated as well. Only the private criterion may be."
            )
        return progress

    def _check_optimizer(self) -> None:
        held = [id(p) for group in self.optimizer.param_groups for p in group["params"]]
        if set(held) - {id(p) for p in self._parameters.values()}:
            raise PrivacyError(
                "the optimizer holds parameters that are not the model's. Their gradients have no "
                "bound: give them an optimizer of their own."
            )
        lacking = [n for n, p in self._parameters.items() if p.requires_grad and id(p) not in held]
        if lacking:
            raise PrivacyError(
                f"the optimizer lacks trainable parameters of the model: {', '.join(lacking)}. "
                "Add them, or freeze them with requires_grad_(False) before make_private."
            )
        if any(p._backward_hooks for p in self._trainable):
            raise PrivacyError("a parameter carries a gradient hook, which could change gradients")

    def _require_budget(self) -> int | None:
        if self._meter is None:
            return None
        try:
            return self._meter.require(self.plan.mechanism)
        except BudgetExhaustedError:
            self._progress = None
            self._clear_gradients()
            raise

    @torch.no_grad()
    def _add_noise(self) -> None:
        for parameter in self._trainable:
            if parameter.grad is None:  # it took no part in the forward pass, but is released
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in self._trainable if p.grad is not None]
        if self._scaler is not None and self._scaler.is_enabled():
            # The guards ignore the scale of the loss; what the scaler divided by is put back.
            torch._foreach_mul_(gradients, self._scaler._scale.to(gradients[0].device))
        self.noise.add_(gradients, self._deviations)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._projection:
            project(self.model)
        self._norms = self._weight_norms()
        self._progress = None
        self._accumulated = dict.fromkeys(self._accumulated, 0)
        self.steps_taken += 1

    # --- weights from elsewhere ------------------------------------------------------------------

    @torch.no_grad()
    def _weight_norms(self) -> Tensor:
        """A checksum of all parameters, cheap enough to take at every step."""
        norms = torch._foreach_norm(list(self._parameters.values()))
        return torch.stack([norm.double() for norm in norms])

    def _check_weights(self) -> None:
        """Certify the weights again if somebody has edited or loaded them."""
        if not self._projection:
            return
        on_cpu = self._norms.device.type == "cpu"
        if not on_cpu and self.steps_taken % _TAMPER_INTERVAL:
            return
        norms = self._weight_norms()
        if not torch.equal(norms, self._norms):
            certify(self.model)
            self._norms = norms


def _reduce(losses: Tensor, reduction: str) -> Tensor:
    """The ordinary reduction, for evaluation."""
    if reduction == "none":
        return losses
    return losses.sum() / (max(losses.shape[0], 1) if reduction == "mean" else 1)
