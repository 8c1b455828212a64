"""Time and memory of a training step: without privacy, private without clipping, with clipping.

    python benchmarks/speed.py [--device cuda] [--seconds 600] [--add] [--quick]
                               [--models cnn-400K mixer] [--batches 512 2048]
                               [--methods clipless opacus-ghost] [--modes eager compiled]
    python benchmarks/speed.py --plot        # draw results/speed.svg from what was measured

All methods and modes of one network and batch size are measured in one process, in turns, so that
whatever else the machine does hits all alike; figures are medians. `compiled` is torch.compile
with its default settings, and for clipless what `compile=True` makes of it, CUDA graphs included;
`--graphs` lets training without privacy have them too. `bfloat16` is `compiled` under autocast. The
largest batch is found by doubling. On a GPU all products are in TF32, and peak memory is what
torch's allocator handed out beyond the images, for graphs while they were recorded; on the CPU it
is the growth of a process that does nothing else. Without arguments the most telling comparisons
come first. What was measured is written down after each of them, and `--add` goes on where an
earlier run ended.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator

import _speed_methods
import torch
from _results import RESULTS, save_rows
from _speed_figures import draw, show
from _speed_measure import empty, growth, in_turns, largest_batch, prepared
from _speed_methods import METHODS, Images
from _speed_models import MODELS, lipschitz, parameters_of

ALL = tuple((method, mode) for method, modes in METHODS.items() for mode in modes)
MAIN = tuple(
    (method, mode)
    for method, mode in ALL
    if mode != "bfloat16" and method not in ("nonprivate-lipschitz", "vmap-clipping")
)
WITHOUT_CLIPPING = tuple(
    pair for pair in ALL if pair[0] in ("nonprivate-relu", "nonprivate-lipschitz", "clipless")
)
Comparison = tuple[str, int, tuple[tuple[str, str], ...]]
PLAN: dict[str, tuple[Comparison, ...]] = {
    "cuda": (
        *(("cnn-400K", batch, MAIN) for batch in (2048, 512, 8192)),
        *(("cnn-400K", batch, MAIN) for batch in (16384, 256)),
        ("cnn-2M", 2048, MAIN),
        ("resnet", 2048, MAIN),
        ("mixer", 2048, MAIN),
        *(("cnn-400K", batch, ALL) for batch in (2048, 512, 8192)),
        *(("cnn-130K", batch, ALL) for batch in (2048, 512, 8192)),
        *(("cnn-2M", batch, ALL) for batch in (2048, 512, 8192)),
        *(("cnn-400K", batch, ALL) for batch in (1024, 4096, 256, 16384)),
    ),
    # Clipping one by one takes more memory at batch 1024 than most machines have.
    "cpu": (("cnn-400K", 1024, WITHOUT_CLIPPING), ("cnn-130K", 256, ALL)),
}


def main() -> None:
    options = arguments()
    if options.plot:
        print("wrote", draw(RESULTS))
        return
    device = torch.device(options.device)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    _speed_methods.GRAPHS = options.graphs
    if options.memory_of:
        print(growth(*options.memory_of, device))
        return
    rows, largest, started = [], [], time.monotonic()
    for number, (model, batch, pairs) in enumerate(comparisons(options)):
        if time.monotonic() - started > options.seconds:
            break
        rows = merged(rows, compare(model, batch, pairs, device, options), ROW)
        record(rows, largest, options)
        if number == 2 and options.largest and device.type == "cuda":
            for method in options.methods:
                if method != "nonprivate-lipschitz":
                    largest.append(largest_batch(method, model, device))
                    print(largest[-1], flush=True)
            record(rows, largest, options)
    show(rows, largest)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", choices=MODELS)
    parser.add_argument("--batches", nargs="+", type=int)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--modes", nargs="+", default=["eager", "compiled", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing after this")
    parser.add_argument("--no-largest", dest="largest", action="store_false")
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs without privacy too")
    parser.add_argument("--add", action="store_true", help="keep what was measured before")
    parser.add_argument("--quick", action="store_true", help="see that everything runs")
    parser.add_argument("--plot", action="store_true", help="draw the figure, measure nothing")
    parser.add_argument("--memory-of", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.models, options.batches = options.models or ["cnn-130K"], options.batches or [64]
        options.rounds, options.largest = 1, False
    return options


def comparisons(options: argparse.Namespace) -> Iterator[Comparison]:
    """What to compare, in which order."""
    plan = PLAN.get(torch.device(options.device).type, PLAN["cuda"])
    if options.models or options.batches:
        models = options.models or ["cnn-400K"]
        plan = tuple((m, b, ALL) for m in models for b in options.batches or (2048, 512, 8192))
    for model, batch, pairs in plan:
        chosen = tuple(p for p in pairs if p[0] in options.methods and p[1] in options.modes)
        yield model, batch, chosen


def compare(
    model: str,
    batch: int,
    pairs: tuple[tuple[str, str], ...],
    device: torch.device,
    options: argparse.Namespace,
) -> list[dict]:
    """Measure methods and modes on one network and batch size."""
    torch._dynamo.reset()
    images = Images(max(2 * batch, 50_000 if device.type == "cuda" else 4096), device)
    steps, memory = {}, {}
    for method, mode in pairs:
        began = time.monotonic()
        try:
            steps[method, mode], memory[method, mode] = prepared(
                method, mode, model, batch, images, weighed=not options.quick
            )
        except torch.cuda.OutOfMemoryError:
            print(f"  {method} {mode}: out of memory", flush=True)
        else:
            print(f"  {method} {mode}: ready in {time.monotonic() - began:.1f} s", flush=True)
    times = in_turns(steps, device, options.rounds)
    rows = [
        {
            "method": method,
            "mode": mode,
            "model": model,
            "batch": batch,
            "parameters": parameters_of(lipschitz(model)),
            "milliseconds": round(1000 * statistics.median(times[method, mode]), 3),
            "peak_gib": memory[method, mode],
        }
        for method, mode in steps
    ]
    for row in rows:
        print("  ", *row.values(), flush=True)
    del steps, images
    empty(device)
    return rows


ROW = ("method", "mode", "model", "batch")


def record(rows: list[dict], largest: list[dict], options: argparse.Namespace) -> None:
    """Write what is known so far."""
    kind = "gpu" if torch.device(options.device).type == "cuda" else "cpu"
    name = f"speed-{kind}-quick" if options.quick else f"speed-{kind}"
    notes = "medians of steps in turns; TF32 on the GPU; rows of a batch include padding"
    notes += "; compiled steps without privacy are CUDA graphs too" if options.graphs else ""
    name += "-graphs" if options.graphs else ""
    earlier = RESULTS / f"{name}.json"
    if options.add and earlier.exists():
        known = json.loads((RESULTS / f"{name}.about.json").read_text())
        rows = merged(json.loads(earlier.read_text()), rows, ROW)
        largest = merged(known["largest_batches"], largest, ("method", "model"))
    save_rows(name, rows, notes=notes, largest_batches=largest)


def merged(old: list[dict], new: list[dict], keys: tuple[str, ...]) -> list[dict]:
    """The rows of both, the newer one where there are two."""
    found = {tuple(row[key] for key in keys): row for row in [*old, *new]}
    return list(found.values())


if __name__ == "__main__":
    main()
