"""What thresholds cost in a network of its own kind: a private step over a plain one, in turns.

`--model encoder`: the shape of all-MiniLM (6 layers, 384 wide, 22M parameters), trained in full or
with rank-16 adapters; `--model resnet`: a ResNet-18 with GroupNorm for 32x32 images; `--model cnn`:
0.4M parameters. Private and plain steps alternate in one process, on batches of one size, so that
whatever else the machine does hits both alike; the figures are medians of neighbouring steps. The
private step has exact norms, thresholds that follow quantiles, and noise. Opacus (its hooks and its
ghost clipping) takes its turns too where it is asked for and installed.

On a GPU, the figures of the issue:

    python benchmarks/enforced_transformer.py --compile --precision tf32 --batch 256 \
        --tokens 128 --opacus hooks ghost
    ... --compile --precision bfloat16 --batch 256 --tokens 128
    ... --adapters;  ... --model resnet --batch 512;  ... --model cnn --batch 512

On a CPU: --batch 8 --tokens 32.
"""

import argparse
import itertools
import statistics
import time

import torch
from _results import save
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from clipless import PrivacyEngine, losses
from clipless.privacy import BatchOptions, EnforcedBounds, PrivacyOptions

WIDTH, WORDS, LAYERS = 384, 30522, 6


class Adapted(nn.Module):
    """A frozen linear layer and a low-rank correction."""

    def __init__(self, layer: nn.Linear, rank: int = 16) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


class Layer(nn.Module):
    def __init__(self, adapters: bool) -> None:
        super().__init__()
        kind = Adapted if adapters else nn.Identity
        made = {
            "query": (WIDTH, WIDTH), "key": (WIDTH, WIDTH), "value": (WIDTH, WIDTH),
            "out": (WIDTH, WIDTH), "wide": (WIDTH, 4 * WIDTH), "narrow": (4 * WIDTH, WIDTH),
        }  # fmt: skip
        for name, sizes in made.items():
            linear = nn.Linear(*sizes)
            setattr(self, name, kind(linear) if adapters else linear)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (12, 32)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        x = self.first(x + self.out(attended.transpose(1, 2).flatten(-2)))
        return self.second(x + self.narrow(nn.functional.gelu(self.wide(x))))


class Encoder(nn.Module):
    def __init__(self, tokens: int, *, adapters: bool) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(tokens, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.body = nn.Sequential(*(Layer(adapters) for _ in range(LAYERS)))
        if adapters:
            for module in (self.words, self.places, self.norm):
                module.requires_grad_(False)
            for module in self.modules():
                if isinstance(module, nn.LayerNorm):
                    module.requires_grad_(False)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        places = self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.body(self.norm(self.words(tokens) + places)).mean(1))


class Block(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.GroupNorm(16, width), nn.GroupNorm(16, width)])
        self.short: nn.Module = nn.Identity()
        if stride != 1 or before != width:
            self.short = nn.Conv2d(before, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.relu(self.norms[0](self.one(x)))
        return nn.functional.relu(self.norms[1](self.two(y)) + self.short(x))


def resnet18(width: int = 64, classes: int = 10) -> nn.Module:
    """A ResNet-18 for 32x32 images, with GroupNorm."""
    blocks: list[nn.Module] = []
    before = width
    for stage in range(4):
        for place in range(2):
            wide = width * 2**stage
            blocks.append(Block(before, wide, 2 if stage and not place else 1))
            before = wide
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1, bias=False), nn.GroupNorm(16, width), nn.ReLU(),
        *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes),
    )  # fmt: skip


def cnn() -> nn.Module:
    """Five convolutions and two dense layers, 0.4M parameters."""
    layers: list[nn.Module] = []
    for before, wide, stride in ((3, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 2)):
        layers += [nn.Conv2d(before, wide, 3, stride, 1), nn.ReLU()]
    dense = [nn.Flatten(), nn.Linear(2048, 64), nn.ReLU(), nn.Linear(64, 10)]
    return nn.Sequential(*layers, *dense)


def network(options: argparse.Namespace) -> nn.Module:
    if options.model == "encoder":
        return Encoder(options.tokens, adapters=options.adapters)
    return resnet18() if options.model == "resnet" else cnn()


def batch_of(options: argparse.Namespace, rows: int) -> tuple[Tensor, Tensor]:
    if options.model == "encoder":
        return torch.randint(WORDS, (rows, options.tokens)), torch.randint(2, (rows,))
    return torch.randn(rows, 3, 32, 32), torch.randint(10, (rows,))


class Turns:
    """Steps of one kind, timed."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.seconds = options, list[float]()

    def step(self, x: Tensor, y: Tensor) -> None:
        raise NotImplementedError

    def take(self, x: Tensor, y: Tensor) -> float:
        if self.options.device == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        self.step(x, y)
        if self.options.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun


class Plain(Turns):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.model = network(options).to(options.device)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4)
        self.run = torch.compile(self.model) if options.compile else self.model

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        rounded = self.options.precision == "bfloat16"
        with torch.autocast(self.options.device, torch.bfloat16, enabled=rounded):
            output = self.run(x)
        nn.functional.cross_entropy(output.float(), y).backward()
        self.optimizer.step()


class Enforced(Turns):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.model = network(options).to(options.device)
        self.criterion, self.engine = losses.CrossEntropy(), PrivacyEngine()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        x, y = (each.to(options.device) for each in batch_of(options, 8 * options.batch))
        _, self.optimizer, self.loader = self.engine.make_private(
            module=self.model, optimizer=torch.optim.AdamW(trained, lr=1e-4),
            criterion=self.criterion, noise_multiplier=1.0, compile=options.compile,
            data_loader=DataLoader(TensorDataset(x, y), batch_size=options.batch),
            bounds=EnforcedBounds(thresholds=0.1, follow=True), sampling="epochs",
            options=PrivacyOptions(
                precision=options.precision, batches=BatchOptions(pad=False)
            ),
        )  # fmt: skip
        self.batches = itertools.chain.from_iterable(itertools.repeat(self.loader))

    def next_batch(self) -> tuple[Tensor, Tensor]:
        x, y = next(self.batches)
        return x, y

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        self.criterion(self.model(x), y).backward()
        self.optimizer.step()


class Opacus(Turns):
    def __init__(self, options: argparse.Namespace, mode: str) -> None:
        super().__init__(options)
        from opacus import PrivacyEngine as Engine

        model = network(options).to(options.device)
        trained = [p for p in model.parameters() if p.requires_grad]
        criterion = nn.CrossEntropyLoss()
        loader = DataLoader(TensorDataset(*batch_of(options, options.batch)), options.batch)
        made = Engine().make_private(
            module=model, optimizer=torch.optim.AdamW(trained, lr=1e-4), criterion=criterion,
            data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False,
            grad_sample_mode=mode,
        )  # fmt: skip
        self.model, self.optimizer = made[0], made[1]
        self.criterion = made[2] if mode == "ghost" else criterion

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        self.criterion(self.model(x), y).backward()
        self.optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=["encoder", "resnet", "cnn"], default="encoder")
    parser.add_argument("--adapters", action="store_true")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--precision", default="float32", choices=["float32", "tf32", "bfloat16"])
    parser.add_argument("--opacus", nargs="*", default=[], choices=["hooks", "ghost"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.precision == "tf32":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
    else:
        torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.manual_seed(0)
    kinds: dict[str, Turns] = {"plain": Plain(options), "enforced": (own := Enforced(options))}
    kinds |= {f"opacus {mode}": Opacus(options, mode) for mode in options.opacus}
    memory: dict[str, float] = {}
    for step in range(options.steps + options.warm_up):
        x, y = own.next_batch()
        for name, kind in kinds.items():
            if options.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            seconds = kind.take(x, y)
            if options.device == "cuda":
                memory[name] = torch.cuda.max_memory_allocated() / 2**30
            if step >= options.warm_up and step & (step - 1):  # rows are tried at powers of two
                kind.seconds.append(seconds)
    medians = {name: statistics.median(kind.seconds) for name, kind in kinds.items()}
    plain = kinds["plain"].seconds
    results = {
        "model": options.model + "-adapters" * options.adapters,
        "batch": options.batch, "tokens": options.tokens if options.model == "encoder" else None,
        "parameters": sum(p.numel() for p in own.model.parameters()),
        "compiled": own.engine.session.compiled, "precision": options.precision,
        "milliseconds": {name: round(1e3 * value, 2) for name, value in medians.items()},
        "over_plain": {
            name: round(statistics.median(
                a / b for a, b in zip(kind.seconds, plain, strict=True)), 3)
            for name, kind in kinds.items()
        },
        "peak_memory_of_all_GiB": memory,
    }  # fmt: skip
    print(results)
    parts = [results["model"], options.device, options.precision]
    parts += ["compiled"] if options.compile else []
    save("-".join(["enforced", *map(str, parts)]), results, notes="in turns, in one process")


if __name__ == "__main__":
    main()
