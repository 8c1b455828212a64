"""An attack on the constants: it looks for the output with the largest gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from clipless.losses import Loss

TargetMaker = Callable[[int, Sequence[int], torch.Generator], Tensor]
POINTS, STEPS = 360, 30


def gradients(loss: Loss, output: Tensor, target: Tensor) -> Tensor:
    """Gradients of every example on its own, shape of `output`."""

    def one(example: Tensor, label: Tensor) -> Tensor:
        return loss.per_example(example[None], label[None]).sum()

    result: Tensor = torch.func.vmap(torch.func.grad(one))(output, target)
    return result


def starting_points(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Rows: zero, ties, corners and spikes of every size, then random ones of every size."""
    size = math.prod(shape)
    one_hot = torch.eye(size, dtype=torch.float64)
    corners = torch.randint(0, 2, (20, size), generator=generator).double() * 2 - 1
    shapes = torch.cat([torch.zeros(1, size), torch.ones(1, size), one_hot, -one_hot, corners])
    pick = torch.randint(0, len(shapes), (POINTS // 2,), generator=generator)
    sizes = 10.0 ** torch.tensor([-12.0, -1.0, 0.0, 1.0, 3.0, 30.0], dtype=torch.float64)
    adversarial = shapes[pick] * sizes[torch.arange(POINTS // 2) % len(sizes)].unsqueeze(1)
    random = torch.randn(POINTS // 2, size, generator=generator, dtype=torch.float64)
    spread = torch.randn(POINTS // 2, 1, generator=generator, dtype=torch.float64)
    return torch.cat([adversarial, random * 10.0**spread])


def strongest_gradient(loss: Loss, shape: Sequence[int], make_targets: TargetMaker) -> float:
    """Largest gradient norm of one example that hill climbing from many points finds.

    Every point climbs on its own; a step that does not help is taken back and halved.
    """
    generator = torch.Generator().manual_seed(7)
    target = make_targets(POINTS, shape, generator)
    output = starting_points(shape, generator)
    rates = torch.rand(POINTS, 1, generator=generator, dtype=torch.float64)
    record = torch.full((POINTS, 1), -1.0, dtype=torch.float64)
    summit, direction = output, torch.zeros_like(output)
    for _ in range(STEPS):
        output.requires_grad_()
        found = gradients(loss, output.reshape(POINTS, *shape), target)
        norms = found.reshape(POINTS, -1).norm(dim=1, keepdim=True)
        assert bool(norms.isfinite().all())
        higher, record = norms.detach() > record, torch.maximum(record, norms.detach())
        if not norms.requires_grad:
            break
        (uphill,) = torch.autograd.grad(norms.sum(), output)
        uphill = torch.nn.functional.normalize(uphill, dim=1)
        summit = torch.where(higher, output.detach(), summit)
        direction = torch.where(higher, uphill, direction)
        rates = torch.where(higher, rates, rates / 2)
        output = summit + rates * direction
    return float(record.max())


@pytest.fixture(scope="session")
def attack() -> Callable[[Loss, Sequence[int], TargetMaker], float]:
    """Return the largest gradient found, over the claimed constant; it must not exceed either."""

    def run(loss: Loss, shape: Sequence[int], make_targets: TargetMaker) -> float:
        found, claimed = strongest_gradient(loss, shape, make_targets), loss.lipschitz_for(shape)
        assert found <= claimed * (1 + 1e-9), f"{loss}: found {found}, claimed {claimed}"
        assert claimed <= loss.lipschitz * (1 + 1e-12)
        return found / claimed

    return run


@pytest.fixture(scope="session")
def per_example_gradients() -> Callable[[Loss, Tensor, Tensor], Tensor]:
    return gradients


@pytest.fixture(scope="session")
def class_indices() -> TargetMaker:
    return lambda count, shape, generator: torch.randint(0, shape[0], (count,), generator=generator)


@pytest.fixture(scope="session")
def signs() -> TargetMaker:
    return lambda count, shape, generator: (
        2 * torch.randint(0, 2, (count, *shape), generator=generator) - 1
    )


@pytest.fixture(scope="session")
def real_targets() -> TargetMaker:
    """Zeros, ordinary values and values far outside any ball."""

    def make(count: int, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        values = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
        sizes = torch.tensor([0.0, 1.0, 3.0, 1e6], dtype=torch.float64)[torch.arange(count) % 4]
        return values * sizes.reshape(-1, *[1 for _ in shape])

    return make
