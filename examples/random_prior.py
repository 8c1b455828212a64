"""A private classifier of photographs whose knowledge of the world comes from random processes.

1. Images are drawn from random processes, on the training device, as fast as they are looked at.
2. A wide residual network learns, without labels, to tell them apart however they are cropped and
   recoloured; then it is frozen. It saw no photograph, so it may use batch normalisation and
   anything else, and costs no privacy.
3. Features of the private images are standardised by private statistics, and a linear layer is
   trained on them, both within one total epsilon.

    python examples/random_prior.py --seconds 240 --backbone backbone.pt --json rows.json

Made for a GPU: the 240 seconds above are those of one, in which a CPU sees far fewer images.
Without a GPU it says so, and --device cpu insists.

The backbone is kept: the same command goes on from step 3 if the file is there. Each row of the
table has a guarantee of its own; whoever publishes several of them spends several.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from _random_images import random_images, views
from torch import Tensor, nn

from clipless import losses, models
from clipless import nn as lip
from clipless.data import load
from clipless.images import ImageFeatures, ImageRule, decorrelation
from clipless.privacy import LargeDelta, Ledger, PrivacyOptions, PrivacyReport, Relation
from clipless.statistics import ChannelStatistics, PrivateRows, fit_channels, fit_covariance
from clipless.training import LayerAdam, Trainer, TrainingOptions

POOLS = ((3, 4), (2, 4), (1, 4))
"""Which features: (stage, n) averages the maps of a stage of the backbone over n x n fields."""
HEAD = {"temperature": 256.0, "gradient_clip": 0.2, "learning_rate": 0.0005}
"""What replaces choices of `ImageRule`."""
DELTA = LargeDelta(1e-5)
"""That of the papers to compare with; the default would be 0.1/N."""


class Block(nn.Module):
    """Two convolutions and a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut = nn.Identity() if inputs == outputs else nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.main(x) + self.shortcut(x))


class Backbone(nn.Module):
    """Sixteen layers in three stages of 16, 32 and 64 channels times `width`; returns all three."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.channels = (16 * width, 32 * width, 64 * width)
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16))
        inputs = (16, *self.channels)
        self.stages = nn.ModuleList(
            nn.Sequential(Block(inputs[k], inputs[k + 1], stride), Block(*[inputs[k + 1]] * 2, 1))
            for k, stride in enumerate((1, 2, 2))
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        x = F.relu(self.stem(4 * x.expand(-1, 3, -1, -1) - 2))
        outputs = []
        for stage in self.stages:
            x = stage(x)
            outputs.append(x)
        return outputs


def spread_and_agree(first: Tensor, second: Tensor) -> Tensor:
    """Alignment and uniformity: views of one image close together, images all over the sphere."""
    count = len(first)
    itself = torch.eye(count, dtype=torch.bool, device=first.device)

    def crowding(z: Tensor) -> Tensor:  # logarithm of the mean of exp(-2 |a - b|^2) over pairs
        close = (4 * (z @ z.T) - 4).masked_fill(itself, -math.inf)
        return close.flatten().logsumexp(dim=0) - math.log(count * (count - 1))

    distance = (first - second).square().sum(dim=1).mean()
    return distance + (crowding(first) + crowding(second)) / 2


def pretrain(
    *,
    seconds: float,
    steps: int | None = None,
    width: int = 4,
    batch_size: int = 1024,
    learning_rate: float = 0.4,
    device: torch.device | str = "cpu",
    compile: bool = False,
    seed: int = 0,
    progress: bool = True,
) -> Backbone:
    """Train a backbone on random images for so long, or so many steps at most; then freeze it.

    There is no argument by which data could come in. `compile` pays off after some minutes.
    """
    begun = time.monotonic()
    torch.manual_seed(seed)
    place = torch.device(device)
    fast = place.type == "cuda"
    backbone = Backbone(width).to(place, memory_format=torch.channels_last)
    last = backbone.channels[-1]
    projection = nn.Sequential(
        nn.Linear(last, 2 * last), nn.BatchNorm1d(2 * last), nn.ReLU(), nn.Linear(2 * last, 128)
    ).to(place)

    def embed(x: Tensor) -> Tensor:
        with torch.autocast(place.type, torch.bfloat16, enabled=fast):
            z = projection(backbone(x)[-1].mean(dim=(2, 3)))
        return F.normalize(z.float())

    parameters = [*backbone.parameters(), *projection.parameters()]
    optimizer = torch.optim.SGD(parameters, momentum=0.9, nesterov=True, weight_decay=1e-4)
    look = torch.compile(embed) if compile else embed
    done, step, shown, warm = 0.0, 0, 0.0, begun
    while done < 1:
        # The schedule follows the clock, so that it ends in time on any machine.
        rate = learning_rate * min(1, 20 * done + 0.01) * (1 + math.cos(math.pi * done)) / 2
        optimizer.param_groups[0]["lr"] = rate
        with torch.no_grad():
            images = random_images(batch_size, device=place)
            both = torch.cat([views(images), views(images)])
            both = both.contiguous(memory_format=torch.channels_last)
        try:
            loss = spread_and_agree(*look(both).chunk(2))
            loss.backward()
        except Exception as error:
            if look is embed or step > 0:
                raise
            print(f"Not compiled: {type(error).__name__}. Slower, but the same.")
            look = embed
            continue
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 8 == 0 and fast:
            torch.cuda.synchronize()  # or the clock would be ahead of the work
        now = time.monotonic()
        warm = now if step == 1 else warm  # compiling is no part of the schedule
        done = max((now - warm) / max(begun + seconds - warm, 1e-9), step / steps if steps else 0)
        if progress and (done >= shown or done >= 1):
            shown += 0.1
            print(f"{min(done, 1):4.0%}  step {step}, {step * batch_size} images, "
                  f"loss {loss.item():.3f}", flush=True)  # fmt: skip
    return backbone.eval().requires_grad_(False)


class Pooled(nn.Module):
    """Stages averaged over fields, and over an image and its mirror image; flat, side by side."""

    def __init__(self, backbone: Backbone, pools: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.backbone = backbone
        self.pools = tuple(pools)

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        stages = [
            (a + b) / 2 for a, b in zip(self.backbone(x), self.backbone(x.flip(-1)), strict=True)
        ]
        fields = [F.adaptive_avg_pool2d(stages[stage - 1], n) for stage, n in self.pools]
        return torch.cat([each.flatten(1) for each in fields], dim=1)


def features_of(
    backbone: Backbone,
    images: Tensor,
    *,
    pools: Sequence[tuple[int, int]] = POOLS,
    root: bool = False,
    scattering: bool = True,
    batch_size: int = 500,
) -> list[Tensor]:
    """Return blocks of features, (n, channels, fields) each: functions of single images.

    `root` takes square roots, which evens out the sizes of rectified features. `scattering` adds
    the features of `clipless.images`.
    """
    pooled = Pooled(backbone, pools).eval()
    flat = models.extract_features(pooled, images, batch_size=batch_size)
    channels = [backbone.channels[stage - 1] for stage, _ in pools]
    parts = flat.split([c * n * n for c, (_, n) in zip(channels, pools, strict=True)], dim=1)
    blocks = [part.unflatten(1, (c, -1)) for part, c in zip(parts, channels, strict=True)]
    blocks = [block.sqrt() for block in blocks] if root else blocks
    if scattering:
        shape = (images.shape[1], images.shape[2], images.shape[3])
        front = ImageFeatures(shape, mirror=True, root=True).to(images.device)
        blocks.append(front.compute(images, batch_size=batch_size).flatten(2))
    return blocks


def common_fields(*blocks: Tensor) -> Tensor:
    """Blocks as one of (n, channels, fields): repeated fields leave averages over them as is."""
    fields = math.lcm(*(block.shape[2] for block in blocks))
    return torch.cat(
        [block.repeat_interleave(fields // block.shape[2], dim=2) for block in blocks], dim=1
    )


class Preparation(NamedTuple):
    """What private queries found about blocks of features, and what is done to these with it."""

    statistics: ChannelStatistics
    power: float
    mixes: Sequence[lip.ChannelMix]

    def standardize(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        """Take off the means of channels, and divide by a power of their deviations."""
        deviations, parts, start = self.statistics.deviation**self.power, [], 0
        for block in blocks:
            here = slice(start, start := start + block.shape[1])
            mean, deviation = (each[here, None] for each in (self.statistics.mean, deviations))
            parts.append((block - mean.to(block)) / deviation.to(block))
        return parts

    def __call__(self, blocks: Sequence[Tensor]) -> Tensor:
        """Standardise and decorrelate; every block has the same part in a vector of norm one."""
        whole = zip(self.standardize(blocks), self.mixes, strict=True)
        parts = [F.normalize(mix.to(block.device)(block).flatten(1)) for block, mix in whole]
        return torch.cat(parts, dim=1) / math.sqrt(len(parts))


def prepare(rows: PrivateRows, rule: ImageRule) -> Preparation:
    """Ask for means and deviations of channels, and the covariance in every block."""
    shapes, noise = rows.shapes[:-1], rule.query_noise
    found = fit_channels(
        rows,
        features=lambda *columns: common_fields(*columns[:-1]),
        channels=sum(shape[0] for shape in shapes),
        noise_multiplier=noise,
    )
    first = Preparation(found, rule.power, ())
    mixes = []
    for index, _ in enumerate(shapes):
        covariance = fit_covariance(
            rows,
            features=lambda *columns, index=index: first.standardize(columns[:-1])[index],
            noise_multiplier=noise,
        )
        assert rule.ridge is not None
        mixes.append(decorrelation(rule.ridge, covariance, noise=noise / len(rows)))
    return Preparation(found, rule.power, mixes)


class PrivateHead(NamedTuple):
    accuracy: float
    privacy: PrivacyReport
    seconds: float


def private_head(
    train: tuple[Sequence[Tensor], Tensor],
    test: tuple[Sequence[Tensor], Tensor],
    *,
    classes: int,
    epsilon: float,
    delta: float = DELTA,
    rule: ImageRule | None = None,
    progress: bool = False,
) -> PrivateHead:
    """Standardise blocks of features and train a linear layer on them, within `epsilon` in all."""
    begun = time.monotonic()
    blocks, labels = train
    chosen = rule or replace(ImageRule.choose(examples=len(labels), epsilon=epsilon), **HEAD)
    ledger = Ledger.in_memory(dataset_size=len(labels), relation=Relation.ZERO_OUT)
    rows = PrivateRows(*blocks, labels, ledger=ledger)
    prepared = prepare(rows, chosen)
    rows = rows.map_rows(lambda *columns: (prepared(columns[:-1]), columns[-1]))
    layer = lip.SpectralLinear(rows.shapes[0][0], classes, constraint="ball")
    nn.init.zeros_(layer.weight)
    trainer = Trainer(
        nn.Sequential(
            lip.BoundedInput(1.0, mode="sphere"), layer, lip.ClipGradient(chosen.gradient_clip)
        ).to(labels.device),
        losses.CrossEntropy(tau=chosen.temperature),
        target_epsilon=epsilon,
        target_delta=delta,
        batch_size=chosen.batch_size,
        steps=chosen.steps,
        options=PrivacyOptions(sampling="full_batch" if chosen.full_batch else "poisson"),
        training=TrainingOptions(
            optimizer=lambda parameters: LayerAdam(parameters, lr=chosen.learning_rate),
            average=chosen.average,
            ledger=ledger,
            progress=progress,
        ),
    )
    trainer.fit(rows.hand_over())
    privacy, seconds = trainer.report(), time.monotonic() - begun
    accuracy = trainer.evaluate((prepared(test[0]), test[1]))["accuracy"]
    return PrivateHead(accuracy=accuracy, privacy=privacy, seconds=seconds)


def experiment(
    train: tuple[Sequence[Tensor], Tensor],
    test: tuple[Sequence[Tensor], Tensor],
    *,
    dataset: str,
    classes: int,
    epsilons: Sequence[float],
    seeds: Sequence[int],
) -> list[dict[str, str | float]]:
    """Train a head for every budget and seed on the same features; print and return the rows."""
    rows: list[dict[str, str | float]] = []
    print("epsilon  seed  accuracy  seconds")
    for epsilon in epsilons:
        for seed in seeds:
            head = private_head(train, test, classes=classes, epsilon=epsilon)
            rows.append({
                "dataset": dataset, "recipe": f"{dataset}-random-prior-epsilon{epsilon:g}",
                "epsilon": head.privacy.epsilon, "delta": head.privacy.delta, "seed": seed,
                "accuracy": head.accuracy, "seconds": head.seconds,
            })  # fmt: skip
            print(f"{head.privacy.epsilon:7.4g}  {seed:4}  {head.accuracy:8.2%}  "
                  f"{head.seconds:7.1f}", flush=True)  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=240.0, help="for pretraining")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--backbone", type=Path, default=Path("backbone.pt"))
    parser.add_argument("--dataset", default="cifar10", help="images that a mirror leaves in class")
    parser.add_argument("--root", help="the folder of the data")
    parser.add_argument("--no-scattering", dest="scattering", action="store_false")
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1.0, 3.0, 8.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path, default=Path("random-prior.json"))
    parser.add_argument("--device", help="by default a GPU; cpu to insist on a CPU")
    options = parser.parse_args()
    if options.device is None and not torch.cuda.is_available():
        parser.error("there is no GPU, for which this is made; --device cpu tries all the same")
    options.device = options.device or "cuda"

    torch.backends.cudnn.benchmark = True  # all batches of pretraining have one shape
    # Features and private training in full precision, whose rounding the bounds allow for.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if options.backbone.exists():
        kept = torch.load(options.backbone, map_location=options.device, weights_only=True)
        backbone = Backbone(kept["width"]).to(options.device).eval().requires_grad_(False)
        backbone.load_state_dict(kept["state"])
    else:
        backbone = pretrain(
            seconds=options.seconds, width=options.width, batch_size=options.batch_size,
            device=options.device, compile=options.compile,
        )  # fmt: skip
        torch.save({"width": options.width, "state": backbone.state_dict()}, options.backbone)

    data = load(options.dataset, root=options.root)
    parts = []
    for images, labels in (data.train, data.test):
        images = images.to(options.device)
        blocks = features_of(backbone, images, scattering=options.scattering)
        parts.append((blocks, labels.to(options.device)))
    rows = experiment(
        *parts, dataset=options.dataset, classes=len(data.info.classes),
        epsilons=options.epsilons, seeds=options.seeds,
    )  # fmt: skip
    options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
