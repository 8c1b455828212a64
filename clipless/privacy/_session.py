"""One private training run in progress: the hooks, and the order in which things must happen.

A step is: a sample is drawn; each of its micro-batches goes through the model, the criterion and a
backward pass, once; then the optimizer steps. Gradients are kept by the session until then: what
the optimizer finds in `parameter.grad` has its noise already. After the step, weights are
projected. Anything else is refused, or counted as if it were a step.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from clipless.bounds import sensitivity
from clipless.bounds._sensitivity import Shape, input_shapes
from clipless.errors import PrivacyError
from clipless.losses import Loss
from clipless.nn import ConstrainedModule
from clipless.nn._base import set_loss_scale
from clipless.privacy import _refusals as refusals
from clipless.privacy._batches import StepSample
from clipless.privacy._budget import BudgetMeter
from clipless.privacy._changes import check_same_model
from clipless.privacy._compiled_calls import CompiledCalls
from clipless.privacy._distributed_sharded import uncovered, whole
from clipless.privacy._distributed_sharded_team import refuse_compiled
from clipless.privacy._distributed_team import Team, meeting
from clipless.privacy._following import Followers
from clipless.privacy._gradients import Gradients
from clipless.privacy._guards import (
    ForwardCall,
    call_of,
    cut_off,
    plain_reduction,
    public_mean,
    tap,
)
from clipless.privacy._hooks import SessionHook
from clipless.privacy._inspection import (
    check_criterion_call,
    check_global_hooks,
    check_gradient_hooks,
    check_inputs,
    check_no_closure,
    check_optimizer,
    check_output,
    check_precision,
    check_scaler,
    check_target,
    mark_used,
    marked_sample,
    weights_on,
)
from clipless.privacy._ledger import Ledger
from clipless.privacy._loader import PrivateLoader
from clipless.privacy._mechanism import FullBatch
from clipless.privacy._model_guard import ModelGuard
from clipless.privacy._noise import GaussianNoise
from clipless.privacy._plan import Plan
from clipless.privacy._precision import arithmetic_slack
from clipless.privacy._recorded import Pull
from clipless.privacy._step import StepProgress, step_without_batch
from clipless.privacy._step_book import StepBook


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
        team: Team | None = None,
    ) -> None:
        self.team = team
        self.model, self.optimizer, self.criterion = model, optimizer, criterion
        self.loader, self.plan, self.ledger, self.noise = loader, plan, ledger, noise
        self.steps_taken = 0
        self._projection, self._scaler = projection, grad_scaler
        self._input_shapes = input_shapes(input_shape)
        self._book = StepBook(ledger, meter, last_step=loader.next_step - 1)
        self._inside_forward = False
        self._parameters = dict(model.named_parameters())
        self._trainable = [self._parameters[p.name] for p in plan.parameters]
        sharded = team is not None and team.sharded
        self._gradients = Gradients(self._parameters, self._trainable, sharded=sharded)
        self._delivering = threading.Lock()
        # Kept on the criterion, since another session may have changed it already.
        self._original_reduction: str = vars(criterion).setdefault(
            "_clipless_reduction", criterion.reduction
        )
        self._handles: list[Any] = []
        check_optimizer(optimizer, self._parameters)
        check_scaler(grad_scaler, optimizer)
        self._compiled: CompiledCalls | None = None
        self._attach()
        self._guard = ModelGuard(
            model, self._trainable, precision=plan.precision, projection=projection,
            team=team,
        )  # fmt: skip
        self._structure = self._guard.structure()
        self._deviations = list(plan.noise_deviations.values())
        self._followers: Followers | None = None
        if plan.queries:
            with whole(model):
                report = sensitivity(model, loss=criterion, input_shape=self._input_shapes)
            self._followers = Followers(model, report, plan.loss_divisor)

    # --- attaching and detaching -----------------------------------------------------------------

    def _attach(self) -> None:
        model, criterion, optimizer = self.model, self.criterion, self.optimizer
        self._gradients.drop()  # of whatever came before
        with uncovered(model):
            set_loss_scale(model, 1 / self.plan.loss_divisor)
        criterion.reduction = "none"
        keep = self._handles.append
        first = self.team is not None  # before parameters are brought together
        hook = SessionHook(model, self._before_forward)
        keep(model.register_forward_pre_hook(hook, prepend=first))
        keep(model.register_forward_hook(SessionHook(model, self._after_forward), always_call=True))
        for module in model.modules():
            if module is not model and isinstance(module, ConstrainedModule):
                hook = SessionHook(module, self._inner_call, inside=True)
                keep(module.register_forward_pre_hook(hook))
        keep(criterion.register_forward_pre_hook(SessionHook(criterion, self._before_criterion)))
        keep(criterion.register_forward_hook(SessionHook(criterion, self._after_criterion)))
        keep(optimizer.register_step_pre_hook(SessionHook(optimizer, self._before_step)))
        keep(optimizer.register_step_post_hook(SessionHook(optimizer, self._after_step)))
        if self.team is not None:
            hook = SessionHook(optimizer, self.team.before_state_dict)
            keep(optimizer.register_state_dict_pre_hook(hook))

    def detach(self) -> None:
        """Take all hooks off: model, criterion and optimizer are ordinary again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self.team is not None:
            self.team.leave()
        if self._compiled is not None:
            self._compiled.remove()
            self._compiled = None
        self._book.progress = None
        self.criterion.reduction = self._original_reduction  # type: ignore[assignment]
        with uncovered(self.model):
            set_loss_scale(self.model, 1.0)

    def compile(self, *, backend: str, mode: str | None) -> None:
        """Compile forward and backward pass, and on a GPU the criterion and the projection."""
        refuse_compiled(self.team)
        if self._book.progress is not None:
            raise PrivacyError("a step is under way: compile between steps")
        if self._compiled is not None:
            self._compiled.remove()
        self._compiled = CompiledCalls(self, backend=backend, mode=mode)
        self._guard.compile(backend=backend)
        self._structure = self._guard.structure()

    @property
    def compiled(self) -> bool:
        """Whether the model runs compiled."""
        return self._compiled is not None and self._compiled.works

    @property
    def uses_graphs(self) -> bool:
        """Whether the model's passes are launched as CUDA graphs."""
        return self._compiled is not None and self._compiled.uses_graphs

    @property
    def on_cuda(self) -> bool:
        """Whether the whole model is on a CUDA device."""
        return all(parameter.is_cuda for parameter in self._trainable)

    @property
    def on_accelerator(self) -> bool:
        """Whether the model is on a device that should not be waited for."""
        return any(parameter.device.type != "cpu" for parameter in self._trainable)

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
        if self._book.progress is not None:
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
            check_precision(inputs, self.plan.precision)
            check_global_hooks()
            if self.team is not None:
                self.team.check_forward()
            self._guard.certify_edits()
            structure = self._guard.structure()
            if structure != self._structure:
                self._adopt_structure(structure)
            if not self.compiled:  # compiled code casts by itself
                self._guard.begin_casts()
        self._inside_forward = True

    def _after_forward(
        self, model: nn.Module, inputs: Any, output: Any, pull: Pull | None = None
    ) -> Tensor | None:
        self._inside_forward = False
        self._guard.end_casts()
        if output is None or not torch.is_grad_enabled() or not model.training:
            return None
        check_output(output)
        sample = self._sample_behind(inputs)
        call = ForwardCall(
            session=self, output=output, pull=pull, sample=sample, structure=self._structure
        )  # fmt: skip
        return cut_off(call)

    def _sample_behind(self, inputs: tuple[Any, ...]) -> StepSample:
        """Tell which sample the inputs are: by their mark, or else the one drawn last."""
        marked = marked_sample(inputs)
        if marked is not None:
            return marked
        sample = self.loader.current
        if sample is None:
            raise refusals.no_batch_drawn()
        begun = self._book.last_step if self._book.progress is None else self._book.progress.step
        if sample.weights is not None and sample.step > begun + 1:
            self._book.count_skipped(sample.step - self._book.last_step, self.plan.mechanism)
            self._book.progress = None
            raise refusals.several_batches_drawn()
        drawn = sample.step < self.loader.next_step  # and not set by hand as the current one
        if drawn and not isinstance(self.plan.sampling, FullBatch):  # always the same examples
            mark_used(inputs, sample)
        return sample

    def _inner_call(self, module: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling() or self._inside_forward:
            return
        if self.model.training and torch.is_grad_enabled():
            raise refusals.layer_called_alone(module)

    def _adopt_structure(self, structure: tuple[Any, ...]) -> None:
        """The model has changed since the plan was made: prove its bounds anew."""
        with whole(self.model):
            report = sensitivity(self.model, loss=self.criterion, input_shape=self._input_shapes)
        with uncovered(self.model):
            check_same_model(self.model, report, self.plan, self._parameters, self._trainable)
            slack = arithmetic_slack(
                self._trainable[0].dtype, precision=self.plan.precision, model=self.model,
                report=report,
            )  # fmt: skip
        self.plan = replace(self.plan.with_bounds(report), arithmetic_slack=slack)
        self._deviations = list(self.plan.noise_deviations.values())
        self._structure = structure
        self._guard.prepare()

    # --- the criterion ---------------------------------------------------------------------------

    def _before_criterion(self, criterion: Any, arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            return None
        check_criterion_call(criterion, arguments)
        call = call_of(arguments[0])
        if call is not None and call.session is not self and call.session.criterion is criterion:
            return None  # the output of another private model, which has a session of its own
        if call is None and not self.model.training:
            return None
        return (tap(self._enter_criterion(criterion, arguments)), *arguments[1:])

    def _enter_criterion(self, criterion: Any, arguments: Any) -> ForwardCall:
        """Check that the criterion is called as it must be, on the next micro-batch of the step."""
        check_criterion_call(criterion, arguments)
        call = call_of(arguments[0])
        if call is None or call.session is not self:
            raise refusals.not_the_output()
        check_target(arguments[1], call.sample)
        self._admit(call)
        return call

    def _after_criterion(self, criterion: Any, arguments: Any, losses: Tensor) -> Tensor:
        call = call_of(arguments[0]) if torch.is_grad_enabled() else None
        if call is None and losses.ndim:
            return plain_reduction(losses, self._original_reduction)
        if call is None or call.session is not self:
            return losses
        self._leave_criterion(call)
        weights = weights_on(call.sample, losses.device)
        return public_mean(losses, None if weights is None else weights.to(losses), call)

    def _leave_criterion(self, call: ForwardCall) -> None:
        """Note that this micro-batch has been through."""
        assert self._book.progress is not None
        self._book.progress.seen.add(call.sample.micro_batch)
        call.through_criterion = True

    def _admit(self, call: ForwardCall) -> None:
        """Check that this pass is the next micro-batch of the present step."""
        sample = call.sample
        if sample.step <= self._book.last_step:
            raise refusals.no_new_batch()
        if call.structure != self._structure:
            raise refusals.model_changed_meanwhile()
        if self._book.progress is None or sample.step != self._book.progress.step:
            self._begin_step(sample)
        assert self._book.progress is not None
        self._book.progress.check_next(call)

    def _begin_step(self, sample: StepSample) -> None:
        self._book.begin(sample, self._structure, self.plan.mechanism)
        if self._followers is not None:
            self._followers.forget()

    # --- the backward pass -----------------------------------------------------------------------

    def deliver(self, call: ForwardCall, cotangents: Tensor) -> None:
        """Run the backward pass of one forward pass, and keep the gradients."""
        progress = self._book.progress
        if progress is None or call.sample.step != progress.step:
            raise refusals.backward_too_late()
        if self._guard.touched():
            raise refusals.edited_before_backward()
        check_gradient_hooks(self._trainable)
        if not self._delivering.acquire(blocking=False):
            raise refusals.two_threads()
        try:
            self._gradients.check_own()
            self._gradients.add_backward(call.output, call.pull, cotangents, progress.gradients)
            progress.delivered += 1
        finally:
            # What is behind the output has done its work.
            call.output, call.pull = call.output.detach(), None
            self._delivering.release()
        if self.allows_scaling:  # a scaler wants to see gradients; it may have these
            self._gradients.put([torch.zeros_like(parameter) for parameter in self._trainable])

    # --- the optimizer step ----------------------------------------------------------------------

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        with meeting(self):
            progress = self._account_for_step(args, kwargs)
        self._release(progress)

    def _account_for_step(self, args: Any, kwargs: Any) -> StepProgress:
        """Check that the step may be taken, and write it down."""
        check_no_closure(args, kwargs)
        progress = self._check_complete()
        check_optimizer(self.optimizer, self._parameters)
        self._gradients.check_own()
        if self._guard.structure() != progress.structure:
            raise refusals.changed_before_step()
        if self._guard.edited():
            raise refusals.edited_before_step()
        self._book.pay(progress, self.plan.mechanism)
        return progress

    def _check_complete(self) -> StepProgress:
        progress = self._book.progress
        if progress is None:
            if not self.model.training:
                self._gradients.drop()
            raise step_without_batch(training=self.model.training)
        progress.check_complete()
        return progress

    @torch.no_grad()
    def _release(self, progress: StepProgress) -> None:
        """Give the optimizer the gradients, with their noise."""
        found = progress.gradients
        gradients = [
            found[index] if index in found else torch.zeros_like(parameter)
            for index, parameter in enumerate(self._trainable)
        ]
        followers = self._followers
        counts = [] if followers is None else followers.fractions(gradients[0].device)
        self._book.progress = None
        if self.team is not None:
            self._gradients.put(
                self.team.release(gradients, counts, self.noise, self._deviations)
            )  # fmt: skip
            return
        self.noise.add_([*gradients, *counts], self._deviations)
        if followers is not None:
            followers.move(counts)
        self._gradients.put(gradients)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._guard.project()
        if self.team is not None and self._followers is not None:
            self._followers.move(self.team.counts)
        self._inside_forward = False
        self.steps_taken += 1
