"""Ordinary epochs with correlated noise, against Poisson sampling at the same epsilon.

`expected`: the root mean squared error of all sums of gradients (prefix sums, and the steps of SGD
with momentum 0.9), over that of DP-SGD with Poisson sampling, the same steps and epsilon: computed,
with optimised strategies, at delta 1e-5. `step`: milliseconds of a step's noise for so many bands.

`utility`: linear classifiers on synthetic data of the size of CIFAR-10 (50,000 x 256, ten classes)
and Adult (32,561 x 105, two classes): one pass at epsilon 8, and 20 epochs at epsilon 3, delta
0.1/N. Each way to sample has the best of the same learning rates by the mean of its seeds, on
10,000 other rows.

    python benchmarks/correlated_noise.py [--quick]

Writes `results/correlated-noise.json`.
"""

import argparse
import math
import statistics
import time
import warnings
from typing import Any

import torch
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

SIZE, DELTA = 50_000, 1e-5
EPOCHS = [(25, 10), (20, 25), (5, 100), (1, 500)]
"""Passes, and steps of each."""
CYCLIC = [(500, 0.1), (250, 0.33), (500, 0.02)]
"""Steps, and the sampling rate."""
DATA = {"CIFAR-10-sized": (50_000, 256, 10), "Adult-sized": (32_561, 105, 2)}
RUNS = [(1, 500, 8.0), (20, 25, 3.0)]
WAYS: dict[str, dict[str, Any]] = {
    "Poisson sampling": {},
    "epochs, independent noise": {"sampling": "epochs"},
    "epochs, correlated noise": {"sampling": "epochs", "noise": "correlated"},
}
RATES = (0.03, 0.1, 0.3)
SEEDS = 3


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


def synthetic(size: int, features: int, classes: int, seed: int) -> tuple[Any, Any]:
    """Inputs on the unit sphere, and labels that a linear classifier mostly gets right."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, features, generator=torch.Generator().manual_seed(99))
    y = torch.randint(classes, (size,), generator=generator)
    x = torch.randn(size, features, generator=generator) + 0.25 * centres[y]
    return torch.nn.functional.normalize(x), y


def trained(name: str, way: dict[str, Any], run: tuple[int, int, float], rate: float, seed: int,
            part: float) -> tuple[float, float, Any]:  # fmt: skip
    """Accuracy on other rows, examples per second, and the expected error of the noise."""
    size, features, classes = DATA[name]
    passes, length, epsilon = run
    size = round(size * part)
    torch.manual_seed(seed)
    model = torch.nn.Sequential(lip.BoundedInput(1.0), lip.SpectralLinear(features, classes))
    trainer = Trainer(
        model, losses.CrossEntropy(tau=16.0), target_epsilon=epsilon,
        batch_size=math.ceil(size / length), epochs=passes,
        options=PrivacyOptions(**way),
        training=TrainingOptions(
            optimizer=lambda p: torch.optim.SGD(p, lr=rate, momentum=0.9), average=None,
            progress=False,
        ),
    )  # fmt: skip
    result = trainer.fit(synthetic(size, features, classes, seed))
    accuracy = trainer.evaluate(synthetic(10_000, features, classes, 1000))["accuracy"]
    return accuracy, passes * size / result.seconds, trainer.engine.plan.strategy_error


def utility(seeds: int, rates: tuple[float, ...], part: float) -> list[dict[str, Any]]:
    found = []
    for name in DATA:
        for run in RUNS:
            for way, options in WAYS.items():
                by_rate = {
                    rate: [trained(name, options, run, rate, seed, part) for seed in range(seeds)]
                    for rate in rates
                }
                best = max(rates, key=lambda rate: statistics.mean(r[0] for r in by_rate[rate]))
                accuracies = [each[0] for each in by_rate[best]]
                found.append(
                    {
                        "data": name, "passes": run[0], "steps_per_pass": run[1],
                        "epsilon": run[2], "way": way, "learning_rate": best,
                        "accuracy": statistics.mean(accuracies), "accuracies": accuracies,
                        "examples_per_second": statistics.median(
                            each[1] for results in by_rate.values() for each in results
                        ),
                        "error_over_independent": by_rate[best][0][2],
                    }
                )  # fmt: skip
                print(found[-1], flush=True)
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
    parser.add_argument("--quick", action="store_true", help="epsilon 3, one seed, a tenth of data")
    quick = parser.parse_args().quick
    warnings.simplefilter("ignore")
    epsilons = (3.0,) if quick else (1.0, 3.0, 8.0)
    results = {
        "expected": expected(epsilons),
        "expected_cyclic": expected_cyclic(epsilons),
        "step": step_times((1, 5, 25), parameters=20_000 if quick else 100_000),
        "utility": utility(1, RATES[1:2], 0.1) if quick else utility(SEEDS, RATES, 1.0),
    }
    save(
        "correlated-noise", results,
        notes="errors are computed, of noise alone; utility is on synthetic data, linear models",
    )  # fmt: skip


if __name__ == "__main__":
    main()
