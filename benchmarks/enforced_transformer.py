"""What thresholds cost in a transformer: a private step over a plain one, on the same batches.

An encoder (4 layers of width 128, 64 tokens) made of torch's own layers, trained in full. Private
and plain steps alternate in one process, so that whatever else the machine does hits both alike;
the figures are medians. The private step has exact norms, thresholds that follow quantiles, noise.

    python benchmarks/enforced_transformer.py [--batch 32] [--steps 10]
"""

import argparse
import statistics
import time

import torch
from _results import save
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from clipless import PrivacyEngine, losses
from clipless.privacy import BatchOptions, EnforcedBounds, PrivacyOptions

TOKENS, WIDTH, WORDS = 64, 128, 5000


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(TOKENS, device=tokens.device))
        return self.head(self.body(x).mean(1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    torch.manual_seed(0)
    data = TensorDataset(torch.randint(WORDS, (2000, TOKENS)), torch.randint(2, (2000,)))
    private, plain = Encoder(), Encoder()
    criterion, engine = losses.CrossEntropy(), PrivacyEngine()
    _, optimizer, loader = engine.make_private(
        module=private, optimizer=torch.optim.SGD(private.parameters(), lr=0.01),
        criterion=criterion, data_loader=DataLoader(data, batch_size=options.batch),
        noise_multiplier=1.0, bounds=EnforcedBounds(thresholds=0.1, follow=True),
        options=PrivacyOptions(batches=BatchOptions(pad=True)),
    )  # fmt: skip
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    times: dict[str, list[float]] = {"plain": [], "enforced": []}
    for step, (x, y) in zip(range(options.steps + 3), loader, strict=False):
        begin = time.perf_counter()
        optimizer.zero_grad()
        criterion(private(x), y).backward()
        optimizer.step()
        middle = time.perf_counter()
        plain_optimizer.zero_grad()
        nn.functional.cross_entropy(plain(x), y).backward()
        plain_optimizer.step()
        if step >= 3 and step & (step - 1):  # rows are tried before steps 0, 1, 2, 4, 8, ...
            times["enforced"].append(middle - begin)
            times["plain"].append(time.perf_counter() - middle)
    ratios = [a / b for a, b in zip(times["enforced"], times["plain"], strict=True)]
    results = {
        "rows": loader.rows,
        "tokens": TOKENS,
        "parameters": sum(p.numel() for p in private.parameters()),
        "plain_seconds": statistics.median(times["plain"]),
        "enforced_seconds": statistics.median(times["enforced"]),
        "enforced_over_plain": statistics.median(ratios),
    }
    print(results)
    save("enforced_transformer", results, notes="one CPU core; no GPU was measured")


if __name__ == "__main__":
    main()
