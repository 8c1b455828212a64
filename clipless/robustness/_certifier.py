"""`Certifier`: certified radii of a model, evaluated in double precision."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from clipless.common import require_positive
from clipless.errors import LabelError
from clipless.nn import to_torch
from clipless.robustness._guard_geometry import radius_before_clip, radius_before_sphere
from clipless.robustness._network import Network, read_network
from clipless.robustness._rounding import rounding_errors

Method = Literal["rows", "margin"]
EVALUATION_BATCH = 1024
# Rounding of the last few operations of a certificate, in double precision.
_DEFLATION = 1 - 1e-12


@dataclass(frozen=True)
class Certificates:
    """Decisions and certified radii of a batch, on the device that the inputs were on."""

    predictions: Tensor
    """(batch,) class indices; for one logit, whether it exceeds the threshold."""
    radii: Tensor
    """(batch,) float64."""


class Certifier:
    """A model prepared for certificates: constants proved, a double precision copy to evaluate."""

    def __init__(
        self,
        model: nn.Module,
        *,
        input_shape: tuple[int, ...],
        input_lipschitz: float = 1.0,
        method: Method = "rows",
        threshold: float = 0.0,
        arithmetic: torch.dtype = torch.float64,
    ) -> None:
        if method not in ("rows", "margin"):
            raise ValueError(f'method must be "rows" or "margin", got {method!r}')
        if not math.isfinite(threshold):
            raise ValueError(f"threshold must be finite, got {threshold!r}")
        self.input_lipschitz = require_positive("input_lipschitz", input_lipschitz)
        self.threshold = float(threshold)
        self.network: Network = read_network(model, input_shape)
        self.classes = _class_count(self.network.output_shape)
        reference = reference_tensor(self.network.model)
        self.dtype, self.device = reference.dtype, reference.device
        self.arithmetic = arithmetic
        if arithmetic not in (self.dtype, torch.float64):
            raise ValueError(
                f"arithmetic must be torch.float64 or the dtype of the weights, {self.dtype}: "
                f"converting them to {arithmetic} would change the network."
            )
        self.exact = plain_copy(self.network.model, torch.float64)
        self.slopes = self._slopes(method)
        self._allowances: dict[float, tuple[float, float]] = {}

    @property
    def lipschitz(self) -> float:
        """Lipschitz constant of the logits in the guard's output, or in the input without one."""
        return self.network.lipschitz

    @torch.no_grad()
    def certify(self, x: Tensor, *, batch_size: int = EVALUATION_BATCH) -> Certificates:
        """Return decisions and radii of (batch, ...) inputs."""
        parts = [self._certify(part) for part in x.split(batch_size)] if len(x) else []
        predictions = [part.predictions.to(x.device) for part in parts]
        radii = [part.radii.to(x.device) for part in parts]
        nothing = torch.zeros(0, dtype=torch.float64, device=x.device)
        return Certificates(torch.cat([nothing.long(), *predictions]), torch.cat([nothing, *radii]))

    def logits(self, x: Tensor) -> Tensor:
        """Return (batch, K) logits in double precision, of inputs as the model would see them."""
        output: Tensor = self.exact(x.to(self.device, self.dtype).double())
        return output.reshape(len(x), -1)

    def decide(self, logits: Tensor) -> Tensor:
        """Return (batch,) decisions of (batch, K) logits."""
        return (logits[:, 0] > self.threshold).long() if self.classes == 1 else logits.argmax(dim=1)

    def is_right(self, predictions: Tensor, y: Tensor) -> Tensor:
        """Compare decisions with labels: class indices, or 0/1 or -1/+1 for one logit."""
        wrong_kind = y.is_floating_point() and self.classes > 1
        if y.shape != predictions.shape or wrong_kind:
            raise LabelError(
                f"labels must be class indices of shape {tuple(predictions.shape)}, got {y.dtype} "
                f"of shape {tuple(y.shape)}."
            )
        if self.classes > 1 and bool(((y < 0) | (y >= self.classes)).any()):
            raise LabelError(f"labels must lie in 0..{self.classes - 1}, the model's classes.")
        labels = (y > 0).long() if self.classes == 1 else y
        return predictions == labels.to(predictions.device)

    # --- the certificate -------------------------------------------------------------------------

    def _certify(self, x: Tensor) -> Certificates:
        with self._watching_the_guard() as received:
            logits = self.logits(x)
        inputs = x.to(self.device, self.dtype).double().flatten(1)
        finite = torch.isfinite(inputs).all(dim=1) & torch.isfinite(logits).all(dim=1)
        norms = _norms(inputs)
        guarded = _norms(received[0].flatten(1)) if received else norms
        # First without rounding: nothing farther away than this matters to what rounding can do.
        farthest = self._radius(logits, guarded, torch.zeros_like(norms), torch.zeros_like(norms))
        at_output, at_guard = self._rounding(torch.nan_to_num(norms + farthest, nan=0.0))
        radii = self._radius(logits, guarded, at_output, at_guard) / self.input_lipschitz
        return Certificates(self.decide(logits), torch.where(finite, radii * _DEFLATION, 0.0))

    def _radius(
        self, logits: Tensor, guarded: Tensor, at_output: Tensor, at_guard: Tensor
    ) -> Tensor:
        """Radii in the units of the model's input, given the errors of logits and guard's input."""
        change = self._change(logits, at_output)
        guard = self.network.guard
        if guard is None:
            return change
        geometry = radius_before_sphere if guard.sphere else radius_before_clip
        moved = (geometry(change, guarded, guard.radius) - at_guard).clamp(min=0)
        return torch.where(moved > 0, moved / guard.lipschitz_before, 0.0)

    def _change(self, logits: Tensor, error: Tensor) -> Tensor:
        """How far the guard's output (or the input) may move: the least margin over its slope."""
        if self.classes == 1:
            margins, slopes = (logits - self.threshold).abs() - error[:, None], self.slopes
        else:
            top = logits.argmax(dim=1, keepdim=True)
            margins = logits.gather(1, top) - logits - math.sqrt(2) * error[:, None]
            margins = margins.scatter(1, top, math.inf)  # no margin to itself
            slopes = self.slopes[top[:, 0]]
        return torch.where(margins > 0, margins / slopes, 0.0).amin(dim=1)

    def _slopes(self, method: Method) -> Tensor:
        """Lipschitz constants of logits' differences, (K, K), or of the one logit, (1,)."""
        network, classes = self.network, self.classes
        plain = torch.tensor(network.lipschitz, dtype=torch.float64, device=self.device)
        if classes > 1:
            plain = (plain * math.sqrt(2) / _DEFLATION).expand(classes, classes)
        if method == "margin" or network.head is None:
            return plain.reshape(-1) if classes == 1 else plain
        rows = network.head.double()
        if classes > 1:
            lengths = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
        else:
            lengths = _norms(rows)
        slack = 1 + (rows.shape[1] + 8) * 2.0**-52
        return torch.minimum(lengths * (slack * network.feature_lipschitz), plain)

    # --- rounding --------------------------------------------------------------------------------

    def _rounding(self, reach: Tensor) -> tuple[Tensor, Tensor]:
        """Errors of the logits and of the guard's input, for inputs of norm at most `reach`.

        Norms are rounded up to powers of two, so that an example's radius depends on nothing but
        the example, and few walks are needed.
        """
        bounds = torch.where(reach > 0, torch.exp2(torch.ceil(torch.log2(reach) + 1e-9)), 1e-30)
        found = {bound: self._errors(bound) for bound in set(bounds.tolist())}
        table = [found[bound] for bound in bounds.tolist()]
        errors = torch.tensor(table, dtype=torch.float64, device=reach.device).reshape(-1, 2)
        return errors[:, 0], errors[:, 1]

    def _errors(self, input_norm: float) -> tuple[float, float]:
        if input_norm not in self._allowances:
            network, guard = self.network, self.network.guard
            passed = network.forward(input_norm)
            logits = before = 0.0
            for dtype in (self.arithmetic, torch.float64):  # as it is run, and as evaluated here
                errors = rounding_errors(
                    passed,
                    network.traced.shapes,
                    dtype,
                    after=None if guard is None else guard.node,
                )
                logits += errors[passed.output]
                before += 0.0 if guard is None else errors[guard.node.all_input_nodes[0]]
            self._allowances[input_norm] = (logits, before)
        return self._allowances[input_norm]

    @contextmanager
    def _watching_the_guard(self) -> Iterator[list[Tensor]]:
        """Yield a list that holds what the guard received once the model has been run."""
        received: list[Tensor] = []
        if self.network.guard is None:
            yield received
            return

        def note(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            received.append(inputs[0])

        handle = self.exact.get_submodule(self.network.guard.path).register_forward_pre_hook(note)
        try:
            yield received
        finally:
            handle.remove()


def plain_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy in `dtype` made of torch alone, in evaluation mode.

    Its derivatives are those of the function: gradient clipping, which an attack must not meet, is
    left out.
    """
    wide = copy.deepcopy(model).eval().to(dtype)  # before the export, which scales kernels
    return to_torch(wide).requires_grad_(False)


def reference_tensor(model: nn.Module) -> Tensor:
    tensors = (*model.parameters(), *model.buffers())
    return next((t for t in tensors if t.is_floating_point()), torch.empty(0))


def _class_count(shape: tuple[int, ...]) -> int:
    if len(shape) > 1 or math.prod(shape) < 1:
        raise ValueError(
            f"certificates need one logit or K logits for each example, and the model returns "
            f"{'x'.join(map(str, shape))} numbers."
        )
    return math.prod(shape)


def example_shape(x: Tensor) -> tuple[int, ...]:
    if x.ndim < 2:
        raise ValueError(f"x must have the batch as its first axis, got shape {tuple(x.shape)}")
    return tuple(x.shape[1:])


def _norms(rows: Tensor) -> Tensor:
    """Euclidean norms of rows, (batch,), from double precision."""
    return torch.linalg.vector_norm(rows, dim=1)
