"""Time and memory of a training step: without privacy, private without clipping, with clipping.

    python benchmarks/speed.py [--device cuda] [--seconds 600] [--add] [--quick]
                               [--models cnn-400K mixer] [--batches 512 2048]
                               [--methods clipless opacus-ghost] [--modes eager compiled]
    python benchmarks/speed.py --plot        # draw results/speed.svg from what was measured

A batch is a number of *expected examples*: a private step of 512 is one whose sample has 512
examples on average, and the rows that padding adds are part of what it takes. All methods and modes
of one network and batch size are measured in one process, in turns, so that whatever else the
machine does hits all alike; figures are medians, with the quartiles beside them. `compiled` is,
without privacy, torch.compile with CUDA graphs (mode="reduce-overhead"; `--no-graphs` is without),
and for clipless what `compile=True` makes of it. `bfloat16` is `compiled` under autocast. Enforced
bounds run uncompiled and in float32, and are compared with plain training at TF32. The largest
batch is found by doubling. On a GPU all other products are in TF32, and peak memory is what torch's
allocator handed out beyond the images, for graphs while they were recorded; on the CPU it is the
growth of a process that does nothing else.

The most telling comparisons come first. What was measured is written down after each of them, and
`--add` leaves out what an earlier run has measured: with a limit of ten minutes for each command,

    python benchmarks/speed.py --device cuda --add --seconds 480

until it says that nothing is left.
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
from _speed_methods import METHODS, Images, applies
from _speed_models import MODELS, parameters_of, relu

ALL = tuple((method, mode) for method, modes in METHODS.items() for mode in modes)
MAIN_WITH_BFLOAT16 = tuple(
    pair for pair in ALL if pair[0] not in ("nonprivate-lipschitz", "vmap-clipping")
)
WITHOUT_CLIPPING = tuple(
    pair for pair in ALL if pair[0] in ("nonprivate-relu", "nonprivate-lipschitz", "clipless")
)
Comparison = tuple[str, int, tuple[tuple[str, str], ...]]
PLAN: dict[str, tuple[Comparison, ...]] = {
    "cuda": (
        *(("cnn-400K", batch, WITHOUT_CLIPPING) for batch in (2048, 512, 8192)),
        ("cnn-400K", 2048, ALL),
        ("cnn-2M", 2048, WITHOUT_CLIPPING),
        ("resnet", 2048, WITHOUT_CLIPPING),
        ("mixer", 2048, WITHOUT_CLIPPING),
        ("resnet18", 512, MAIN_WITH_BFLOAT16),
        ("resnet18-groupnorm", 512, ALL),
        ("transformer-20M", 512, ALL),
        ("cnn-2M", 8192, WITHOUT_CLIPPING),
        ("cnn-400K", 512, ALL),
        ("cnn-400K", 8192, ALL),
        *(("cnn-400K", batch, WITHOUT_CLIPPING) for batch in (256, 16384)),
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
    largest, started = [], time.monotonic()
    rows, left = (earlier_rows(options) if options.add else []), 0
    for number, (model, batch, pairs) in enumerate(comparisons(options)):
        measured = {(row["method"], row["mode"]) for row in rows if at(row, model, batch)}
        if options.add and measured >= set(pairs):
            continue
        if time.monotonic() - started > options.seconds:
            left += 1
            continue
        rows = merged(rows, compare(model, batch, pairs, device, options), ROW)
        record(rows, largest, options)
        if number == 2 and options.largest and device.type == "cuda":
            for method in options.methods:
                if method != "nonprivate-lipschitz":
                    largest.append(largest_batch(method, model, device))
                    print(largest[-1], flush=True)
            record(rows, largest, options)
    show(rows, largest)
    print(f"{left} comparisons are left: run this again with --add" if left else "nothing is left")


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
    parser.add_argument("--no-graphs", dest="graphs", action="store_false",
                        help="no CUDA graphs without privacy")  # fmt: skip
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
        chosen = tuple(
            pair
            for pair in pairs
            if pair[0] in options.methods and pair[1] in options.modes and applies(pair[0], model)
        )
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
    steps, memory, ready = {}, {}, {}
    for method, mode in pairs:
        began = time.monotonic()
        try:
            steps[method, mode], memory[method, mode] = prepared(
                method, mode, model, batch, images, weighed=not options.quick
            )
        except torch.cuda.OutOfMemoryError:
            print(f"  {method} {mode}: out of memory", flush=True)
        else:
            ready[method, mode] = time.monotonic() - began
            print(f"  {method} {mode}: ready in {ready[method, mode]:.1f} s", flush=True)
    times = in_turns(steps, device, options.rounds)
    rows = [
        {
            "method": method,
            "mode": mode,
            "model": model,
            "batch": batch,
            "parameters": parameters_of(relu(model)),
            "milliseconds": round(1000 * statistics.median(times[method, mode]), 3),
            "quartiles": [round(1000 * each, 3) for each in quartiles(times[method, mode])],
            "peak_gib": memory[method, mode],
            "ready_seconds": round(ready[method, mode], 1),
            **getattr(steps[method, mode], "padding", {}),
        }
        for method, mode in steps
    ]
    for row in rows:
        print("  ", *row.values(), flush=True)
    del steps, images
    empty(device)
    return rows


def quartiles(times: list[float]) -> tuple[float, float]:
    """The first and the third; of few times, the least and the largest."""
    if len(times) < 4:
        return min(times), max(times)
    first, _, third = statistics.quantiles(times)
    return first, third


def at(row: dict, model: str, batch: int) -> bool:
    return (row["model"], row["batch"]) == (model, batch)


ROW = ("method", "mode", "model", "batch")


def file_name(options: argparse.Namespace) -> str:
    kind = "gpu" if torch.device(options.device).type == "cuda" else "cpu"
    name = f"speed-examples-{kind}-quick" if options.quick else f"speed-examples-{kind}"
    return name if options.graphs else f"{name}-no-graphs"


def earlier_rows(options: argparse.Namespace) -> list[dict]:
    """What earlier runs have measured."""
    path = RESULTS / f"{file_name(options)}.json"
    return json.loads(path.read_text()) if path.exists() else []


def record(rows: list[dict], largest: list[dict], options: argparse.Namespace) -> None:
    """Write what is known so far."""
    name = file_name(options)
    notes = "medians of steps in turns; TF32 on the GPU; a batch is a number of expected examples"
    notes += "; compiled steps without privacy are CUDA graphs too" if options.graphs else ""
    about = RESULTS / f"{name}.about.json"
    if options.add and about.exists():
        known = json.loads(about.read_text())["largest_batches"]
        largest = merged(known, largest, ("method", "model"))
    save_rows(name, rows, notes=notes, largest_batches=largest)


def merged(old: list[dict], new: list[dict], keys: tuple[str, ...]) -> list[dict]:
    """The rows of both, the newer one where there are two."""
    found = {tuple(row[key] for key in keys): row for row in [*old, *new]}
    return list(found.values())


if __name__ == "__main__":
    main()
