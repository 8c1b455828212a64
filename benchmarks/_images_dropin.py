"""The drop-in ablation: one Lipschitz network under this library, and under clipped DP-SGD."""

import time
import warnings
from collections import OrderedDict

import torch
from torch.utils.data import DataLoader, TensorDataset

from clipless import data as sets
from clipless import losses, to_torch
from clipless import nn as lip
from clipless.privacy import ProvedBounds
from clipless.training import Callback, LayerAdam, Trainer, TrainingOptions

EPSILON, DELTA, BATCH, EPOCHS, EXAMPLES = 3.0, 1e-5, 1000, 8, 10_000
# Neither side was searched for: accuracies of one try each.
LEARNING_RATE, PRODUCT_CLIP, CLIP = 0.01, 0.1, 1.0


class Clock:
    """Seconds of computation: of the process on a CPU, whose other users then do not count."""

    def __init__(self, device):
        self._device = torch.device(device)
        self.begun = self.now()

    def now(self):
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()

    def seconds(self):
        return self.now() - self.begun


class Epochs(Callback):
    """Measures from the end of the first step, when all preparation is done."""

    def __init__(self, device):
        self.clock, self.seconds, self._device = None, 0.0, device

    def on_step_end(self, trainer):
        if self.clock is None:
            self.clock = Clock(self._device)
        self.seconds = self.clock.seconds()


def network():
    """A GroupSort network on 28 x 28 pixels, drawn from torch's generator."""
    return torch.nn.Sequential(OrderedDict(
        guard=lip.BoundedInput(1.0, mode="sphere"), flatten=torch.nn.Flatten(),
        first=lip.SpectralLinear(784, 64), sort=lip.GroupSort(2),
        last=lip.SpectralLinear(64, 10, constraint="ball"),
    ))  # fmt: skip


def dropin(root, device):
    """MNIST's first 10,000 images, both sides with the same network, batches, epochs, budget."""
    found = sets.load("mnist", root=str(root), download=False)
    train = tuple(part[:EXAMPLES].to(device) for part in found.train)
    test = tuple(part.to(device) for part in found.test)
    rows = []
    for name, side in (("clipless", _clipless), ("opacus", _opacus)):
        torch.manual_seed(0)
        model, epsilon, seconds = side(network().to(device), train, device)
        with torch.no_grad():
            right = (model(test[0]).argmax(1) == test[1]).double().mean().item()
        steps = EPOCHS * EXAMPLES // BATCH - 1
        rows.append({
            "method": name, "dataset": "mnist, 10,000 images", "epsilon": round(float(epsilon), 3),
            "delta": DELTA, "accuracy": round(right, 4),
            "seconds_per_epoch": round(seconds / steps * EXAMPLES / BATCH, 4),
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def _clipless(model, train, device):
    watch = Epochs(device)
    trainer = Trainer(
        model,
        losses.CrossEntropy(tau=256.0),
        target_epsilon=EPSILON,
        target_delta=DELTA,
        batch_size=BATCH,
        epochs=EPOCHS,
        bounds=ProvedBounds(product_clip=PRODUCT_CLIP),
        training=TrainingOptions(
            average=0.95,
            optimizer=lambda parameters: LayerAdam(parameters, lr=LEARNING_RATE),
            device=device,
            callbacks=[watch],
            progress=False,
        ),
    )
    result = trainer.fit(train)
    trainer.average.copy_to(model)
    return model.eval(), result.epsilon, watch.seconds


def _opacus(model, train, device):
    from opacus import PrivacyEngine

    # Plain torch, since its engine hooks torch's layers; weights are not kept 1-Lipschitz.
    plain = to_torch(model)
    plain.train().requires_grad_(True)
    loader = DataLoader(TensorDataset(*train), batch_size=BATCH)
    optimizer = torch.optim.Adam(plain.parameters(), lr=LEARNING_RATE)
    engine = PrivacyEngine(accountant="prv")
    criterion = torch.nn.CrossEntropyLoss()
    clock = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, optimizer, loader = engine.make_private_with_epsilon(
            module=plain, optimizer=optimizer, data_loader=loader, target_epsilon=EPSILON,
            target_delta=DELTA, epochs=EPOCHS, max_grad_norm=CLIP,
        )  # fmt: skip
        for _ in range(EPOCHS):
            for x, y in loader:
                optimizer.zero_grad()
                criterion(plain(x.to(device)), y.to(device)).backward()
                optimizer.step()
                clock = clock or Clock(device)
        seconds = clock.seconds()
    return plain.eval(), engine.get_epsilon(DELTA), seconds
