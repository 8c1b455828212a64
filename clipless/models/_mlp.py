"""Models of linear layers: the multi-layer perceptron, and the head on features."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from clipless.models._config import ModelConfig
from clipless.models._parts import assemble, dense, require_even
from clipless.models._registry import register


@dataclass(frozen=True, kw_only=True)
class MLPConfig(ModelConfig):
    """A multi-layer perceptron on examples of any shape: Linear, GroupSort, ..., Linear.

    Args:
        hidden: widths of the hidden layers, even; `()` for a linear model.
    """

    hidden: tuple[int, ...] = (128,)
    constraint: Literal["orthogonal", "ball"] = "ball"

    def __post_init__(self) -> None:
        """Check the widths as well."""
        super().__post_init__()
        require_even("every width in hidden", *self.hidden)


@register("mlp", MLPConfig)
def mlp(config: MLPConfig) -> nn.Sequential:
    """Build a multi-layer perceptron."""
    size = math.prod(config.input_shape)
    body = [nn.Flatten(), *dense(config, size, config.hidden)]
    return assemble(config, body, config.hidden[-1] if config.hidden else size)


@dataclass(frozen=True, kw_only=True)
class HeadConfig(ModelConfig):
    """A head for the features of a frozen, unconstrained backbone; see `extract_features`.

    The guard is on the features: whatever the backbone computes, the head sees bounded norms. By
    default they lie on the unit sphere, since the scale of features means little; then nothing is
    1-Lipschitz in the raw features, as nothing is in the input of the backbone.

    Args:
        features: how many numbers the backbone returns for an example.
        input_norm: the norm of the guard; to be given with `input_mode="clip"`, at about the
            smallest norm of usual features.
        hidden: widths of hidden layers, even; by default the head is linear.
    """

    features: int
    input_shape: tuple[int, ...] = field(init=False, repr=False)
    input_mode: Literal["clip", "sphere"] = "sphere"
    constraint: Literal["orthogonal", "ball"] = "ball"
    hidden: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check the widths and the guard as well."""
        super().__post_init__()
        object.__setattr__(self, "input_shape", (self.features,))
        require_even("every width in hidden", *self.hidden)
        if self.input_mode == "clip" and self.input_norm is None:
            raise ValueError(
                'input_mode="clip" needs input_norm: features have no range that a norm could '
                'follow from. Or use "sphere"'
            )


@register("head", HeadConfig)
def head(config: HeadConfig) -> nn.Sequential:
    """Build a head for features."""
    body = dense(config, config.features, config.hidden)
    return assemble(config, body, config.hidden[-1] if config.hidden else config.features)
