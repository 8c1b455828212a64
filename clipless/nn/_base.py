"""What all layers with constrained weights share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from clipless.errors import ConstraintError
from clipless.kernels import GradientLimits
from clipless.spectral import Certificate, Constraint, Projection, certificates_of


class BoundedModule(nn.Module):
    """A layer that can keep what one example adds to its parameters' gradients within limits."""

    def forward_bounded(
        self, x: Tensor, parameters: Mapping[str, Tensor], limits: GradientLimits
    ) -> Tensor:
        """Compute what `forward` does, with these parameters instead of the layer's own.

        In the backward pass, one example's contribution to the gradient of a parameter that is
        named in `limits` is scaled to at most that norm, and left out if it is not finite. The
        first axis of `x` counts the examples.
        """
        raise NotImplementedError

    def prepared(self, limits: GradientLimits) -> Callable[..., Tensor]:
        """Return `forward_bounded` for many passes with these limits, the layer being as it is."""
        return partial(self.forward_bounded, limits=limits)


class ConstrainedModule(BoundedModule):
    """A layer whose parameters live in constraint sets.

    Weights are ordinary parameters. `project()` maps them back into their sets, in place; after it
    every bound that the library states about the layer is true, rounding included.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def constraints(self) -> Mapping[str, Constraint]:
        """Return the constraint of each constrained parameter, by its name in this layer."""
        raise NotImplementedError

    def project(self) -> None:
        """Restore all constraints in place. This is post-processing: it reads no data."""
        Projection(list(self._constrained())).apply()

    def certificates(self) -> dict[str, Certificate]:
        """Return a proved upper bound of every constrained parameter's norm, by name."""
        names = list(self.constraints())
        return dict(zip(names, certificates_of(list(self._constrained())), strict=True))

    def certificate(self) -> Certificate:
        """Return the certificate of the weight: a proved bound of the layer's operator norm.

        (For an embedding: of the largest row norm.)
        """
        return self.certificates()["weight"]

    def _constrained(self) -> Iterator[tuple[nn.Parameter, Constraint]]:
        for name, constraint in self.constraints().items():
            yield _parameter(self, name), constraint


def set_loss_scale(model: nn.Module, scale: float) -> None:
    """Set the factor of every example's loss in all layers that clip gradients."""
    for _, module in clipping_modules(model):
        module.loss_scale = scale


def clipping_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers that can clip gradients, with their paths."""
    for path, module in model.named_modules():
        if type(module).__module__.startswith("clipless.nn.") and hasattr(module, "loss_scale"):
            yield path, module


def constrained_modules(model: nn.Module) -> Iterator[tuple[str, ConstrainedModule]]:
    """Yield every constrained layer of a model with its path, each layer once."""
    for path, module in model.named_modules():
        if isinstance(module, ConstrainedModule):
            yield path, module


def project(model: nn.Module, *, include_frozen: bool = True) -> None:
    """Restore the constraints of all layers of `model`, in place, layers of one shape at a time.

    With `include_frozen=False`, parameters that do not require gradients are left as they are.

    Example:
        >>> layer = clipless.nn.SpectralLinear(3, 2)
        >>> with torch.no_grad():
        ...     _ = layer.weight.mul_(5)
        >>> clipless.nn.project(layer)
        >>> layer.certificate().holds
        True
    """
    prepare_projection(model, include_frozen=include_frozen).apply()


def prepare_projection(
    model: nn.Module,
    *,
    include_frozen: bool = True,
    only: Callable[[Tensor], bool] | None = None,
) -> Projection:
    """Return the projection of a model's weights: the one of the last time, if it still fits.

    It is that of the model's constraints, and of the devices of its weights, as they are now.
    With `only`, weights for which it is false are left out, and nothing is remembered.

    Example:
        >>> layer = clipless.nn.SpectralLinear(3, 2)
        >>> projection = prepare_projection(layer)
        >>> (weight,) = projection([5 * p for p in projection.parameters])
        >>> torch.allclose(weight, layer.weight, atol=1e-5)
        True
    """
    pairs = [
        (parameter, constraint)
        for _, parameter, constraint in _named_constraints(model)
        if include_frozen or parameter.requires_grad
    ]
    if only is not None:
        return Projection([pair for pair in pairs if only(pair[0])])
    prepared = _PREPARED.setdefault(model, {})
    known = prepared.get(include_frozen)
    if known is None or not known.fits(pairs):
        known = prepared[include_frozen] = Projection(pairs)
    return known


_PREPARED: WeakKeyDictionary[nn.Module, dict[bool, Projection]] = WeakKeyDictionary()


def certify(model: nn.Module) -> dict[str, Certificate]:
    """Return the certificates of all constrained parameters by full name, or refuse.

    Raises:
        ConstraintError: a weight is not proved to lie in its set, or two layers that share it have
            different sets. It names the parameter.
    """
    named = _named_constraints(model)
    pairs = [(parameter, constraint) for _, parameter, constraint in named]
    found = dict(zip([name for name, _, _ in named], certificates_of(pairs), strict=True))
    for name, certificate in found.items():
        if not certificate.holds:
            raise ConstraintError(
                f"{name} has certified norm {certificate.bound:.6g}, outside its constraint of "
                f"{certificate.radius:g}. The bounds are proved for weights inside it: call "
                "clipless.nn.project(model) after loading or editing weights, or after "
                "converting their dtype."
            )
    return found


def _named_constraints(model: nn.Module) -> list[tuple[str, nn.Parameter, Constraint]]:
    """All constrained parameters by full name, those of layers that share one by each name."""
    named = [
        (f"{path}.{name}" if path else name, _parameter(module, name), constraint)
        for path, module in constrained_modules(model)
        for name, constraint in module.constraints().items()
    ]
    _refuse_two_constraints(named)
    return named


def _parameter(module: nn.Module, name: str) -> nn.Parameter:
    return module.get_parameter(name)


def _refuse_two_constraints(named: Iterable[tuple[str, nn.Parameter, Constraint]]) -> None:
    """Refuse weights that two layers share, under constraints that are not the same.

    Projection into one set leaves the other: norms of 1.41 times the claimed one were found.
    """
    known: dict[Any, tuple[str, Constraint]] = {}
    for name, parameter, constraint in named:
        first, wanted = known.setdefault(_memory(parameter), (name, constraint))
        if wanted != constraint:
            raise ConstraintError(
                f"{first} and {name} are one weight under two constraints, {wanted} and "
                f"{constraint}. No projection keeps both: give the layers the same type, norm and "
                "geometry, or weights of their own."
            )


def _memory(parameter: nn.Parameter) -> Any:
    """What two names of the same numbers have in common: their place in memory, where known."""
    plain = type(parameter.data) is Tensor and not parameter.is_meta
    address = parameter.data_ptr() if plain else 0
    return (parameter.device, address) if address else id(parameter)
