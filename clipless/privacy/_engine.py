"""The engine: turns a model, an optimizer and a data loader into a private training run."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from clipless.accounting import Accountant, AccountantName, Sampling, epsilon
from clipless.bounds import Shape, check_rules, sensitivity, unsupported_operations, unwrap_module
from clipless.common import names_moved_arguments, not_set_error, publish
from clipless.errors import CliplessError, PrivacyError
from clipless.ledger import Ledger, accountant_of
from clipless.losses import Loss
from clipless.privacy._defaults import SamplingName
from clipless.privacy._engine_start import EngineLedger, start_session
from clipless.privacy._options import PrivacyOptions, merge_arguments
from clipless.privacy._plan import Plan
from clipless.privacy._preparation import PrivacyTarget
from clipless.privacy._quantile_thresholds import initial_quantile_thresholds, quantile_thresholds
from clipless.privacy._report import PrivacyReport
from clipless.privacy._resume import begin_run, run_state
from clipless.privacy.enforced._options import BoundsChoice
from clipless.privacy.sampling._loader import PrivateLoader
from clipless.privacy.step._checks import check_criterion
from clipless.privacy.step._session import TrainingSession

Private = tuple[nn.Module, torch.optim.Optimizer, PrivateLoader]


class PrivacyEngine:
    """Makes training differentially private, without clipping.

    One engine stands for one data set and one budget: everything it makes private is counted in
    one ledger, which nothing resets.

    Args:
        ledger: where to keep the ledger. A file survives the process and is continued by the next
            one; by default it is kept in memory.
        accountant: `"pld"` (tight, the default) or `"rdp"`, for noise, sampling rate and number of
            steps that are fixed beforehand; `"filter"` declares the first run's `target_epsilon`
            and `target_delta` as a Rényi filter, under which all of them, of this and of later
            runs, may be chosen by looking at results. The claim is then the whole budget.
        insecure_seed: for tests: makes sampling and noise reproducible. Nothing is private then,
            and epsilon is infinite; the ledger counts as ever. Without it both come from the
            operating system, whatever other seeds there are.

    Example:
        >>> model = torch.nn.Sequential(
        ...     clipless.nn.BoundedInput(1.0), clipless.nn.SpectralLinear(4, 2))
        >>> data = torch.utils.data.TensorDataset(torch.randn(500, 4), torch.zeros(500).long())
        >>> criterion = clipless.losses.CrossEntropy()
        >>> engine = PrivacyEngine()
        >>> model, optimizer, loader = engine.make_private_with_epsilon(
        ...     module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        ...     data_loader=torch.utils.data.DataLoader(data, batch_size=50),
        ...     criterion=criterion, target_epsilon=3.0, epochs=1)
        >>> for x, y in loader:
        ...     optimizer.zero_grad()
        ...     criterion(model(x), y).backward()
        ...     optimizer.step()
        >>> engine.get_epsilon() <= 3.0
        True
    """

    def __init__(
        self,
        *,
        ledger: str | os.PathLike[str] | Ledger | None = None,
        accountant: AccountantName = "pld",
        insecure_seed: int | None = None,
    ) -> None:
        self.accountant: Accountant = accountant
        self._books = EngineLedger(ledger, insecure_seed=insecure_seed)
        self._session: TrainingSession | None = None
        self._sessions: list[TrainingSession] = []
        self._first_plan: Plan | None = None
        self._first_thresholds: dict[str, float] = {}

    # --- making a run private --------------------------------------------------------------------

    @names_moved_arguments(options=PrivacyOptions)
    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader[Any] | PrivateLoader,
        criterion: Loss,
        noise_multiplier: float,
        target_epsilon: float | None = None,
        target_delta: float | None = None,
        sampling: SamplingName | Sampling | None = None,
        bounds: BoundsChoice | None = None,
        compile: bool | str | None = None,
        resume_from: Mapping[str, Any] | None = None,
        options: PrivacyOptions = PrivacyOptions(),
    ) -> Private:
        """Return the model, the optimizer and a private loader, ready for an ordinary loop.

        Model, optimizer and criterion are the objects given, with hooks on them: the criterion
        sums over examples and divides by the public expected batch size, the optimizer adds noise
        before each step and projects the weights after it. Only the loader is new.

        Args:
            module: a model that `clipless.sensitivity` accepts, beginning with an input guard; with
                `bounds="enforced"` any model whose examples stay apart, as it is.
            optimizer: any `torch.optim` optimizer over the model's trainable parameters.
            data_loader: its batch size is the expected batch size; or a `PrivateLoader`.
            criterion: a loss of `clipless.losses`.
            noise_multiplier: noise over sensitivity of one step, all parameters together.
            target_epsilon: steps beyond it are refused; by default nothing is.
            target_delta: by default 0.1/N, rounded down (`default_delta`); below 1/N in any case.
            sampling, bounds, compile: as in `PrivacyOptions`, for which they stand.
            resume_from: the `state_dict` of an engine whose run this one continues, in this or
                another process, on the same ledger. Another plan is refused, with the difference.
                Give model and optimizer the weights and states they had then.
            options: everything else, such as micro-batches, augmentation and planned steps.
        """
        given = {"sampling": sampling, "bounds": bounds, "compile": compile}
        goal = PrivacyTarget(
            noise_multiplier=noise_multiplier,
            target_epsilon=target_epsilon,
            target_delta=target_delta,
        )
        objects = (module, optimizer, data_loader, criterion)
        return self._start(objects, goal, merge_arguments(options, given), resume_from)

    @names_moved_arguments(options=PrivacyOptions)
    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader[Any] | PrivateLoader,
        criterion: Loss,
        target_epsilon: float,
        target_delta: float | None = None,
        epochs: float | None = None,
        sampling: SamplingName | Sampling | None = None,
        bounds: BoundsChoice | None = None,
        compile: bool | str | None = None,
        resume_from: Mapping[str, Any] | None = None,
        options: PrivacyOptions = PrivacyOptions(),
    ) -> Private:
        """Like `make_private`, with the least noise that keeps the budget for `epochs`.

        What the ledger has already spent is part of the budget. A step beyond the budget is
        refused with `BudgetExhaustedError`; nothing is released then.

        Args:
            target_epsilon: what everything in the ledger may cost in the end, at `target_delta`.
            epochs: passes over the data, of 1/rate steps each; or `PrivacyOptions(steps=...)`.
            resume_from: as for `make_private`; the noise is that of the run which is continued.
        """
        given = {"epochs": epochs, "sampling": sampling}
        chosen = merge_arguments(options, given | {"bounds": bounds, "compile": compile})
        if (chosen.epochs is None) == (chosen.steps is None):
            raise ValueError("give either epochs or steps (options=PrivacyOptions(steps=...))")
        if chosen.bounds == "none":
            raise ValueError("bounds='none' is for make_private with noise_multiplier=0")
        goal = PrivacyTarget(
            noise_multiplier=None, target_epsilon=target_epsilon, target_delta=target_delta
        )
        return self._start((module, optimizer, data_loader, criterion), goal, chosen, resume_from)

    def _start(
        self,
        objects: tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any] | PrivateLoader, Loss],
        goal: PrivacyTarget,
        options: PrivacyOptions,
        resume_from: Mapping[str, Any] | None,
    ) -> Private:
        """Check everything first; a call that fails has changed nothing."""
        module, optimizer, data_loader, criterion = objects
        opened = self._books.opened
        try:
            with initial_quantile_thresholds(unwrap_module(module), resume_from):
                session = start_session(
                    module=module,
                    optimizer=optimizer,
                    data_loader=data_loader,
                    criterion=criterion,
                    goal=goal,
                    options=options,
                    resume_from=resume_from,
                    accountant=self.accountant,
                    books=self._books,
                    run=len(self._sessions),
                )
                first_plan, first_thresholds = (
                    session.plan,
                    quantile_thresholds(unwrap_module(module)),
                )
                # What has moved since is noticed, and proved anew, in the first forward pass.
                begin_run(session, resume_from, replay=options.replay)
        except BaseException:
            if not opened:
                self._books.forget()
            raise
        self._session, self._first_plan = session, first_plan
        self._first_thresholds = first_thresholds
        self._sessions.append(session)
        try:
            publish("plan", session.plan.to_dict())
            if options.compile:
                self.compile(backend="inductor" if options.compile is True else options.compile)
        except BaseException:
            session.end("it could not be compiled")
            raise
        return module, optimizer, session.loader

    # --- questions -------------------------------------------------------------------------------

    @property
    def session(self) -> TrainingSession:
        """The run in progress."""
        if self._session is None:
            raise PrivacyError("nothing is private yet: call make_private first")
        return self._session

    @property
    def plan(self) -> Plan:
        """The plan of the run in progress."""
        return self.session.plan

    @property
    def ledger(self) -> Ledger:
        """The ledger of the run in progress."""
        return self.session.ledger

    def get_epsilon(self, delta: float | None = None, *, further_steps: int = 0) -> float:
        """Return the epsilon of everything released so far, at `delta` or the plan's.

        With `further_steps`, what it will be when that many more steps have been taken. It is
        infinite if noise or samples came from an `insecure_seed`, in this or an earlier run.
        """
        if self.ledger.insecure:
            return math.inf
        chosen = self.plan.delta if delta is None else delta
        history = (*self.ledger.history(), *self.session.cost_of_further(further_steps))
        return epsilon(history, chosen, accountant=accountant_of(self.ledger, self.accountant))

    def allows_step(self) -> bool:
        """Whether one more step fits into the budget of the run in progress; true without one."""
        return self.session.allows_step()

    def state_dict(self) -> dict[str, Any]:
        """Return what `resume_from` needs to continue the run after its last step: plain data and
        tensors. Save it together with the model, the optimizer and the ledger. In distributed
        training it is the same for all processes, and all must ask for it.

        It determines the samples and the noise to come: whoever has it can remove that noise. Of
        the steps before it, it tells nothing. Keep it from whom the guarantee is meant for.
        """
        if self._first_plan is None:
            raise not_set_error("first plan")
        return run_state(
            self.session, first_plan=self._first_plan, first_thresholds=self._first_thresholds
        )  # fmt: skip

    def report(self) -> PrivacyReport:
        """Return the guarantee so far, printable, with what it rests on and does not cover."""
        session = self.session
        return PrivacyReport(
            epsilon=self.get_epsilon(),
            delta=session.plan.delta,
            steps_taken=session.steps_taken,
            releases=session.ledger.releases,
            plan=session.plan,
            ledger=session.ledger.path,
            insecure=session.ledger.insecure,
            notes=session.notes,
        )

    @staticmethod
    def validate(
        module: nn.Module, *, criterion: Loss | None = None, input_shape: Shape | None = None
    ) -> list[CliplessError]:
        """Return what keeps `module` from being trained privately; an empty list if nothing does.

        Without `input_shape` only the operations are looked up; with it, the bounds are computed.
        All layers and operations without a rule are listed, and the criterion if it is none.

        Example:
            >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
            >>> [str(problem).split(":")[0] for problem in PrivacyEngine.validate(model)]
            ['0 (Linear)', '1 (BatchNorm1d)']
        """
        problems: list[CliplessError] = []
        if criterion is not None:
            try:
                check_criterion(criterion)
            except CliplessError as error:
                problems.append(error)
                criterion = None
        problems += unsupported_operations(unwrap_module(module))
        if problems:
            return problems
        try:
            if input_shape is None:
                check_rules(unwrap_module(module))
            else:
                loss = 1.0 if criterion is None else criterion
                sensitivity(module, loss=loss, input_shape=input_shape)
        except CliplessError as error:
            return [error]
        return []

    # --- changing course -------------------------------------------------------------------------

    def compile(self, *, backend: str = "inductor", mode: str | None = None) -> None:
        """Compile the run in progress: the first step takes long, the following ones less time.

        Forward and backward pass go through `torch.compile`, and on a GPU so does the criterion
        with its gradient. Model, optimizer and criterion stay the same objects, with all checks
        around the compiled code. Use batches of few sizes (`pad=True`, the default of
        `make_private(compile=True)`), or every new size compiles anew. Where compilation fails, or
        computes something else than the model does, a warning says so and training goes on
        uncompiled.

        Args:
            backend: as for `torch.compile`.
            mode: as for `torch.compile`. With `"reduce-overhead"` kernels are launched as CUDA
                graphs, which helps small batches; a step must be one batch then. By default that
                is what happens on a GPU with padded batches, one a step, unless they are
                large; `"default"` is without graphs.
        """
        self.session.compile(backend=backend, mode=mode)

    def set_noise_multiplier(self, noise_multiplier: float) -> None:
        """Use another amount of noise from the next step on; each amount is accounted for.

        After the first release this is refused unless the ledger has declared a filter
        (`PrivacyEngine(accountant="filter")`): the new noise may have been chosen by looking at
        what was released, which the usual accountants do not cover.
        """
        self.session.set_noise_multiplier(noise_multiplier)

    def gather_optimizer_state(self) -> None:
        """Complete the optimizer's state in process 0, for `optimizer.state_dict()` there.

        For distributed training, in which each process has the state of its own parameters: call
        it in all processes. Otherwise it does nothing.
        """
        self.session.group.gather_optimizer_state(self.session.optimizer)

    def detach(self) -> None:
        """Make models, optimizers, criteria and loaders ordinary again, and settle the ledger.

        What is trained from here on has no noise and is counted nowhere.
        """
        for session in self._sessions:
            session.detach()
        self._sessions.clear()
        ledger = self._books.ledger
        if ledger is not None and not ledger.closed:
            ledger.settle()

    def close(self) -> None:
        """End private training and let go of the ledger's file; questions can still be asked.

        Nothing goes on without noise: the model in training mode, its optimizer, criterion and
        loader refuse until they are made private again, or ordinary by `detach`.
        """
        for session in self._sessions:
            session.end("engine.close() has ended it")
        if self._books.ledger is not None:
            self._books.ledger.close()
