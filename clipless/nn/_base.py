"""What all layers with constrained weights share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from clipless.errors import ConstraintError
from clipless.spectral import Certificate, Constraint, EuclideanBall


class ConstrainedModule(nn.Module):
    """A layer whose parameters live in constraint sets.

    Weights are ordinary parameters. `project()` maps them back into their sets, in place; after it
    every bound that the library states about the layer is true, rounding included.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def constraints(self) -> Mapping[str, Constraint]:
        """Return the constraint of each constrained parameter, by its name in this layer."""
        raise NotImplementedError

    @torch.no_grad()
    def project(self) -> None:
        """Restore all constraints in place. This is post-processing: it reads no data."""
        _project_all(self._constrained())

    @torch.no_grad()
    def certificates(self) -> dict[str, Certificate]:
        """Return a proved upper bound of every constrained parameter's norm."""
        return {
            name: Certificate(
                bound=float(constraint.bound(_parameter(self, name).detach()[None])[0]),
                radius=constraint.radius,
                method=constraint.method,
            )
            for name, constraint in self.constraints().items()
        }

    def certificate(self) -> Certificate:
        """Return the certificate of the weight: a proved bound of the layer's operator norm.

        (For an embedding: of the largest row norm.)
        """
        return self.certificates()["weight"]

    def _constrained(self) -> Iterator[tuple[nn.Parameter, Constraint]]:
        for name, constraint in self.constraints().items():
            yield _parameter(self, name), constraint


class AffineModule(ConstrainedModule):
    """A constrained linear map with an optional bias in a Euclidean ball of radius `bias_norm`."""

    norm: float
    bias_norm: float

    def _register_bias(self, size: int, wanted: bool, bias_norm: float, **where: object) -> None:
        self.bias_norm = positive("bias_norm", bias_norm)
        if wanted:
            self.bias = nn.Parameter(torch.zeros(size, **where))  # type: ignore[call-overload]
        else:
            self.register_parameter("bias", None)

    def _weight_constraint(self) -> Constraint:
        raise NotImplementedError

    def constraints(self) -> Mapping[str, Constraint]:
        """The weight's set and, with a bias, its ball."""
        constraints: dict[str, Constraint] = {"weight": self._weight_constraint()}
        if self.bias is not None:
            constraints["bias"] = EuclideanBall(self.bias_norm)
        return constraints


def constrained_modules(model: nn.Module) -> Iterator[tuple[str, ConstrainedModule]]:
    """Yield every constrained layer of a model with its path, each layer once."""
    for path, module in model.named_modules():
        if isinstance(module, ConstrainedModule):
            yield path, module


@torch.no_grad()
def project(model: nn.Module) -> None:
    """Restore the constraints of all layers of `model`, in place, layers of one shape at a time.

    Example:
        >>> layer = clipless.nn.SpectralLinear(3, 2)
        >>> with torch.no_grad():
        ...     _ = layer.weight.mul_(5)
        >>> clipless.nn.project(layer)
        >>> layer.certificate().holds
        True
    """
    _project_all(pair for _, module in constrained_modules(model) for pair in module._constrained())


def certify(model: nn.Module) -> dict[str, Certificate]:
    """Return the certificates of all constrained parameters by full name, or refuse.

    Raises:
        ConstraintError: a weight is not proved to lie in its set. It names the parameter.
    """
    found = {}
    for path, module in constrained_modules(model):
        for name, certificate in module.certificates().items():
            full = f"{path}.{name}" if path else name
            if not certificate.holds:
                raise ConstraintError(
                    f"{full} ({type(module).__name__}) has certified norm {certificate.bound:.6g}, "
                    f"outside its constraint of {certificate.radius:g}. The bounds are proved for "
                    "weights inside it: call clipless.nn.project(model) after loading or editing "
                    "weights, or after converting their dtype."
                )
            found[full] = certificate
    return found


def _project_all(pairs: Iterable[tuple[nn.Parameter, Constraint]]) -> None:
    """Project parameters grouped by constraint, shape, dtype and device: one batch a group."""
    groups: defaultdict[object, list[Tensor]] = defaultdict(list)
    seen: set[tuple[int, Constraint]] = set()
    for parameter, constraint in pairs:
        if (id(parameter), constraint) in seen:
            continue
        seen.add((id(parameter), constraint))
        key = (constraint, parameter.shape, parameter.dtype, parameter.device)
        groups[key].append(parameter)
    for key, parameters in groups.items():
        constraint = key[0]  # type: ignore[index]
        projected = constraint.project(torch.stack(parameters))
        torch._foreach_copy_(parameters, list(projected.unbind()))


def _parameter(module: nn.Module, name: str) -> nn.Parameter:
    return module.get_parameter(name)


def positive(name: str, value: float) -> float:
    """Return `value` as a float if it is a positive finite number, else refuse by name."""
    number = float(value)
    if not 0 < number < float("inf"):
        raise ValueError(f"{name} must be a positive finite number, got {value!r}")
    return number
