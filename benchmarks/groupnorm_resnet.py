"""CIFAR-10 from scratch at epsilon 8: a GroupNorm ResNet with thresholds for every layer.

    python benchmarks/groupnorm_resnet.py --data FOLDER --compile --precision bfloat16

`FOLDER` holds CIFAR-10's binary batches. The recipe is the published one (De et al. 2022), cut to
minutes: large batches, several random crops and flips of each example averaged before it is
bounded, an average of the weights. It is chosen on training images that are held out
(`--held-out`); the test images are looked at with the chosen one alone. `--plain` trains the same
network without privacy. On a CPU: a smoke run, `--examples 512 --steps 2 --batch 64 --width 16`.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from _results import save
from enforced_transformer import resnet18
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from clipless import PrivacyEngine, losses
from clipless.data import Compose, RandomCrop, RandomFlip
from clipless.privacy import BatchOptions, EnforcedBounds, LargeDelta, PrivacyOptions

DELTA = LargeDelta(1e-5)
HELD_OUT = 5000
MEAN, SPREAD = (0.5, 0.5, 0.5), 0.25
"""Public constants, and not those of the data."""


def images(paths: list[Path]) -> tuple[Tensor, Tensor]:
    raw = torch.cat([torch.frombuffer(bytearray(p.read_bytes()), dtype=torch.uint8) for p in paths])
    rows = raw.view(-1, 3073)
    x = rows[:, 1:].view(-1, 3, 32, 32).float() / 255
    return (x - torch.tensor(MEAN).view(3, 1, 1)) / SPREAD, rows[:, 0].long()


AUGMENT = Compose(RandomCrop(padding=4), RandomFlip())


class Average:
    """An exponential average of the weights, which are public."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.steps = decay, 0
        self.values = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.steps += 1
        keep = min(self.decay, (1 + self.steps) / (10 + self.steps))
        for own, p in zip(self.values, model.parameters(), strict=True):
            own.lerp_(p, 1 - keep)

    @torch.no_grad()
    def put(self, model: nn.Module) -> None:
        for own, p in zip(self.values, model.parameters(), strict=True):
            p.copy_(own)


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor, device: str) -> float:
    model.eval()
    right = sum(
        int((model(a.to(device)).argmax(1).cpu() == b).sum())
        for a, b in zip(x.split(500), y.split(500), strict=True)
    )
    model.train()
    return right / len(x)


def train(
    model: nn.Module, data: TensorDataset, options: argparse.Namespace
) -> tuple[Average, dict[str, Any]]:
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=options.momentum)
    criterion, engine = losses.CrossEntropy(), PrivacyEngine()
    batches = BatchOptions(
        micro_batch_size=options.micro_batch, pad=True if options.compile else None,
        augment=AUGMENT if options.views else None, views=max(1, options.views),
    )  # fmt: skip
    _, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=optimizer, criterion=criterion, target_epsilon=options.epsilon,
        target_delta=DELTA, data_loader=DataLoader(data, batch_size=options.batch),
        bounds=EnforcedBounds(thresholds=options.start, follow=True, quantile=options.quantile),
        compile=options.compile,
        options=PrivacyOptions(steps=options.steps, precision=options.precision, batches=batches),
    )  # fmt: skip
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    average, step = Average(model, options.average), 0
    while step < options.steps:
        for x, y in loader:
            if loader.current.micro_batch == 0:
                optimizer.zero_grad()
            criterion(model(x.to(options.device)), y.to(options.device)).backward()
            if loader.current.is_last:
                optimizer.step()
                rates.step()
                average.update(model)
                step += 1
                if step == options.steps:
                    break
    found = {
        "epsilon": engine.get_epsilon(DELTA), "compiled": engine.session.compiled,
        "noise_multiplier": engine.session.plan.noise_multiplier,
    }  # fmt: skip
    engine.detach()
    return average, found


def train_plainly(
    model: nn.Module, data: TensorDataset, options: argparse.Namespace
) -> tuple[Average, dict[str, Any]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    average, step = Average(model, options.average), 0
    generator = torch.Generator().manual_seed(0)
    while step < options.steps:
        for x, y in DataLoader(data, batch_size=256, shuffle=True):
            x = AUGMENT(x, generator) if options.views else x
            optimizer.zero_grad()
            output = model(x.to(options.device))
            nn.functional.cross_entropy(output, y.to(options.device)).backward()
            optimizer.step()
            average.update(model)
            step += 1
            if step == options.steps:
                break
    return average, {}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--micro-batch", type=int, default=1024)
    parser.add_argument("--views", type=int, default=4, help="augmented copies of an example")
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--quantile", type=float, default=0.95)
    parser.add_argument("--start", type=float, default=1.0, help="where thresholds begin")
    parser.add_argument("--average", type=float, default=0.99)
    parser.add_argument("--precision", default="float32", choices=["float32", "tf32", "bfloat16"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--examples", type=int)
    parser.add_argument("--held-out", action="store_true", help="choose a recipe: no test images")
    parser.add_argument("--plain", action="store_true", help="without privacy")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.precision == "tf32":
        torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = options.precision == "tf32"
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    x, y = images(sorted(options.data.glob("data_batch_*.bin")))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    if options.held_out:
        test = x[order[:HELD_OUT]], y[order[:HELD_OUT]]
        order = order[HELD_OUT:]
    else:
        test = images([options.data / "test_batch.bin"])
    order = order[: options.examples]
    data = TensorDataset(x[order], y[order])
    rows = []
    for seed in range(options.seeds):
        torch.manual_seed(seed)
        model = resnet18(options.width).to(options.device).train()
        begun = time.perf_counter()
        average, found = (train_plainly if options.plain else train)(model, data, options)
        seconds = time.perf_counter() - begun
        last = accuracy(model, *test, options.device)
        average.put(model)
        rows.append({
            "seed": seed, "accuracy": round(accuracy(model, *test, options.device), 4),
            "accuracy_of_last_weights": round(last, 4), "seconds": round(seconds, 1), **found,
        })  # fmt: skip
        print(rows[-1], flush=True)
    settings = {key: str(value) for key, value in vars(options).items() if key != "data"}
    name = f"groupnorm-resnet-{options.device}" + "-plain" * options.plain
    save(
        name + "-held-out" * options.held_out,
        {"rows": rows, "settings": settings},
        notes=f"{'held-out training' if options.held_out else 'test'} images; {len(data)} trained",
    )


if __name__ == "__main__":
    main()
