"""Train a private head on the features of a frozen network that knows nothing of the private data.

The data are scikit-learn's bundled digits of 8 x 8 pixels, each somewhere in an image of 12 x 12.
The digits 0 to 4 play the public data: an ordinary ReLU network with batch normalisation is trained
on them without privacy, then frozen. The digits 5 to 9 are private: only a small Lipschitz head is
trained on their features, at a stated (epsilon, delta). The same is done on the raw pixels, to see
what the public data are worth.

The guarantee covers the private digits, because the backbone never saw them. A backbone that was
trained or chosen with private data would void it. Each of the two heads has a guarantee of its own;
whoever publishes both spends both.

    python examples/frozen_backbone.py [--epsilon 2.0] [--seed 0] [--quick]
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from clipless import losses, models
from clipless.privacy import PrivacyOptions, ProvedBounds
from clipless.training import FitResult, LayerAdam, Trainer, TrainingOptions

PUBLIC = 5  # the digits below it
SIZE = 12


def digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Images with pixels in [0, 1], and labels: public, as they are; private; for testing."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16.0
    labels = torch.tensor(data.target)
    public = labels < PUBLIC
    x = torch.cat([placed(image[None]) for image in images[~public]])
    y = labels[~public] - PUBLIC
    train, test = train_test_split(range(len(x)), test_size=0.25, random_state=0, stratify=y)
    return (images[public], labels[public]), (x[train], y[train]), (x[test], y[test])


def placed(images: Tensor) -> Tensor:
    """Put images of 8 x 8 at one random place of a larger one."""
    room = SIZE - 8
    top, left = torch.randint(room + 1, (2,)).tolist()
    return nn.functional.pad(images, (left, room - left, top, room - top))


def backbone() -> nn.Sequential:
    """An ordinary network: no layer of it has a bound, and none needs one."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.AdaptiveMaxPool2d(1), nn.Flatten(),
        nn.BatchNorm1d(64, affine=False),  # centred features use the sphere of the head well
    )  # fmt: skip


def pretrain(network: nn.Module, x: Tensor, y: Tensor, *, steps: int) -> None:
    """Train the network, with a linear layer on top, on the public digits; then freeze it.

    The task is to name the digit and by how many quarters it was turned, which needs more features
    than the five names alone.
    """
    top = nn.Linear(64, 4 * PUBLIC)
    parameters = [*network.parameters(), *top.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.05)
    network.train()
    for _ in range(steps):
        batch = torch.randint(len(x), (32,))
        turned = [placed(torch.rot90(x[batch], quarters, dims=(2, 3))) for quarters in range(4)]
        target = torch.cat([y[batch] + PUBLIC * quarters for quarters in range(4)])
        optimizer.zero_grad()
        nn.functional.cross_entropy(top(network(torch.cat(turned))), target).backward()
        optimizer.step()
    network.eval().requires_grad_(False)


def train_head(
    train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], options: argparse.Namespace
) -> tuple[FitResult, float]:
    """Train a linear head privately; return the result and the test accuracy."""
    model = models.build("head", features=train[0].shape[1], classes=5)
    trainer = Trainer(
        model,
        losses.CrossEntropy(tau=20.0),
        target_epsilon=options.epsilon,
        batch_size=len(train[0]),
        steps=60 if options.quick else 300,
        bounds=ProvedBounds(product_clip=0.5),
        options=PrivacyOptions(sampling="full_batch"),
        training=TrainingOptions(
            optimizer=lambda parameters: LayerAdam(parameters, lr=0.02),
            average=0.9,
        ),
    )
    result = trainer.fit(train)
    return result, trainer.evaluate(test)["accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epsilon", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=None, help="of the initial weights")
    parser.add_argument("--quick", action="store_true", help="a fifth of the training")
    options = parser.parse_args()
    if options.seed is not None:
        torch.manual_seed(options.seed)
    (x_public, y_public), (x, y), (x_test, y_test) = digits()

    start = time.perf_counter()
    network = backbone()
    pretrain(network, x_public, y_public, steps=50 if options.quick else 250)
    print(f"Backbone: trained on {len(x_public)} public digits in "
          f"{time.perf_counter() - start:.0f} s, then frozen.")  # fmt: skip

    start = time.perf_counter()
    features = models.extract_features(network, x)
    test = (models.extract_features(network, x_test), y_test)
    result, accuracy = train_head((features, y), test, options)
    print(f"Head: {features.shape[1]} features of {len(x)} private digits, {result.steps} steps in "
          f"{time.perf_counter() - start:.0f} s.")  # fmt: skip
    print(f"Test accuracy {accuracy:.1%} at epsilon {result.epsilon:.3g}, "
          f"delta {result.delta:g}.")  # fmt: skip

    pixels = (x.flatten(1), y), (x_test.flatten(1), y_test)
    result, accuracy = train_head(*pixels, options)
    print(f"The same head on raw pixels: {accuracy:.1%} at epsilon {result.epsilon:.3g}.")


if __name__ == "__main__":
    main()
