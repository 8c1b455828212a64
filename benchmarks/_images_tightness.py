"""How much of their bounds gradients use, and how much stands above the noise, by colour space."""

import torch

from clipless import data as sets
from clipless import losses, models
from clipless.audit import tightness

COLOURS = ("rgb", "yiq", "yuv", "grayscale", "hsv")
EXAMPLES = 256


def tightness_by_colour(root, device):
    """CIFAR-10, a small untrained CNN: quotients of gradient norm and bound, for each parameter.

    `signal_to_noise` is the norm of the mean gradient over the noise's, for batches of 4,096 at
    noise multiplier 1.
    """
    found = sets.load("cifar10", root=str(root), download=False)
    images, labels = found.train[0][:EXAMPLES], found.train[1][:EXAMPLES]
    rows = []
    for colour in COLOURS:
        torch.manual_seed(0)
        x = sets.ColourSpace(colour)(images)
        model = models.build("vgg", input_shape=tuple(x.shape[1:]), classes=10).to(device)
        criterion = losses.CrossEntropy(tau=32.0)
        measured = tightness(model, (x.to(device), labels.to(device)), loss=criterion,
                             examples=EXAMPLES)  # fmt: skip
        model.zero_grad()
        criterion(model(x.to(device)), labels.to(device)).backward()
        gradients = dict(model.named_parameters())
        for each in measured.parameters:
            weight = gradients[each.name]
            noise = each.bound / 4096 * weight.numel() ** 0.5
            rows.append({
                "colour": colour, "parameter": each.name, "bound": each.bound,
                "mean": each.mean, "largest": each.largest, "edges": list(measured.edges),
                "counts": list(each.counts),
                "signal_to_noise": weight.grad.norm().item() / noise,
            })  # fmt: skip
        print(f"{colour}: mean gradient norm over its bound, of {EXAMPLES} images")
        for each in measured.parameters:
            print(f"  {each.name:24} {each.mean:8.4f}   largest {each.largest:8.4f}", flush=True)
    return rows
