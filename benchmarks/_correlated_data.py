"""CIFAR-10 and Adult as vectors that need no private statistics: maps of one example each."""

import csv
import math
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from clipless.data import load
from clipless.images import ImageFeatures

Sets = tuple[Tensor, Tensor, Tensor, Tensor]
"""Training inputs and labels, test inputs and labels."""

_NUMBERS = {0: 45.0, 2: 4e5, 4: 16.0, 10: 1e5, 11: 5e3, 12: 100.0}
"""Columns of Adult that hold numbers, and a public scale for each (`adult.names`)."""
_LONG_TAILS = (2, 10, 11)


def cifar10(folder: Path) -> Sets:
    """Scattering coefficients, averaged over 4 x 4 positions: 972 features of norm 1."""
    kept = folder / "cifar10-scattering-972.pt"
    if kept.exists():
        found: Sets = torch.load(kept, weights_only=True)
        return found
    data = load("cifar10", root=str(folder), download=False)
    front = ImageFeatures((3, 32, 32), mirror=True, root=True)
    parts = []
    for images, labels in (data.train, data.test):
        starts = range(0, len(images), 500)
        rows = [_pooled(front(images[at : at + 500])) for at in starts]
        parts += [torch.cat(rows), labels]
    torch.save(tuple(parts), kept)
    return parts[0], parts[1], parts[2], parts[3]


@torch.no_grad()
def _pooled(features: Tensor) -> Tensor:
    """Groups of 9 channels are centred and scaled, each image by itself; then the unit sphere."""
    normal = functional.group_norm(functional.avg_pool2d(features, 2), 27)
    return functional.normalize(functional.avg_pool2d(normal, 2).flatten(1))


def adult(folder: Path) -> Sets:
    """UCI's own split; numbers over public scales, indicators of `adult.names`; norm 1."""
    categories = _categories(folder / "adult" / "adult.names")
    parts: list[Tensor] = []
    for name in ("adult.data", "adult.test"):
        with (folder / "adult" / name).open(newline="") as file:
            rows = [[cell.strip() for cell in row] for row in csv.reader(file) if len(row) == 15]
        parts += [
            functional.normalize(torch.tensor([_encoded(row, categories) for row in rows])),
            torch.tensor([int(row[14].startswith(">50K")) for row in rows]),
        ]
    return parts[0], parts[1], parts[2], parts[3]


def _categories(names: Path) -> dict[int, list[str]]:
    """The values that each column may have, as its description lists them."""
    lines = [line for line in names.read_text().splitlines() if ":" in line and line[:1].isalpha()]
    lines = [line for line in lines if not line.startswith("|")][-14:]
    values = [line.split(":", 1)[1].strip().rstrip(".").split(", ") for line in lines]
    return {column: each for column, each in enumerate(values) if column not in _NUMBERS}


def _encoded(row: list[str], categories: dict[int, list[str]]) -> list[float]:
    found = [0.5]
    for column, cell in enumerate(row[:14]):
        if column not in _NUMBERS:
            found += [float(cell == each) for each in categories[column]]
            continue
        number, scale = float(cell), _NUMBERS[column]
        logarithm = column in _LONG_TAILS
        found.append(math.log1p(number) / math.log1p(scale) if logarithm else number / scale)
    return found


SETS = {"Adult": (adult, 2), "CIFAR-10": (cifar10, 10)}
"""How each is read, and its number of classes."""
