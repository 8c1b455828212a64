"""Your ResNet: an ordinary network with GroupNorm, trained privately as it is.

    python examples/any_resnet.py --steps 200

Images are made on the spot: blobs in one of four corners. Everything below `make_private` is an
ordinary loop.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from clipless import PrivacyEngine, losses, validate


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(4, channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(4, channels),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


def images(count: int) -> tuple[Tensor, Tensor]:
    """Noisy images with a bright spot in the corner that is their class."""
    labels = torch.randint(4, (count,))
    x = 0.5 * torch.randn(count, 1, 12, 12)
    for corner in range(4):
        row, column = 6 * (corner // 2), 6 * (corner % 2)
        x[labels == corner, :, row + 1 : row + 5, column + 1 : column + 5] += 1.0
    return x, labels


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--epsilon", type=float, default=3.0)
    options = parser.parse_args()
    torch.manual_seed(0)
    (x, y), (test_x, test_y) = images(4000), images(1000)

    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), Block(8), nn.MaxPool2d(2), Block(8),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4),
    )  # fmt: skip
    print(validate(model, x[:1]))
    criterion = losses.CrossEntropy()
    engine = PrivacyEngine()
    _, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=200), criterion=criterion,
        target_epsilon=options.epsilon, epochs=options.steps / 20, bounds="enforced",
    )  # fmt: skip
    taken = 0
    while taken < engine.plan.steps:
        for inputs, targets in loader:
            if taken == engine.plan.steps:
                break
            optimizer.zero_grad()
            criterion(model(inputs), targets).backward()
            optimizer.step()
            taken += 1
    model.eval()
    with torch.no_grad():
        accuracy = float((model(test_x).argmax(1) == test_y).float().mean())
    print(engine.report())
    print(f"test accuracy {accuracy:.3f} at epsilon {engine.get_epsilon():.2f}")


if __name__ == "__main__":
    main()
