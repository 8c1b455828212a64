"""Projection of the weights after each step, and the check that the model is the one proved."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from clipless.bounds import ModelSnapshot, WeightSeal
from clipless.distributed import ProcessGroup, gathered_parameters, local
from clipless.nn import certify, prepare_projection
from clipless.privacy._precision import Precision
from clipless.privacy.compiled._functions import compiled_projection
from clipless.privacy.step._checks import check_dtypes
from clipless.privacy.step._rounded_weights import RoundedWeights
from clipless.spectral import Projection


class ModelGuard:
    """What brings the weights back after every step, and notices what others do to the model."""

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
        self._precision, self._projects = precision, projection
        self._backend: str | None = None
        self.projection, self.constrained = Projection([]), list[nn.Parameter]()
        """What a step projects: the weights of this process, and those of all."""
        self.rounded: RoundedWeights | None = None
        """What keeps weights to numbers of the plan's precision, if that is less than theirs."""
        self.prepare()
        self.seal = WeightSeal(map(local, model.parameters() if projection else ()))
        """Notices edits of weights; of none if weights need not be in their sets."""

    def begin(self) -> None:
        """Let the weights be what the precision of the plan can hold; until here they are kept."""
        if self.rounded is not None:
            self.rounded.restore()
            self._group.broadcast_weights()
        self.accept()
        self.seal.renew()

    def accept(self) -> None:
        """Take the model as it is now for the one that bounds were proved of."""
        with self._group.without_sharding(self._model):
            self.snapshot = ModelSnapshot(self._model)

    def prepare(self) -> None:
        """Prepare the projection for the model as it is now."""
        if not self._projects:
            return
        with self._group.without_sharding(self._model):
            self.projection = prepare_projection(
                self._model, include_frozen=False, only=self._group.owns
            )
            self.constrained = prepare_projection(self._model, include_frozen=False).parameters
        if self._backend is not None:
            self.compile(backend=self._backend)
        rounds = self._precision == "bfloat16"
        self.rounded = RoundedWeights(self._model, only=self._group.owns) if rounds else None

    def compile(self, *, backend: str) -> None:
        """Compile the projection on a GPU; elsewhere it looks at values, which is faster."""
        self._backend = backend
        weights = self.projection.parameters
        if self.projection.computes_itself and weights and all(each.is_cuda for each in weights):
            self.projection.compute_by(compiled_projection(self.projection, backend=backend))

    def changed(self, *, numbers: bool = True) -> bool:
        """Whether the model has changed since it was accepted: see `ModelSnapshot.changed`."""
        with self._group.without_sharding(self._model):
            return self.snapshot.changed(numbers=numbers)

    def certify(self) -> None:
        """Certify the weights again, which somebody has edited or loaded."""
        check_dtypes(self._trainable)
        self.prepare()  # they may be on another device
        with gathered_parameters(self._model):
            certify(self._model)
        if self.rounded is not None:
            self.rounded.check()
        self.seal.renew()
