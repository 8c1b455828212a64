"""Models by name, each 1-Lipschitz: MLP, LeNet, VGG, ResNet, MLP-Mixer, and a head for features."""

from clipless.models._config import ModelConfig
from clipless.models._convolutional import LeNetConfig, VGGConfig
from clipless.models._features import extract_features
from clipless.models._mixer import MixerConfig
from clipless.models._mlp import HeadConfig, MLPConfig
from clipless.models._registry import (
    build,
    configurations,
    from_dict,
    names,
    register,
    to_dict,
    unregister,
)
from clipless.models._resnet import ResNetConfig

__all__ = [
    "build",
    "names",
    "configurations",
    "to_dict",
    "from_dict",
    "ModelConfig",
    "MLPConfig",
    "LeNetConfig",
    "VGGConfig",
    "ResNetConfig",
    "MixerConfig",
    "HeadConfig",
    "extract_features",
    "register",
    "unregister",
]
