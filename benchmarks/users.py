"""What k costs: people with many records, protected as one unit, or record by record.

`protection`: epsilon of somebody with k records, delta 0.1/N, after the same training (500 steps,
batches of 500, noise for epsilon 1 a record): `group_epsilon`, by the privacy loss of the mixture,
beside k times epsilon; with `unit=Users(...)` it is 1 for everybody.

`records`: accuracy and time for at most k of a person's records in a step, at epsilon 1 for a
person. Linear classifiers on Adult, whose rows are dealt out to people by a public seed: most have
few, some more than a hundred (sizes are 1 + 4 times a Pareto variable of index 1.3, at most 212).
Three seeds, one learning rate for all, 100 steps; seconds are the processor's.

    python benchmarks/users.py [--data FOLDER] [--parts protection records]

Writes `results/users-PART.json`.
"""

import argparse
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _correlated_data import adult
from _results import save

from clipless import losses
from clipless import nn as lip
from clipless.accounting import Mechanism, PoissonSampling, group_epsilon, noise_multiplier_for
from clipless.privacy import PrivacyOptions, Users
from clipless.training import Trainer, TrainingOptions

PARTS = ("protection", "records")
SIZE, BATCH, STEPS, DELTA = 50_000, 500, 500, 2e-6
RATE, RECORD_STEPS = 0.5, 100
SEEDS = 3
LARGEST = 212


def protection() -> list[dict[str, Any]]:
    sampling = PoissonSampling(dataset_size=SIZE, rate=BATCH / SIZE)
    sigma = noise_multiplier_for(
        target_epsilon=1.0, target_delta=DELTA, steps=STEPS, sampling=sampling
    )
    history = [(Mechanism(noise_multiplier=sigma, sampling=sampling), STEPS)]
    rows = []
    for k in (1, 2, 3, 5, 10, 30, 100, LARGEST):
        found = group_epsilon(history, DELTA, records=k)
        rows.append({"records": k, "group_epsilon": found, "unit=user": 1.0})
        print(rows[-1], flush=True)
    return rows


def people(rows: int) -> np.ndarray:
    """Whose each row is: a public dealing out, which does not look at the rows."""
    generator = np.random.default_rng(0)
    sizes: list[int] = []
    while sum(sizes) < rows:
        sizes.append(min(LARGEST, 1 + int(4 * generator.pareto(1.3))))
    ids = np.repeat(np.arange(len(sizes)), sizes)[:rows]
    return generator.permutation(ids)


def trained(data: Any, test: Any, users: Users, seed: int) -> dict[str, float]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(lip.BoundedInput(1.0), lip.SpectralLinear(data[0].shape[1], 2))
    trainer = Trainer(
        model, losses.CrossEntropy(tau=16.0), target_epsilon=1.0,
        batch_size=users.number // 20, steps=RECORD_STEPS, options=PrivacyOptions(unit=users),
        training=TrainingOptions(
            optimizer=lambda p: torch.optim.SGD(p, lr=RATE, momentum=0.9), average=None,
            progress=False,
        ),
    )  # fmt: skip
    begun = time.process_time()
    trainer.fit(data)
    seconds = time.process_time() - begun
    return {
        "accuracy": trainer.evaluate(test)["accuracy"],
        "epsilon": trainer.engine.get_epsilon(),
        "milliseconds_a_step": 1e3 * seconds / RECORD_STEPS,
    }


def records(folder: Path) -> list[dict[str, Any]]:
    x, y, others, labels = adult(folder)
    ids = people(len(x))
    rows = []
    for k in (1, 4, 16, LARGEST):
        users = Users(ids, records=k)
        sizes = np.minimum(np.bincount(users.codes), k)
        found = [trained((x, y), (others, labels), users, seed) for seed in range(SEEDS)]
        accuracies = [each["accuracy"] for each in found]
        rows.append(
            {
                "k": k, "people": users.number, "learning_rate": RATE,
                "rows_a_step": float(sizes.sum()) / 20, "epsilon_of_a_person": found[0]["epsilon"],
                "accuracy": statistics.mean(accuracies), "spread": statistics.stdev(accuracies),
                "milliseconds_a_step": statistics.median(
                    each["milliseconds_a_step"] for each in found
                ),
            }
        )  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="the folder that `records` reads `adult/` from")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    given = parser.parse_args()
    if "records" in given.parts and given.data is None:
        parser.error("give --data FOLDER, or --parts protection")
    warnings.simplefilter("ignore")
    if "protection" in given.parts:
        save("users-protection", protection(), notes="computed; delta 2e-6, N = 50,000")
    if "records" in given.parts:
        save("users-records", records(given.data), notes="Adult, rows dealt out to people; CPU")


if __name__ == "__main__":
    main()
