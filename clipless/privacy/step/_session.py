"""One private training run in progress: the hooks, and the order in which things must happen.

A step is: a sample is drawn; each of its micro-batches goes through the model, the criterion and a
backward pass, once; then the optimizer steps. Gradients are kept by the session until then: what
the optimizer finds in `parameter.grad` has its noise already. After the step, weights are
projected. Anything else is refused, or counted as if it were a step.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from clipless.accounting import FullBatch
from clipless.bounds import (
    SensitivityReport,
    Shape,
    TracedModel,
    input_shapes,
    prove_bounds,
    traced_model,
)
from clipless.common import not_set_error
from clipless.distributed import Team, meeting, refuse_compiled, uncovered, whole
from clipless.errors import PrivacyError
from clipless.ledger import Budget, BudgetMeter, Ledger
from clipless.losses import Loss
from clipless.nn import ConstrainedModule, set_loss_scale
from clipless.privacy._noise import GaussianNoise
from clipless.privacy._plan import Plan
from clipless.privacy._precision import arithmetic_slack
from clipless.privacy._quantile_thresholds import QuantileThresholds
from clipless.privacy.compiled._calls import CompiledCalls
from clipless.privacy.compiled._recorded import Pull
from clipless.privacy.sampling._batches import StepSample
from clipless.privacy.sampling._loader import PrivateLoader
from clipless.privacy.step import _refusals as refusals
from clipless.privacy.step import _sessions as sessions
from clipless.privacy.step._changes import check_same_model
from clipless.privacy.step._checks import (
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
from clipless.privacy.step._enforcement import Enforcement
from clipless.privacy.step._gradients import Gradients, without_autocast
from clipless.privacy.step._hooks import SessionHook
from clipless.privacy.step._noise import Outcomes
from clipless.privacy.step._output_guard import (
    ForwardCall,
    call_of,
    cut_off,
    plain_reduction,
    public_mean,
    tap,
)
from clipless.privacy.step._progress import StepProgress, step_without_batch
from clipless.privacy.step._projection import ModelGuard
from clipless.privacy.step._row_trial import RowTrial
from clipless.privacy.step._step_ledger import StepBook


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
        input_shape: Shape,
        report: SensitivityReport,
        projection: bool,
        grad_scaler: Any,
        team: Team | None = None,
    ) -> None:
        self.team = team
        self.model, self.optimizer, self.criterion = model, optimizer, criterion
        self.loader, self.plan, self.ledger, self.noise = loader, plan, ledger, noise
        self.outcomes = Outcomes(self)
        self.steps_taken = 0
        self._projection, self._scaler = projection, grad_scaler
        self._input_shapes = input_shapes(input_shape)
        self._book = StepBook(ledger, _meter(plan, ledger), last_step=loader.next_step - 1)
        self._inside_forward, self._thread = False, threading.current_thread()
        self._parameters = dict(model.named_parameters())
        self._trainable = [self._parameters[p.name] for p in plan.parameters]
        sharded = team is not None and team.sharded
        self._gradients = Gradients(self._parameters, self._trainable)
        self.enforcement = Enforcement(model, self._trainable, sharded=sharded)
        self._pass = contextlib.ExitStack()
        """What holds for as long as a forward pass runs."""
        self.trial = RowTrial(self)
        self._delivering = threading.Lock()
        # Kept on the criterion, since another session may have changed it already.
        self._original_reduction: str = vars(criterion).get(
            "_clipless_reduction", criterion.reduction
        )
        self.over: str | None = None
        """Why nothing can be trained any more, if so."""
        self._handles: list[tuple[object, Any]] = []
        check_optimizer(optimizer, self._parameters)
        check_scaler(grad_scaler, optimizer)
        self._compiled: CompiledCalls | None = None
        self._guard = ModelGuard(
            model, self._trainable, precision=plan.precision, projection=projection,
            team=team,
        )  # fmt: skip
        self._graph: TracedModel | None = None
        self._hold_to(plan, report)
        self._followers = (
            QuantileThresholds(model, report, plan.loss_divisor) if plan.queries else None
        )  # fmt: skip

    # --- attaching and detaching -----------------------------------------------------------------

    def attach(self, **sampling: Any) -> None:
        """Take over loader, model, optimizer and criterion. Until here nothing was changed.

        `sampling` says how the loader begins: see `PrivateLoader.begin`.
        """
        self.loader.begin(self, **sampling)
        self._book.last_step = self.loader.next_step - 1
        with sessions.CHANGING:
            sessions.take_over(self)
            self._put_hooks_on()
            sessions.attached(self)
        self._guard.begin()

    def _put_hooks_on(self) -> None:
        model, criterion, optimizer = self.model, self.criterion, self.optimizer
        self._gradients.drop()  # of whatever came before
        self._set_loss_scale(1 / self.plan.loss_divisor)
        vars(criterion)["_clipless_reduction"] = self._original_reduction
        criterion.reduction = "none"
        first = self.team is not None  # before parameters are brought together
        hook = self._hook(model, self._before_forward, self._refuse_forward)
        self._keep(model, model.register_forward_pre_hook(hook, prepend=first))
        hook = self._hook(model, self._after_forward)
        self._keep(model, model.register_forward_hook(hook, always_call=True))
        for module in model.modules():
            if module is not model and isinstance(module, ConstrainedModule):
                hook = self._hook(module, self._inner_call, self._refuse_forward, inside=True)
                self._keep(module, module.register_forward_pre_hook(hook))
        hook = self._hook(criterion, self._before_criterion, self._refuse_criterion)
        self._keep(criterion, criterion.register_forward_pre_hook(hook))
        hook = self._hook(criterion, self._after_criterion, self._after_criterion)
        self._keep(criterion, criterion.register_forward_hook(hook))
        hook = self._hook(optimizer, self._before_step, self._refuse_step)
        self._keep(optimizer, optimizer.register_step_pre_hook(hook))
        hook = self._hook(optimizer, self._after_step)
        self._keep(optimizer, optimizer.register_step_post_hook(hook))
        if self.team is not None:
            hook = self._hook(optimizer, self.team.before_state_dict)
            self._keep(optimizer, optimizer.register_state_dict_pre_hook(hook))

    def _keep(self, owner: object, handle: Any) -> None:
        self._handles.append((owner, handle))

    def _hook(
        self, owner: object, action: Any, when_over: Any = None, *, inside: bool = False
    ) -> SessionHook:
        """A hook that does one thing while the session trains, and another when it is over."""

        def act(*arguments: Any) -> Any:
            chosen = action if self.over is None else when_over
            return None if chosen is None else chosen(*arguments)

        return SessionHook(owner, act, inside=inside)

    def _refuse_forward(self, module: nn.Module, inputs: Any) -> None:
        if module.training and torch.is_grad_enabled():
            raise refusals.session_over("the model", self.over)

    def _refuse_criterion(self, criterion: Any, arguments: Any) -> None:
        call = call_of(arguments[0]) if arguments else None
        own = call is None or call.session is self  # a criterion may serve several sessions
        if own and self.model.training and torch.is_grad_enabled():
            raise refusals.session_over("the criterion", self.over)

    def _refuse_step(self, *arguments: Any) -> None:
        raise refusals.session_over("the optimizer", self.over)

    def require_live(self) -> None:
        """Refuse to change a session that is over."""
        if self.over is not None:
            raise refusals.session_over("the session", self.over)

    def end(self, reason: str) -> None:
        """Train no more. The hooks stay where they are, and refuse."""
        if self.over is None:
            self.over = reason
            self._book.progress = None
            self._pass.close()  # a pass that was interrupted
            self._remove_compiled()
            self.loader.end(reason)

    def replace_by(self, session: TrainingSession) -> None:
        """End, and give what both sessions hold to the other one."""
        self.end("another make_private has taken over its model, its parameters or its optimizer")
        taken = sessions.owned_by(session)
        kept = []
        for owner, handle in self._handles:
            if id(owner) in taken:
                handle.remove()
            else:
                kept.append((owner, handle))
        self._handles = kept
        if not kept:
            sessions.detached(self)

    def detach(self) -> None:
        """Take all hooks off: model, criterion, optimizer and loader are ordinary again."""
        with sessions.CHANGING:
            self._take_hooks_off()

    def _take_hooks_off(self) -> None:
        self.end("it was detached")
        held = {id(owner) for owner, _ in self._handles}
        for _, handle in self._handles:
            handle.remove()
        self._handles.clear()
        sessions.detached(self)
        self.loader.let_go(self)
        if self.team is not None:
            self.team.leave()
        shared = any(other.criterion is self.criterion for other in sessions.all_attached())
        if id(self.criterion) in held and not shared:
            self.criterion.reduction = self._original_reduction  # type: ignore[assignment]
            vars(self.criterion).pop("_clipless_reduction", None)
        if id(self.model) in held:
            self._set_loss_scale(1.0)
            for other in sessions.all_attached():  # which may train a part of this model
                if other.over is None:
                    other._set_loss_scale(1 / other.plan.loss_divisor)

    def _set_loss_scale(self, scale: float) -> None:
        with uncovered(self.model):
            set_loss_scale(self.model, scale)

    def _remove_compiled(self) -> None:
        if self._compiled is not None:
            self._compiled.remove()
            self._compiled = None

    def compile(self, *, backend: str, mode: str | None) -> None:
        """Compile forward and backward pass, and on a GPU the criterion and the projection."""
        self.require_live()
        refuse_compiled(self.team)
        if self._book.progress is not None:
            raise PrivacyError("a step is under way: compile between steps")
        if self._guard.changed():
            self._adopt_changes()
        self._remove_compiled()
        self._compiled = CompiledCalls(self, backend=backend, mode=mode)
        self._guard.compile(backend=backend)
        self._guard.accept()

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

    def set_noise_multiplier(self, noise_multiplier: float) -> None:
        """Use another amount of noise from the next step on."""
        self.require_live()
        if self._book.progress is not None:
            raise PrivacyError("a step is under way: change the noise between steps")
        if not self._projection and noise_multiplier != 0:
            raise PrivacyError("without projection there are no bounds to scale noise by")
        changed = noise_multiplier != self.plan.noise_multiplier
        if changed and self.ledger.filter is None and self.ledger.releases:
            raise refusals.noise_chosen_after_looking()
        self.plan = replace(self.plan, noise_multiplier=float(noise_multiplier))

    def casts(self) -> contextlib.AbstractContextManager[object]:
        """Let the model compute in the precision of the plan."""
        if self.plan.precision != "bfloat16":
            return contextlib.nullcontext()
        return torch.autocast(self._trainable[0].device.type, dtype=torch.bfloat16)

    @property
    def may_be_tried(self) -> bool:
        """Whether the model can run for itself now: between steps, and with whole parameters."""
        return self._book.progress is None and not (self.team is not None and self.team.sharded)

    def _hold_to(self, plan: Plan, report: SensitivityReport) -> None:
        """Scale noise by the bounds of a plan, and hold every gradient to them."""
        self.plan = plan
        self.enforcement.adopt(report, plan)

    @property
    def allows_scaling(self) -> bool:
        """Whether a known gradient scaler multiplies the loss."""
        return self._scaler is not None

    # --- the forward pass ------------------------------------------------------------------------

    def _before_forward(
        self, model: nn.Module, inputs: Any, run: Callable[..., Any] | None = None
    ) -> None:
        """Prepare a forward pass; `run` is how it is run, unless by the model itself."""
        if self._runs_elsewhere():
            raise refusals.two_threads()
        self._pass.close()  # a pass that was interrupted
        if not torch.is_grad_enabled():
            return
        if model.training:
            check_inputs(inputs, self._input_shapes)
            check_precision(inputs, self.plan.precision)
            check_global_hooks()
            if self.team is not None:
                self.team.check_forward()
            self._guard.certify_edits()
            if self._guard.changed():
                self._adopt_changes()
            if not self.compiled:  # compiled code casts by itself
                self._pass.enter_context(self.casts())
            self._pass.enter_context(self.enforcement.stand_in())
        self._inside_forward, self._thread = True, threading.current_thread()
        self._pass.callback(self._leave_forward)
        if model.training:
            if self.trial.hold(inputs, run):
                self.enforcement.renew_leaves()
            self.enforcement.begin_pass(inputs)

    def _runs_elsewhere(self) -> bool:
        """Whether another thread is in a forward pass, which has the model to itself."""
        return (
            self._inside_forward
            and self._thread is not threading.current_thread()
            and self._thread.is_alive()
        )

    def _leave_forward(self) -> None:
        self._inside_forward = False

    def _after_forward(
        self, model: nn.Module, inputs: Any, output: Any, pull: Pull | None = None
    ) -> Tensor | None:
        if self._runs_elsewhere():
            return None
        self._pass.close()
        if output is None or not torch.is_grad_enabled() or not model.training:
            return None
        check_output(output)
        sample = self._sample_behind(inputs)
        call = ForwardCall(
            session=self, output=output, pull=pull or self.enforcement.way_back(output),
            sample=sample, plan=self.plan,
        )  # fmt: skip
        return cut_off(call)

    def _sample_behind(self, inputs: tuple[Any, ...]) -> StepSample:
        """Tell which sample the inputs are: by their mark, or else the one drawn last."""
        marked = marked_sample(inputs)
        if marked is not None:
            if marked.origin is not self.loader.origin:
                raise refusals.another_loader()
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

    def _adopt_changes(self) -> None:
        """The model has changed since the plan was made: prove its bounds anew."""
        known = None if self._guard.changed(numbers=False) else self._graph
        with whole(self.model):
            self._graph = known or traced_model(self.model, self._input_shapes)
            report = prove_bounds(self._graph, self.model, loss=self.criterion)
        with uncovered(self.model):
            check_same_model(self.model, report, self.plan, self._parameters, self._trainable)
            slack = arithmetic_slack(
                self._trainable[0].dtype, precision=self.plan.precision, report=report
            )  # fmt: skip
        self._hold_to(replace(self.plan.with_bounds(report), arithmetic_slack=slack), report)
        self._guard.accept()
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
        self._progress.seen.add(call.sample.micro_batch)
        call.through_criterion = True

    @property
    def _progress(self) -> StepProgress:
        """The step under way."""
        progress = self._book.progress
        if progress is None:
            raise not_set_error("the step under way")
        return progress

    def _admit(self, call: ForwardCall) -> None:
        """Check that this pass is the next micro-batch of the present step."""
        sample = call.sample
        if sample.step <= self._book.last_step:
            raise refusals.no_new_batch()
        if self._book.progress is None or sample.step != self._book.progress.step:
            self._book.begin(sample, self.plan, repeats=self.outcomes.repeats(sample.step))
        self._progress.check_next(call)

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
            if self._followers is not None:
                self._followers.expect(rows=call.output.shape[0])
            self._add_gradients(call, cotangents, progress.gradients)
            if self._followers is not None:
                self._followers.add_to(progress.counts)
            progress.delivered += 1
        finally:
            # What is behind the output has done its work.
            call.output, call.pull = call.output.detach(), None
            self._delivering.release()
        if self.allows_scaling:  # a scaler wants to see gradients; it may have these
            self._gradients.put([torch.zeros_like(parameter) for parameter in self._trainable])

    def _add_gradients(
        self, call: ForwardCall, cotangents: Tensor, sums: dict[int, Tensor]
    ) -> None:
        """Add the gradients behind an output to `sums`, by the parameter's place.

        Also if it is interrupted, nobody gets to see gradients without noise.
        """
        if call.pull is None:
            raise not_set_error("the way back")
        try:
            self._gradients.drop()
            with without_autocast(call.output.device.type):
                found = call.pull(cotangents.to(call.output.dtype))
            for index, gradient in enumerate(found):
                if gradient is not None:
                    known = sums.get(index)
                    sums[index] = gradient if known is None else known.add_(gradient)
        finally:
            self._gradients.drop()

    # --- the optimizer step ----------------------------------------------------------------------

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._delivering.acquire(blocking=False):
            raise refusals.two_threads()
        try:
            with meeting(self):
                progress = self._account_for_step(args, kwargs)
            self._release(progress)
        finally:
            self._delivering.release()

    def _account_for_step(self, args: Any, kwargs: Any) -> StepProgress:
        """Check that the step may be taken, and write it down."""
        check_no_closure(args, kwargs)
        progress = self._check_complete()
        check_optimizer(self.optimizer, self._parameters)
        self._gradients.check_own()
        if self._guard.edited():
            raise refusals.edited_before_step()
        self.outcomes.account(progress.step)
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
        counts = [] if followers is None else followers.fractions(progress.counts, gradients[0])
        self._book.progress = None
        add_noise = partial(self.outcomes.add_noise, progress.step)
        if self.team is not None:
            self._gradients.put(
                self.team.release(gradients, counts, add_noise, progress.plan.releases)
            )  # fmt: skip
            return
        add_noise([*gradients, *counts], progress.plan.releases)
        if followers is not None:
            followers.move(counts)
        self._gradients.put(gradients)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._guard.project()
        if self.team is not None and self._followers is not None:
            self._followers.move(self.team.counts)
        self.steps_taken += 1


def _meter(plan: Plan, ledger: Ledger) -> BudgetMeter | None:
    """Return what refuses steps beyond the plan's budget, if it has one."""
    if plan.target_epsilon is None:
        return None
    budget = Budget(epsilon=plan.target_epsilon, delta=plan.delta, accountant=plan.accountant)
    return BudgetMeter(budget=budget, ledger=ledger)
