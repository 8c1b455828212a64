"""The model between steps: its weights in their sets, its structure the one that was proved."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from clipless.bounds import ModelSnapshot
from clipless.distributed import ProcessGroup, gathered_parameters, local
from clipless.nn import certify, prepare_projection
from clipless.privacy._precision import Precision
from clipless.privacy.compiled._functions import compiled_projection
from clipless.privacy.step._checks import check_dtypes, may_be_read
from clipless.privacy.step._rounded_weights import RoundedWeights


class ModelGuard:
    """Projects the weights after every step, and notices what others do to the model."""

    def __init__(
        self,
        model: nn.Module,
        trainable: Sequence[Tensor],
        *,
        precision: Precision,
        projection: bool,
        group: ProcessGroup,
    ) -> None:
        self._group = group
        self._model, self._trainable = model, list(trainable)
        self._precision, self._projection = precision, projection
        self._backend: str | None = None
        self.prepare()
        self._seal = WeightSeal(model)

    def begin(self) -> None:
        """Let the weights be what the precision of the plan can hold; until here they are kept."""
        if self._projection and self._rounded is not None:
            self._rounded.restore()
            self._group.broadcast_weights()
        self.accept()
        self._seal.renew()

    def accept(self) -> None:
        """Take the model as it is now for the one that bounds were proved of."""
        with self._group.without_sharding(self._model):
            self.snapshot = ModelSnapshot(self._model)

    def prepare(self) -> None:
        """Prepare the projection for the model as it is now."""
        with self._group.without_sharding(self._model):
            self._projected = prepare_projection(
                self._model, include_frozen=False, only=self._group.owns
            )
            self._constrained = prepare_projection(self._model, include_frozen=False).parameters
        if self._backend is not None:
            self.compile(backend=self._backend)
        rounds = self._precision == "bfloat16"
        self._rounded = RoundedWeights(self._model, only=self._group.owns) if rounds else None

    def compile(self, *, backend: str) -> None:
        """Compile the projection on a GPU; elsewhere it looks at values, which is faster."""
        self._backend = backend
        weights = self._projected.parameters
        if self._projected.computes_itself and weights and all(each.is_cuda for each in weights):
            self._projected.compute_by(compiled_projection(self._projected, backend=backend))

    def changed(self, *, numbers: bool = True) -> bool:
        """Whether the model has changed since it was accepted: see `ModelSnapshot.changed`."""
        with self._group.without_sharding(self._model):
            return self.snapshot.changed(numbers=numbers)

    def certify_edits(self) -> None:
        """Certify the weights again if somebody has edited or loaded them."""
        if self._projection and self._seal.broken():
            check_dtypes(self._trainable)
            self.prepare()  # they may be on another device
            with gathered_parameters(self._model):
                certify(self._model)
            if self._rounded is not None:
                self._rounded.check()
            self._seal.renew()

    def touched(self) -> bool:
        """Whether weights were edited since the last step, as far as their counters tell."""
        return self._projection and self._seal.touched()

    def edited(self) -> bool:
        """Whether weights were edited since the last step."""
        return self._projection and self._seal.broken()

    def project(self) -> None:
        """Bring the weights back into their sets after a step."""
        if self._projection:
            self._group.project(self._projected, self._constrained)
            if self._rounded is not None:
                self._rounded.restore()
        self._group.broadcast_weights()
        self._seal.renew()


class WeightSeal:
    """Notices edits of parameters, cheaply enough for every step.

    Parameters are recognised by their version counters, addresses and norms. An edit through
    `.data` that changes neither the address nor the norm goes unnoticed; so does, where reading a
    value would stall the device, any edit through `.data` that keeps the address.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [local(parameter) for parameter in model.parameters()]
        self.renew()

    def renew(self) -> None:
        """Accept the parameters as they are now."""
        self._versions, self._norms = self._counters(), self._norms_now()

    def touched(self) -> bool:
        """Whether the counters have moved since the last `renew`: a look at no value."""
        return self._counters() != self._versions

    def broken(self) -> bool:
        """Whether parameters have changed since the last `renew`."""
        if self.touched():
            return True
        norms = self._norms_now()
        return norms is not None and self._norms is not None and not torch.equal(norms, self._norms)

    def _counters(self) -> list[tuple[int, int]]:
        return [(p._version, p.data_ptr()) for p in self._parameters]

    @torch.no_grad()
    def _norms_now(self) -> Tensor | None:
        if not all(map(may_be_read, self._parameters)):
            return None
        norms = torch._foreach_norm(self._parameters)
        return torch.stack([norm.double() for norm in norms])
