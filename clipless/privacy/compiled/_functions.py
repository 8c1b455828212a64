"""Compiled forward and backward passes, criteria and projections, held against what they stand for.

The session's checks stay outside: they run before and after the compiled code, as they do around
the model's own. Copies of the model, and evaluation, are not compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from clipless.kernels import AnyFunction, CompiledFunction, is_close, make_finite_and_bounded
from clipless.losses import Loss
from clipless.privacy.enforced._enforcement import ThresholdEnforcement
from clipless.spectral import Projection

if TYPE_CHECKING:
    from clipless.privacy.step._enforcement import Enforcement
    from clipless.privacy.step._session import TrainingSession

GRAPH_MODES: dict[str | None, str | None] = {
    "reduce-overhead": None,
    "max-autotune": "max-autotune-no-cudagraphs",
}
"""The modes of `torch.compile` with CUDA graphs, and what they are without: we make our own."""
GRAPHED_BYTES = 2 * 2**30
"""Up to how much a pass may keep for the backward pass to be launched as a CUDA graph.

Graphs reserve their memory for themselves, and bring little once kernels run for longer than it
takes to launch them. Passes that keep so much take milliseconds.
"""
_COMPARED_ROWS = 64
_WEIGHED_ROWS = 8


def compiled_model(
    session: TrainingSession, *, backend: str, mode: str | None, fixed: bool, joined: bool
) -> CompiledFunction:
    """Compile the forward and backward pass of a session's model, with its bounds.

    `fixed`: batches have one of a few numbers of rows. `joined`: layers may become one kernel.
    """
    model, enforcement = session.model, session.enforcement
    device = session._trainable[0].device.type
    traced: AnyFunction | None = None
    if isinstance(enforcement, ThresholdEnforcement):
        traced = enforcement.traced_pass(session.casts).function()

    def run_with_thresholds(*inputs: Any) -> Any:
        if torch.compiler.is_compiling() and traced is not None:
            return traced(*inputs)
        enforcement.begin_pass(inputs)
        return session.run_eagerly(inputs)

    def run(*inputs: Any) -> Any:
        enforcement.begin_pass(inputs)
        return model.forward(*inputs)

    def run_rounded(*inputs: Any) -> Any:
        enforcement.begin_pass(inputs)
        with torch.autocast(device, dtype=torch.bfloat16):
            return model.forward(*inputs)

    chosen = run_rounded if session.plan.precision == "bfloat16" else run
    if traced is not None:
        chosen = run_with_thresholds

    def attempt(function: AnyFunction, *inputs: Any) -> None:
        # Backward passes are compiled when they first run, which must not be in mid-step.
        _compare(function, chosen, inputs, enforcement)
        session.trial.check(inputs, lambda *given: (function(*given), None))

    return CompiledFunction(
        chosen, name="the model", attempt=attempt, backend=backend, mode=mode, fixed=fixed,
        # On the CPU, kernels for any size are as fast, and compiling takes longest.
        joined=joined, pure=True, together=not session.on_accelerator,
        rounds=session.plan.precision == "bfloat16" or traced is not None,
    )  # fmt: skip


def kept_bytes(run: AnyFunction, inputs: Sequence[Any]) -> float:
    """Estimate how much a forward pass keeps for its backward pass, from a pass of a few rows."""
    rows = next((each.shape[0] for each in inputs if isinstance(each, Tensor)), 0)
    if rows < 2:
        return 0.0
    few = min(rows, _WEIGHED_ROWS)
    half = few // 2
    # What does not grow with the rows (weights, mostly) falls out of the difference.
    return (_kept_for(run, inputs, few) - _kept_for(run, inputs, half)) / (few - half) * rows


def _kept_for(run: AnyFunction, inputs: Sequence[Any], rows: int) -> int:
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an operator that keeps its own result would keep itself alive

    few = [each[:rows].clone() if isinstance(each, Tensor) else each for each in inputs]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run(*few)
    return sum(kept.values())


def _compare(
    function: AnyFunction, plain: AnyFunction, inputs: Sequence[Any], enforcement: Enforcement
) -> None:  # fmt: skip
    """Refuse compiled code that computes something else than the model, on the first rows.

    Compilers make mistakes. That bounds are kept is looked at apart (`RowTrial.check`).
    """
    # Compiled before anything else runs: compilers hold on to graphs that are alive meanwhile.
    output = function(*inputs)
    rows = min(_COMPARED_ROWS, output.shape[0])
    cotangent = torch.zeros_like(output, requires_grad=False)
    # All of one sign: the rows' gradients must not cancel, which would leave rounding alone.
    trial = torch.linspace(0.5, 1.5, max(output[:rows].numel(), 1))
    cotangent[:rows] = trial.reshape(output[:rows].shape)
    found = enforcement.gradients(output, cotangent)
    few = [each[:rows] if isinstance(each, Tensor) else each for each in inputs]
    expected = plain(*few)
    with torch.no_grad():
        again = plain(*few)
    wanted = enforcement.gradients(expected, cotangent[:rows])
    if not torch.equal(expected, again):  # dropout, say
        return
    if not is_close(output[:rows].detach(), expected.detach(), tolerance=0.1):
        raise RuntimeError("the compiled model's output differs from the model's")
    for one, other in zip(found, wanted, strict=True):
        if (one is None) != (other is None) or (
            one is not None and other is not None and not is_close(one, other, tolerance=0.1)
        ):
            raise RuntimeError("the compiled model's gradients differ from the model's")


def compiled_projection(projection: Projection, *, backend: str) -> CompiledFunction:
    """Compile a projection, and hold its first result against that of the projection itself.

    Most of its kernels are so small that they cost no more than their launch, so that fusing them
    is what there is to gain. Proofs survive: no order of a float64 sum changes it by more than the
    margins of the certificates.
    """

    def run(*weights: Tensor) -> list[Tensor]:
        return projection(weights)

    def attempt(function: AnyFunction, *weights: Tensor) -> None:
        for found, expected in zip(function(*weights), run(*weights), strict=True):
            if not is_close(found, expected, tolerance=1e-4):
                raise RuntimeError("the compiled projection's result differs from the projection's")

    return CompiledFunction(
        run, name="the projection", attempt=attempt, backend=backend, fixed=True
    )  # fmt: skip


def compiled_criterion(criterion: Loss, *, backend: str, fixed: bool) -> CompiledFunction:
    """Compile the criterion together with its gradient and the output guard."""

    def run(
        output: Tensor, target: Tensor, weights: Tensor | None, divisor: float, limit: float
    ) -> tuple[Tensor, Tensor]:
        return guarded_losses(criterion, output, target, weights, divisor, limit)

    def attempt(function: AnyFunction, *arguments: Any) -> None:
        _, expected = run(*arguments)
        _, found = function(*arguments)
        if is_close(found, expected, tolerance=1e-3):
            return
        if is_close(run(*arguments)[1], expected, tolerance=1e-3):  # it does not draw numbers
            raise RuntimeError("the compiled criterion's gradient differs from the criterion's")

    return CompiledFunction(
        run, name="the criterion", attempt=attempt, backend=backend, fixed=fixed
    )  # fmt: skip


def guarded_losses(
    criterion: Loss,
    output: Tensor,
    target: Tensor,
    weights: Tensor | None,
    divisor: float,
    limit: float,
) -> tuple[Tensor, Tensor]:
    """Return the loss of a batch and the cotangents of its output, each of norm at most `limit`.

    The sum of the rows' losses (padding left out) over `divisor`, and its gradient, as the guards
    make it: finite, and clipped row by row.
    """
    losses, pull, *_ = torch.func.vjp(lambda each: criterion.per_example(each, target), output)
    share = torch.full_like(losses, 1 / divisor)
    if weights is not None:
        share = share * weights
        losses = torch.where(weights > 0, losses * weights, torch.zeros_like(losses))
    (cotangents,) = pull(share)
    return losses.sum() / divisor, make_finite_and_bounded(cotangents, limit)


def uncompilable(model: nn.Module) -> str | None:
    """Return why a model's passes cannot be compiled, if there is a reason known beforehand."""
    following = [path for path, m in model.named_modules() if getattr(m, "follow", None)]
    if following:
        return (
            f"the threshold of {following[0]} follows a quantile: it changes after every step, and "
            "every change would compile the model anew"
        )
    return None
