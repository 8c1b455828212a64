"""A model, not a measurement: what training on 10^9 examples and 1,000 GPUs would take.

Noise is exact: it comes from the accountant. Times come from a formula for one step, with the
assumptions printed beside them; nobody has run this. What enters from measurements says so.

    python benchmarks/scaling_model.py [--quick]
"""

import argparse
import math
import time
from dataclasses import asdict, dataclass
from typing import Any

from _results import save

from clipless.privacy import IndexSampler, PoissonSampling, default_delta, noise_multiplier_for

EPSILON = 1.0
SCHEDULES = [
    (60_000, 8_192, 5_000),
    (1_000_000, 8_192, 5_000),
    (10_000_000, 8_192, 5_000),
    (100_000_000, 8_192, 5_000),
    (1_000_000_000, 8_192, 5_000),
    (1_000_000_000, 65_536, 5_000),
    (1_000_000_000, 1_000_000, 10_000),
]
"""Examples, expected batch size, steps."""


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Of a network like ResNet-50 in float32 on current GPUs; change them and run again."""

    parameters: float = 25.6e6
    forward_operations: float = 8.2e9
    """Of one example; a backward pass takes twice as many."""
    layers: int = 54
    matrix_width: float = 1024.0
    """Typical smaller side of a weight, as the projection sees it."""
    projection_products: int = 8
    """Matrix products of the projection of one weight."""
    guard_overhead: float = 1.05
    """What guards and hooks add to a step, besides noise and projection."""
    operations_per_second: float = 27e12
    """Of one GPU: 40% of a peak of 67e12 in float32."""
    normals_per_second: float = 5e10
    link_bytes_per_second: float = 50e9
    """Of one GPU to the others."""
    link_latency: float = 20e-6
    example_bytes: float = 150e3
    reading_bytes_per_second: float = 2e9
    """Of one GPU's share of the storage."""


def noise_table(schedules: list[tuple[int, int, int]]) -> list[dict[str, Any]]:
    """The noise that a budget asks for: exact, by the accountant."""
    rows: list[dict[str, Any]] = []
    for size, batch, steps in schedules:
        sigma = noise_multiplier_for(
            target_epsilon=EPSILON,
            target_delta=default_delta(size),
            steps=steps,
            sampling=PoissonSampling(dataset_size=size, rate=batch / size),
        )
        rows.append({
            "examples": size, "batch": batch, "steps": steps, "delta": default_delta(size),
            "passes": batch * steps / size, "noise_multiplier": sigma,
            "noise_of_an_update": sigma / batch,
            "total_noise": math.sqrt(2 / steps) * sigma * size / batch,
        })  # fmt: skip
        print(f"  {size:>13,} {batch:>9,} {steps:>6,} {batch * steps / size:>8.3g} "
              f"{sigma:>8.4g} {sigma / batch:>10.3g} {rows[0]['noise_of_an_update'] * batch / sigma:>9.3g}")  # noqa: E501  # fmt: skip
    return rows


def sampling_seconds() -> float:
    """Seconds to draw one index, measured: every process draws the whole sample of a step."""
    sampling = PoissonSampling(dataset_size=10**9, rate=1e-3)
    sampler, best = IndexSampler(sampling=sampling), math.inf
    for step in range(3):
        begun = time.perf_counter()
        drawn = len(sampler.draw(step=step))
        best = min(best, (time.perf_counter() - begun) / drawn)
    return best


def step_seconds(
    a: Assumptions, *, batch: float, gpus: int, index_seconds: float
) -> dict[str, Any]:
    """The parts of one step, in seconds. Reading and sampling overlap with computing."""
    share = batch / gpus
    computing = a.guard_overhead * 3 * a.forward_operations * share / a.operations_per_second
    reading = share * a.example_bytes / a.reading_bytes_per_second
    drawing = batch * index_seconds
    # Owners add the noise and project, each for its own weights.
    owners = min(gpus, a.layers)
    noise = a.parameters / gpus / a.normals_per_second
    projection = (
        2 * a.projection_products * a.parameters * a.matrix_width / owners
    ) / a.operations_per_second
    # Gradients to their owners and weights back: what an all-reduce moves.
    moved = 2 * 4 * a.parameters * (gpus - 1) / gpus
    communication = moved / a.link_bytes_per_second + a.link_latency * math.log2(max(gpus, 1))
    total = max(computing, reading, drawing) + noise + projection + communication
    return {
        "gpus": gpus, "batch": batch, "computing": computing, "reading": reading,
        "drawing": drawing, "noise": noise, "projection": projection,
        "communication": communication, "total": total,
        "efficiency": computing / a.guard_overhead / total,
        "per_example_gradients_gigabytes": 4 * a.parameters * share / 1e9,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="Leave the accountant's table out.")
    options = parser.parse_args()
    noise: list[dict[str, Any]] = []
    if not options.quick:
        print(f"Noise at epsilon {EPSILON:g}, exact. Last column: signal over that of the first.")
        print("       examples     batch  steps   passes    sigma    sigma/b    signal")
        noise = noise_table(SCHEDULES)
    a, index_seconds = Assumptions(), sampling_seconds()
    size, batch, steps = SCHEDULES[-1]
    print(f"\nModel: {size:,} examples, batch {batch:,}, {steps:,} steps, "
          f"{a.parameters / 1e6:g} million parameters")  # fmt: skip
    print("   GPUs  seconds a step       days  efficiency  communication  projection")
    times = []
    for gpus in (1, 8, 64, 256, 1000):
        row = step_seconds(a, batch=batch, gpus=gpus, index_seconds=index_seconds)
        row["days"] = row["total"] * steps / 86_400
        times.append(row)
        print(f"  {gpus:>5} {row['total']:>15.3f} {row['days']:>10.3g} {row['efficiency']:>10.0%} "
              f"{row['communication']:>13.4f}s {row['projection']:>10.4f}s")  # fmt: skip
    smaller = [
        step_seconds(a, batch=each, gpus=1000, index_seconds=index_seconds)
        for each in (8_192, 65_536, 262_144, 1_000_000)
    ]
    print("\nModel: the same on 1,000 GPUs with smaller batches")
    for row in smaller:
        print(f"  batch {row['batch']:>9,}: {row['total']:.4f} s a step, "
              f"{row['efficiency']:.0%} efficient")  # fmt: skip
    if options.quick:
        return
    results = {
        "kind": "model: times were computed from assumptions, not measured",
        "epsilon": EPSILON,
        "noise": noise,
        "assumptions": asdict(a),
        "measured": {"seconds_to_draw_one_index": index_seconds},
        "steps_on_gpus": times,
        "batches_on_1000_gpus": smaller,
    }
    note = "a model of cost; the noise is exact, times follow from the assumptions"
    print("wrote", save("scaling-model", results, notes=note).name)


if __name__ == "__main__":
    main()
