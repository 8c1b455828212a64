"""Enforcement of bounds in the backward pass: every use of a parameter is held to its plan.

While a private forward pass runs, every layer that holds trainable parameters computes with
*leaves*: copies of the parameters in float64, made anew for every use, and that nothing but
these stand-ins can reach. Each use of a leaf scales what one example adds to its gradient to the
bound that was planned for that use (`BoundedModule.forward_bounded`), and is refused if its input
has not one row for each example. It hands its gradients in by itself, to the pass that it belongs
to, once. So, whatever else `forward` does:

- a parameter's gradient is a sum of its planned uses, each within its bound for every example;
- a use that was not planned, and a parameter without a bound, have a gradient of exactly zero;
- a weight that is used in any other way, or was used in another pass, has no gradient by that way.

What this cannot bound is what one example does to another's contribution: that examples stay apart
is proved by the trace, and tried on the running model (`RowTrial`).

Gradients do not travel by autograd's edges. One that went from node to node could be changed on its
way, or joined by others: by a hook on a node (`y.grad_fn.register_hook`), on a leaf that was found
behind it, by a second use of that leaf. So each use of a layer is one node, which has a graph and
leaves of its own inside. Its backward pass hands the bounded gradients to the pass that they belong
to, and passes on nothing but the cotangent of its input, which is a constant to whoever
differentiates once more.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from clipless.bounds import SensitivityReport
from clipless.common import not_set_error
from clipless.errors import PrivacyError
from clipless.kernels import GradientLimits, row_shares
from clipless.nn import BoundedModule
from clipless.privacy._plan import Plan
from clipless.privacy.step._other_layers import by_rows, refuse_other_ways

_MARGIN = {"float32": 1e-4, "tf32": 1.2e-3, "bfloat16": 1.2e-3}
"""By how much norms are computed too small at most, and operands of products are rounded up.

Norms are those of the numbers that are added up. In bfloat16 these are rounded, in compiled code
too: what they were before may be larger by more (2^-8)."""
BackwardPass = Callable[[Tensor], list[Tensor | None]]
"""From the cotangents of an output to the gradients of the trainable parameters."""
_NOTHING: GradientLimits = {}
_NO_LEAVES: dict[int, Tensor] = {}


class Enforcement:
    """Stand-ins for a model's layers, which keep gradients within the bounds of a plan.

    Compiled code, in which nobody else's code runs, gets leaves for a whole pass and has gradients
    by autograd. `sharded`: leaves are the parameters that the layers have at the time of the call.
    Others can reach those, so the graph behind an output is searched for other ways to a parameter.
    """

    def __init__(
        self, model: nn.Module, trainable: Sequence[Tensor], *, sharded: bool = False
    ) -> None:
        self._model, self._trainable, self._sharded = model, list(trainable), sharded
        self.leaves: list[Tensor] = []
        """Of compiled passes: one for each trainable parameter, in their order."""
        self.deliveries: Deliveries | None = None
        """What the uses of the pass that began last hand in; None if the model is sharded."""
        self.places = {id(each): place for place, each in enumerate(self._trainable)}
        """The place of each trainable parameter in the plan, by its identity."""
        self.rows: int | None = None
        """How many examples are in the batch of that pass."""
        self._calls: list[_BoundedCall] = []
        self._ways: list[Any] = []
        """Of a sharded model: the nodes of the graph by which parameters may be reached."""

    def adopt(self, report: SensitivityReport, plan: Plan) -> None:
        """Hold gradients to these bounds from the next forward pass on."""
        room = (1 + plan.arithmetic_slack) * (1 - norm_margin(self._trainable[0].dtype, plan))
        room /= 1 + plan.sums.slack  # what the sum over the batch may add to what is enforced
        uses: defaultdict[nn.Module, list[GradientLimits]] = defaultdict(list)
        for node in report.nodes:
            if node.gradient_bounds:
                module = self._model.get_submodule(node.name)
                own = {id(p): name for name, p in module.named_parameters()}
                uses[module].append(
                    {
                        own[id(self._model.get_parameter(name))]: room * bound / plan.loss_divisor
                        for name, bound in node.gradient_bounds.items()
                        if bound > 0 and self._model.get_parameter(name).requires_grad
                    }
                )
        self._calls = [_BoundedCall(self, module, tuple(each)) for module, each in uses.items()]

    @contextmanager
    def stand_in(self) -> Iterator[None]:
        """Let the layers compute with leaves, and their backward passes keep the bounds."""
        self.renew_leaves()
        for call in self._calls:
            vars(call.module)["forward"] = call
        try:
            yield
        finally:
            for call in self._calls:
                vars(call.module).pop("forward", None)

    def begin_pass(self, inputs: Sequence[Any]) -> None:
        """Count uses anew: another pass of the model begins, on these inputs."""
        self.rows = next((x.shape[0] for x in inputs if isinstance(x, Tensor)), None)
        if torch.is_grad_enabled() and not (self._sharded or torch.compiler.is_compiling()):
            self.deliveries = Deliveries(self._trainable[0].device)
        for call in self._calls:
            call.used = 0

    def renew_leaves(self) -> None:
        """Let nothing that ran before have a way to the gradients of what runs now."""
        leaves = None
        self._ways = []
        if not self._sharded:
            self.leaves = [_leaf(each) for each in self._trainable]
            leaves = dict(zip(map(id, self._trainable), self.leaves, strict=True))
        for call in self._calls:
            call.begin(leaves)

    def backward_pass(self, output: Tensor, shares: Tensor | None = None) -> BackwardPass:
        """Return the backward pass from an output of the present pass to its parameters.

        `shares`: those of the rows, where several of them are one user's.
        """
        if self._sharded:
            refuse_other_ways(output, self._ways)
        if shares is not None:
            if self.deliveries is None:
                raise not_set_error("the pass that shares belong to")
            self.deliveries.shares = shares
        return functools.partial(
            self.gradients, output, leaves=self.leaves, deliveries=self.deliveries
        )  # fmt: skip

    def lead_to(self, parameter: Tensor) -> Tensor:
        """Return a parameter of a sharded model for one use of it."""
        if not parameter.requires_grad:
            return parameter
        seen = parameter.view_as(parameter)
        self._ways.append(seen.grad_fn)
        return seen

    def gradients(
        self,
        output: Tensor,
        cotangents: Tensor,
        leaves: Sequence[Tensor] | None = None,
        deliveries: Deliveries | None = None,
    ) -> list[Tensor | None]:
        """Return the gradients of the trainable parameters: what the uses of layers hand in."""
        if not output.requires_grad:
            return [None] * len(self._trainable)
        if self._sharded:  # which sums what it finds in `grad` over all processes
            torch.autograd.backward(output, cotangents)
            found = [parameter.grad for parameter in self._trainable]
            return [None if each is None else each.to(torch.float64) for each in found]
        leaves, deliveries = leaves or self.leaves, deliveries or self.deliveries
        if deliveries is None:
            raise not_set_error("the pass that gradients belong to")
        asked, found = (deliveries.anchor, *leaves), list[Tensor | None]()

        def run_backwards() -> None:
            found.extend(torch.autograd.grad(output, asked, cotangents, allow_unused=True)[1:])

        handed_in = deliveries.collect(run_backwards)
        if handed_in:
            return [handed_in.get(place) for place in range(len(self._trainable))]
        return found  # compiled code hands in nothing


class _BoundedCall:
    """The forward method of one layer, as long as a private forward pass runs."""

    def __init__(
        self, enforcement: Enforcement, module: nn.Module, uses: tuple[GradientLimits, ...]
    ) -> None:
        self.module, self.used = module, 0
        self._enforcement, self._uses = enforcement, uses
        self._counting = threading.Lock()
        self._absent = {name: None for name, each in module._parameters.items() if each is None}
        # Sharding puts a class of its own in front.
        kinds = [k for k in type(module).__mro__ if not k.__module__.startswith("torch.distrib")]
        ours = kinds[0].__module__.startswith("clipless.nn.")
        if isinstance(module, BoundedModule) and ours:
            self._forward: Callable[..., Any] = module.forward_bounded
            self._prepared = [module.prepared(limits) for limits in uses]
        else:
            self._forward = functools.partial(by_rows, module)
            self._prepared = [functools.partial(self._forward, limits=limits) for limits in uses]

    def begin(self, leaves: Mapping[int, Tensor] | None) -> None:
        """Take the parameters as they are now: a leaf where a use is planned, else its values."""
        self.used = 0
        self._parameters: list[dict[str, Any]] | None = None
        if leaves is not None:
            own, places = dict(self.module.named_parameters()), self._enforcement.places
            self._places = {
                name: places[id(each)] for name, each in own.items() if id(each) in places
            }
            self._parameters = [
                self._seen(own, limits, leaves) for limits in (*self._uses, _NOTHING)
            ]

    def _seen(
        self, own: Mapping[str, Tensor], limits: GradientLimits, leaves: Mapping[int, Tensor]
    ) -> dict[str, Any]:
        """The parameters that a use sees, by name, and None for those that the layer lacks."""
        return self._absent | {
            name: leaves.get(id(each), each) if name in limits else each.detach()
            for name, each in own.items()
        }

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        use = self._next_use()
        limits = self._uses[use] if use < len(self._uses) else _NOTHING
        if named:
            signature = inspect.signature(type(self.module).forward)
            given = signature.bind(self.module, *inputs, **named)
            given.apply_defaults()
            inputs = given.args[1:]
        if limits:
            self._check_rows(inputs[0])
        known = self._parameters
        if known is None:  # the parameters of a sharded model, whole for as long as the layer runs
            return self._forward(*inputs, parameters=self._used_now(limits), limits=limits)
        if not limits or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self._forward(*inputs, parameters=known[use], limits=limits)
        return self._sealed(use, known[use], inputs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The forward method of a copy of the layer, which is ordinary."""
        return types.MethodType(type(self.module).forward, memo[id(self.module)])

    def _next_use(self) -> int:
        """Which of the planned uses this is; those of several threads are different ones."""
        if torch.compiler.is_compiling():
            use, self.used = self.used, self.used + 1
        else:
            with self._counting:
                use, self.used = self.used, self.used + 1
        return min(use, len(self._uses))

    def _sealed(self, use: int, known: Mapping[str, Any], inputs: Sequence[Any]) -> Tensor:
        """Run the layer such that its gradients are handed in, and have no other way."""
        run, limits, deliveries = self._prepared[use], self._uses[use], self._enforcement.deliveries
        if deliveries is None:
            raise not_set_error("the pass that a use belongs to")
        places = {name: self._places[name] for name in limits if name in self._places}
        leaves = {place: _leaf(known[name]) for name, place in places.items()}

        def layer(given: Sequence[Any], leaves: Mapping[int, Tensor]) -> Tensor:
            own = {name: leaves[place] for name, place in places.items()}
            output: Tensor = run(*given, parameters={**known, **own})
            return output

        return sealed(layer, leaves, inputs, deliveries)

    def _used_now(self, limits: GradientLimits) -> dict[str, Any]:
        seen = self._seen(dict(self.module.named_parameters()), limits, _NO_LEAVES)
        return seen | {name: self._enforcement.lead_to(seen[name]) for name in limits}

    def _check_rows(self, x: Tensor) -> None:
        """Refuse rows that are not examples: each would have a bound of its own, or share one."""
        expected = self._enforcement.rows
        found = x.shape[0] if x.ndim else None
        if torch._C._are_functorch_transforms_active():
            raise PrivacyError(
                f"{type(self.module).__name__} was called inside of a function transform "
                "(torch.func.vmap, vjp, ...), which makes several uses of one, each with the bound "
                "of one. Call the layer itself."
            )
        if found != expected:
            raise PrivacyError(
                f"{type(self.module).__name__} was called on {found} rows, in a batch of "
                f"{expected} examples: its gradient would not be bounded for each example. Keep "
                "the examples on the first axis, one row for each, and give layers with trainable "
                "parameters nothing but examples."
            )


def _leaf(parameter: Tensor) -> Tensor:
    """Return a parameter for one use, in float64: so is its gradient, which is a sum over rows."""
    return parameter.detach().to(torch.float64).requires_grad_()


def norm_margin(dtype: torch.dtype, plan: Plan) -> float:
    return 1e-10 if dtype == torch.float64 else _MARGIN[plan.precision]


Layer = Callable[[Sequence[Any], Mapping[int, Tensor]], Tensor]
"""A use of a layer: from its inputs, and leaves by their parameters' places, to its output."""


class Deliveries:
    """The gradients that the uses of one forward pass hand in, by the parameter's place.

    They are taken while the pass's own backward pass runs, once from every use. What else runs
    backwards through a use (a gradient inside of `forward`, a backward pass inside of another one)
    gets the cotangent of its input, and adds nothing here.
    """

    def __init__(self, device: torch.device) -> None:
        self.anchor = torch.empty(0, device=device, requires_grad=True)
        """What every use depends on, so that a backward pass has something to look for."""
        self.shares: Tensor | None = None
        """Of the rows, where several of them are one user's; set before the backward pass."""
        self._lock = threading.Lock()
        self._sums: dict[int, Tensor] | None = None

    def collect(self, run: Callable[[], object]) -> dict[int, Tensor]:
        """Run a backward pass, and return what was handed in meanwhile."""
        with self._lock:
            self._sums = sums = dict[int, Tensor]()
        try:
            run()
        finally:
            with self._lock:
                self._sums = None
        return sums

    def wanted_from(self, use: Any) -> bool:
        """Whether a use should hand in its gradients: now, and for the first time."""
        with self._lock:
            wanted = self._sums is not None and not use.handed_in
            use.handed_in = use.handed_in or wanted
        return wanted

    def hand_in(self, gradients: Mapping[int, Tensor | None]) -> None:
        """Add the gradients of one use."""
        with self._lock:
            for place, gradient in gradients.items():
                if gradient is not None and self._sums is not None:
                    known = self._sums.get(place)
                    gradient = gradient.to(torch.float64)
                    self._sums[place] = gradient if known is None else known + gradient


def sealed(
    layer: Layer, leaves: Mapping[int, Tensor], inputs: Sequence[Any], deliveries: Deliveries
) -> Tensor:
    """Run a layer with leaves that nobody else has; its gradients go to `deliveries`."""
    output: Tensor = _SealedUse.apply(  # type: ignore[no-untyped-call]
        deliveries.anchor, deliveries, layer, leaves, *inputs
    )
    return output


class _SealedUse(torch.autograd.Function):
    """One use of a layer, with a graph of its own inside."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, deliveries: Deliveries, layer: Layer,
        leaves: Mapping[int, Tensor], *inputs: Any,
    ) -> Tensor:  # fmt: skip
        own = [
            x.detach().requires_grad_(needed) if isinstance(x, Tensor) else x
            for x, needed in zip(inputs, ctx.needs_input_grad[4:], strict=True)
        ]
        # Nobody listens in: a mode or a tensor's own class would be shown the leaves.
        with torch.enable_grad(), torch._C.DisableTorchFunction():
            output = layer(own, leaves)
        ctx.deliveries, ctx.handed_in = deliveries, False
        # The way back from the output, and not its memory.
        ctx.inside = get_gradient_edge(output), own, leaves
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        if ctx.inside is None:
            raise PrivacyError(
                "a layer's backward pass ran a second time in one backward pass of the model. "
                "Every use of a layer contributes once: differentiate nothing inside of a "
                "backward pass."
            )
        behind, own, leaves = ctx.inside
        wanted = ctx.deliveries.wanted_from(ctx)
        inputs = [x for x in own if isinstance(x, Tensor) and x.requires_grad]
        asked = [*inputs, *leaves.values()] if wanted else inputs
        if not asked:
            return (None,) * (4 + len(own))
        shares = ctx.deliveries.shares if wanted else None
        with torch._C.DisableTorchFunction(), row_shares(shares) as used:
            found = torch.autograd.grad(
                behind, asked, cotangents[0], allow_unused=True, retain_graph=not wanted
            )  # fmt: skip
        if wanted:
            ctx.inside = None  # activations are not kept until the whole backward pass is over
            sums = sum(each is not None for each in found[len(inputs) :])
            if shares is not None and used.count < sums:
                raise PrivacyError(
                    "a parameter's gradient was added up over the records of users without their "
                    "shares, so that a user with many records would count for several. This layer "
                    "does not go with a unit of users: report it, and train on single records."
                )
            ctx.deliveries.hand_in(dict(zip(leaves, found[len(inputs) :], strict=True)))
        to_inputs = iter(found)
        passed_on = (
            next(to_inputs) if isinstance(x, Tensor) and x.requires_grad else None for x in own
        )
        return None, None, None, None, *passed_on
