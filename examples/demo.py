"""Train a private classifier on real data, and say what was proved.

The data are scikit-learn's bundled digits: 8 x 8 images, 1,347 for training, 450 for testing. The
private network is trained at a stated (epsilon, delta) and compared with the same network trained
without privacy; its Lipschitz constant certifies its decisions. The run is kept in a folder of its
own below runs/demo, with a report to open in a browser. Takes less than a minute.

    python examples/demo.py [--epsilon 2.0] [--run-dir FOLDER]
"""

import argparse
import time
from pathlib import Path

import torch
from rich.console import Console
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import clipless
from clipless import losses
from clipless import nn as lip
from clipless.privacy import PrivacyOptions
from clipless.report import BoundsCallback, SignalCallback, write_report
from clipless.training import LayerAdam, Trainer, TrainingOptions

TEMPERATURE, STEPS, LEARNING_RATE, CLIP_FRACTION = 10.0, 500, 0.02, 0.3
RADII = (0.0, 0.1, 0.25, 0.5)


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images with pixels in [0, 1], and labels: training and test."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32) / 16.0
    labels = torch.tensor(data.target)
    train, test = train_test_split(
        range(len(images)), test_size=0.25, random_state=0, stratify=data.target
    )
    return images[train], labels[train], images[test], labels[test]


def network() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        lip.BoundedInput(norm=3.0),
        torch.nn.Flatten(),
        lip.SpectralLinear(64, 32, constraint="ball"),
        lip.GroupSort(2),
        lip.SpectralLinear(32, 10, constraint="ball"),
    )


def accuracy(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


def certified_accuracy(
    logits: torch.Tensor, y: torch.Tensor, lipschitz: float, radius: float
) -> float:
    """Fraction that is right and stays right for every change of the image of at most `radius`."""
    top = logits.topk(2)
    certified = (top.values[:, 0] - top.values[:, 1]) / (2**0.5 * lipschitz)
    return ((top.indices[:, 0] == y) & (certified >= radius)).float().mean().item()


def train_plainly(x: torch.Tensor, y: torch.Tensor) -> torch.nn.Module:
    """The same network and number of steps, without noise or clipping, projected all the same."""
    model, criterion = network(), losses.CrossEntropy(tau=TEMPERATURE)
    optimizer = LayerAdam(model.parameters(), lr=LEARNING_RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        clipless.project(model)
    return model


def new_folder() -> Path:
    """The first of runs/demo/1, runs/demo/2, ... that is not there: no run overwrites another."""
    number = 1
    while (folder := Path("runs") / "demo" / str(number)).exists():
        number += 1
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epsilon", type=float, default=2.0)
    parser.add_argument("--run-dir", default=None, help="keep the run here; it can be resumed")
    parser.add_argument("--seed", type=int, default=None, help="of the initial weights")
    options = parser.parse_args()
    console = Console()
    if options.seed is not None:
        torch.manual_seed(options.seed)
    x, y, x_test, y_test = digits()
    run_dir = new_folder() if options.run_dir is None else Path(options.run_dir)

    model, criterion = network(), losses.CrossEntropy(tau=TEMPERATURE)
    clipless.clip_products(model, fraction=CLIP_FRACTION, loss=criterion, input_shape=(8, 8))
    report = clipless.sensitivity(model, loss=criterion, input_shape=(8, 8))
    console.print(report)

    start = time.perf_counter()
    trainer = Trainer(
        model,
        criterion,
        target_epsilon=options.epsilon,
        batch_size=len(x),
        steps=STEPS,
        run_dir=run_dir,
        options=PrivacyOptions(sampling="full_batch"),
        training=TrainingOptions(
            optimizer=lambda parameters: LayerAdam(parameters, lr=LEARNING_RATE),
            average=0.95,
            checkpoint_every=100,
            callbacks=[BoundsCallback(), SignalCallback()],
        ),
    )
    result = trainer.fit((x, y), validation_data=(x_test, y_test))
    seconds = time.perf_counter() - start
    logits = trainer.predict(x_test)
    private = (logits.argmax(1) == y_test).float().mean().item()

    plain = accuracy(train_plainly(x, y), x_test, y_test)
    console.print()
    console.print(trainer.report())
    console.print(
        f"\n[bold]Test accuracy {private:.1%} at epsilon {result.epsilon:.3g}, "
        f"delta {result.delta:g}[/bold] ({len(x)} training examples, {result.steps} steps, "
        f"{seconds:.0f} s). The same network without privacy: {plain:.1%}."
    )
    certified = [
        f"{certified_accuracy(logits, y_test, report.lipschitz, r):.1%} at {r:g}" for r in RADII
    ]
    console.print(
        "Certified accuracy, for any change of an image (pixels from 0 to 1) of Euclidean norm up "
        f"to r: {', '.join(certified)}."
    )
    write_report(run_dir)
    console.print(f"The report is in {run_dir / 'report.html'}: open it in a browser.")


if __name__ == "__main__":
    main()
