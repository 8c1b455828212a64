"""For people who know torch: a data set and a model by name, and a loop of one's own.

    python examples/by_name.py [--data mnist] [--root FOLDER] [--model lenet] [--epsilon 3]

Without `--root`, data are looked for in CLIPLESS_DATA and then downloaded; `--data digits` takes
scikit-learn's small digits, which need no download.
"""

import argparse

import torch

import clipless
from clipless import PrivacyEngine, losses, models
from clipless.training import LayerAdam

Pair = tuple[torch.Tensor, torch.Tensor]


def load(name: str, root: str | None) -> tuple[Pair, Pair, int]:
    """Training data, test data, and how many classes there are: public, not the largest label."""
    if name != "digits":
        from clipless import data

        loaded = data.load(name, root=root)
        return loaded.train, loaded.test, len(loaded.info.classes)
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.images).float()[:, None] / 16
    labels = torch.from_numpy(digits.target)
    return (images[:1400], labels[:1400]), (images[1400:], labels[1400:]), 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--root")
    parser.add_argument("--model", default="mlp", choices=models.names())
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--epochs", type=int, default=50)
    options = parser.parse_args()

    train, (test_images, test_labels), classes = load(options.data, options.root)
    model = models.build(options.model, input_shape=tuple(train[0].shape[1:]), classes=classes)
    criterion = losses.CrossEntropy(tau=16.0)
    # Bounds hold for every example, most gradients are shorter: clipped at 0.3 of them, less noise.
    clipless.clip_products(model, fraction=0.3, loss=criterion, input_shape=train[0].shape[1:])
    optimizer = LayerAdam(model.parameters(), lr=0.02)
    batch = max(len(train[0]) // 5, 64)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*train), batch_size=batch)

    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=loader, criterion=criterion,
        target_epsilon=options.epsilon, epochs=options.epochs,
    )  # fmt: skip
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    for _ in range(options.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            criterion(model(images), labels).backward()
            optimizer.step()
        scheduler.step()

    model.eval()
    with torch.no_grad():
        accuracy = (model(test_images).argmax(1) == test_labels).float().mean()
    print(f"{options.model} on {options.data}: test accuracy {accuracy:.1%}")
    print(engine.report())


if __name__ == "__main__":
    main()
