"""Ordinary epochs with correlated noise, against Poisson sampling at the same epsilon.

`expected`: the root mean squared error of all sums of gradients (prefix sums, and the steps of SGD
with momentum 0.9), over that of DP-SGD with Poisson sampling, the same steps and epsilon: computed,
with optimised strategies, at delta 1e-5. `step`: milliseconds of a step's noise for so many bands.

`utility`: linear classifiers on scattering features of CIFAR-10 (50,000 x 972) and on Adult
(32,561 x 106), without private statistics: one pass of 100 steps at epsilon 8, and 20 epochs of
5 steps at epsilon 3, delta 0.1/N. Each way to sample has the best of `RATES`, if there are several:
chosen with a seed of its own on the first half of the test set. Three other seeds are measured on
the second half. Examples are counted by seconds of the processor, not of the clock.

    python benchmarks/correlated_noise.py [--data FOLDER] [--parts utility expected step] [--quick]

FOLDER holds `cifar-10-batches-bin/` and `adult/` (`adult.data`, `adult.test`, `adult.names`).

Writes `results/correlated-noise-PART.json`.
"""

import argparse
import itertools
import json
import math
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from _correlated_data import SETS
from _results import save

from clipless import losses
from clipless import nn as lip
from clipless.accounting import PoissonSampling, noise_multiplier_for
from clipless.accounting.correlated import (
    BandedStrategy,
    CyclicPoisson,
    FixedOrderEpochs,
    OptimizerWorkload,
    mean_error,
    optimised_strategy,
)
from clipless.privacy import Correlated, FixedOrder, PrivacyEngine, PrivacyOptions
from clipless.training import Trainer, TrainingOptions

Rows = tuple[torch.Tensor, torch.Tensor]
Run = tuple[int, int, float]
"""Passes, steps of each, and epsilon."""
PARTS = ("utility", "expected", "step")
SIZE, DELTA = 50_000, 1e-5
EPOCHS = [(25, 10), (20, 25), (5, 100), (1, 500)]
"""Passes, and steps of each."""
CYCLIC = [(500, 0.1), (250, 0.33), (500, 0.02)]
"""Steps, and the sampling rate."""
RUNS: list[Run] = [(1, 100, 8.0), (20, 5, 3.0)]
WAYS: dict[str, dict[str, Any]] = {
    "Poisson sampling": {},
    "epochs, independent noise": {"sampling": "epochs"},
    "epochs, correlated noise": {"sampling": "epochs", "noise": "correlated"},
}
RATES = (0.3,)
SEEDS = 3
TUNING_SEED = 100


def poisson_error(rows: Any, steps: int, rate: float, epsilon: float) -> float:
    sigma = noise_multiplier_for(
        target_epsilon=epsilon, target_delta=DELTA, steps=steps,
        sampling=PoissonSampling(dataset_size=SIZE, rate=rate),
    )  # fmt: skip
    return sigma * mean_error(rows, BandedStrategy.independent(steps=steps))


def expected(epsilons: tuple[float, ...]) -> list[dict[str, Any]]:
    found = []
    for passes, length in EPOCHS:
        steps = passes * length
        order = FixedOrderEpochs(dataset_size=SIZE, steps_per_pass=length)
        for momentum in (0.0, 0.9):
            rows = OptimizerWorkload(steps=steps, momentum=momentum).matrix(most_rows=256)
            ways = {
                "independent": BandedStrategy.independent(steps=steps),
                "square root": BandedStrategy.square_root(steps=steps, bands=length),
                "optimised": optimised_strategy(rows, bands=length, steps_per_pass=length),
            }
            for epsilon in epsilons:
                unit = poisson_error(rows, steps, 1 / length, epsilon)
                errors = {
                    name: order.noise_for(each, target_epsilon=epsilon, target_delta=DELTA)
                    * mean_error(rows, each)
                    / unit
                    for name, each in ways.items()
                }
                found.append(
                    {"passes": passes, "steps_per_pass": length, "momentum": momentum,
                     "epsilon": epsilon, **errors}
                )  # fmt: skip
                print(found[-1], flush=True)
    return found


def expected_cyclic(epsilons: tuple[float, ...]) -> list[dict[str, Any]]:
    found = []
    for steps, rate in CYCLIC:
        rows = OptimizerWorkload(steps=steps).matrix(most_rows=256)
        bands = [each for each in (2, 3, 5, 10) if each * rate <= 1]
        strategies = [optimised_strategy(rows, bands=each) for each in bands]
        for epsilon in epsilons:
            unit = poisson_error(rows, steps, rate, epsilon)
            errors = [
                CyclicPoisson(dataset_size=SIZE, rate=rate, groups=each.bands).noise_for(
                    each, target_epsilon=epsilon, target_delta=DELTA
                )
                * mean_error(rows, each)
                / unit
                for each in strategies
            ]
            best = min(range(len(bands)), key=errors.__getitem__)
            found.append(
                {"steps": steps, "rate": rate, "epsilon": epsilon, "bands": bands[best],
                 "optimised": errors[best]}
            )  # fmt: skip
            print(found[-1], flush=True)
    return found


def trained(
    train: Rows, test: Rows, classes: int, run: Run, options: dict[str, Any], rate: float, seed: int
) -> dict[str, Any]:
    """Train once; return accuracy on the test rows, speed, and the expected error of the noise."""
    passes, length, epsilon = run
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        lip.BoundedInput(1.0), lip.SpectralLinear(train[0].shape[1], classes)
    )
    trainer = Trainer(
        model, losses.CrossEntropy(tau=16.0), target_epsilon=epsilon,
        batch_size=math.ceil(len(train[0]) / length), epochs=passes,
        options=PrivacyOptions(**options),
        training=TrainingOptions(
            optimizer=lambda p: torch.optim.SGD(p, lr=rate, momentum=0.9), average=None,
            progress=False,
        ),
    )  # fmt: skip
    begun = time.process_time()
    trainer.fit(train)
    seconds = time.process_time() - begun
    return {
        "accuracy": trainer.evaluate(test)["accuracy"],
        "epsilon": trainer.engine.get_epsilon(),
        "examples_per_second": passes * len(train[0]) / seconds,
        "error_over_independent": trainer.engine.plan.strategy_error,
    }


def utility(folder: Path, seeds: int, rates: tuple[float, ...]) -> list[dict[str, Any]]:
    found = []
    for name, (read, classes) in SETS.items():
        x, y, others, labels = read(folder)
        middle = len(others) // 2
        tuning, test = (others[:middle], labels[:middle]), (others[middle:], labels[middle:])
        for run, (way, options) in itertools.product(RUNS, WAYS.items()):
            tuned = (
                {}
                if len(rates) == 1
                else {
                    rate: trained((x, y), tuning, classes, run, options, rate, TUNING_SEED)[
                        "accuracy"
                    ]
                    for rate in rates
                }
            )
            best = max(rates, key=lambda rate: tuned.get(rate, 0.0))
            results = [
                trained((x, y), test, classes, run, options, best, seed) for seed in range(seeds)
            ]
            accuracies = [each["accuracy"] for each in results]
            found.append(
                {
                    "data": name, "passes": run[0], "steps_per_pass": run[1],
                    "target_epsilon": run[2], "way": way, "learning_rate": best, "tuning": tuned,
                    "accuracy": statistics.mean(accuracies),
                    "spread": statistics.stdev(accuracies) if seeds > 1 else None, "runs": results,
                    "examples_per_second": statistics.median(
                        each["examples_per_second"] for each in results
                    ),
                }
            )  # fmt: skip
            print(json.dumps(found[-1]), flush=True)
    return found


def step_times(bands: tuple[int, ...], parameters: int, steps: int = 60) -> list[dict[str, Any]]:
    """Milliseconds of a whole step, batches of 16, of a model that is nearly all noise."""
    found = []
    data = torch.utils.data.TensorDataset(
        torch.randn(16 * 40, 1000), torch.zeros(16 * 40, dtype=torch.int64)
    )
    for count in bands:
        model = torch.nn.Sequential(
            lip.BoundedInput(1.0), lip.SpectralLinear(1000, parameters // 1000)
        )
        criterion = losses.CrossEntropy()
        model, optimizer, loader = PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=torch.utils.data.DataLoader(data, batch_size=16), criterion=criterion,
            noise_multiplier=1.0, sampling=FixedOrder(dataset_size=640, batch_size=16),
            options=PrivacyOptions(steps=steps, noise=Correlated(bands=count)),
        )  # fmt: skip
        times = []
        while len(times) < steps:
            for x, y in loader:
                begun = time.perf_counter()
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                optimizer.step()
                times.append(1e3 * (time.perf_counter() - begun))
                if len(times) == steps:
                    break
        found.append(
            {"bands": count, "parameters": parameters,
             "milliseconds": statistics.median(times[steps // 2 :])}
        )  # fmt: skip
        print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="the folder that `utility` reads from")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--quick", action="store_true", help="epsilon 3, one seed, one rate")
    given = parser.parse_args()
    quick, parts = given.quick, given.parts
    if "utility" in parts and given.data is None:
        parser.error("give --data FOLDER, or --parts without utility")
    warnings.simplefilter("ignore")
    epsilons = (3.0,) if quick else (1.0, 3.0, 8.0)
    seeds, rates = (1, RATES[:1]) if quick else (SEEDS, RATES)
    if "utility" in parts:
        save("correlated-noise-utility", utility(given.data, seeds, rates),
             notes="linear models, on the CPU; delta 0.1/N, rounded down")  # fmt: skip
    if "expected" in parts:
        errors = {"epochs": expected(epsilons), "cyclic": expected_cyclic(epsilons)}
        save("correlated-noise-expected", errors, notes="computed, of noise alone; delta 1e-5")
    if "step" in parts:
        times = step_times((1, 5, 25), parameters=20_000 if quick else 100_000)
        save("correlated-noise-step", times, notes="batches of 16: a step is nearly all noise")


if __name__ == "__main__":
    main()
