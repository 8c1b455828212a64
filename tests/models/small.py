"""A small version of every model, for tests that attack or train it."""

from clipless import models

# Settings beside input_shape (or features) and classes.
SMALL = {
    "mlp": {"input_shape": (6,), "hidden": (8, 6)},
    "lenet": {"input_shape": (1, 6, 6), "channels": (4,), "kernel_sizes": (3,), "hidden": 6},
    "vgg": {"input_shape": (1, 8, 8), "channels": (4, 4), "convolutions": 1, "hidden": 6},
    "resnet": {"input_shape": (1, 8, 8), "channels": (4, 4), "hidden": 6},
    "mixer": {"input_shape": (1, 6, 6), "patch": 2, "width": 4},
    "head": {"features": 8, "hidden": (6,), "input_mode": "clip", "input_norm": 1.0},
}
# What people would build: the defaults, on the shapes the models are meant for.
DEFAULT = {
    "mlp": {"input_shape": (20,)},
    "lenet": {"input_shape": (1, 28, 28)},
    "vgg": {"input_shape": (3, 32, 32)},
    "resnet": {"input_shape": (3, 32, 32)},
    "mixer": {"input_shape": (3, 32, 32)},
    "head": {"features": 512, "input_mode": "clip", "input_norm": 1.0},
}


def config(name, table=SMALL, classes=3, **settings):
    return models.from_dict({"name": name, "classes": classes, **table[name], **settings})
