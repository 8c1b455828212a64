"""How often audits by one run accuse correct runs, and how often they expose broken ones.

Each run trains a table of vectors through the `Trainer`, with canaries that are tokens of their
own, at their bounds and independent of each other (`tests/audit/broken.py`): full batches, 4 steps,
noise 2 (mu = 1), 5,000 canaries; or Poisson samples of a fifth, 8 steps, or of a tenth, 20 steps,
noise 1, 8,000 canaries.

    correct      nothing is wrong (full batches, and Poisson samples)
    noise x 0.8  a fifth of the noise is missing
    rule x 1.5   a layer multiplies by 1.5, and its rule says that it does not (bounds that are
                 proved, and not enforced, which would make up for it)
    faked        one sample is used in all steps, where each is accounted for as Poisson's

`curve` is the f-DP audit for independent canaries (`curve_test`), at 99.9% confidence, of the
claim itself; `theorem` the one that supposes nothing about canaries, at 95%; `energy` the white-box
audit of every noisy gradient (`ReleasedNoise`), at 99.9%, in a run with hardly any signal.

    python benchmarks/audit_power.py [--correct 200] [--broken 100] [--kinds KIND ...] [--name NAME]

Writes `results/audit-power.json`, or `NAME.json`. Run it from the root of the repository.
"""

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from _results import save

from clipless import PrivacyEngine, losses
from clipless import nn as lip
from clipless.audit import (
    NoiseFamily,
    ReleasedNoise,
    clopper_pearson,
    curve_test,
    draw_coins,
    insert_canaries,
    train_watched,
)
from clipless.training import Trainer

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.audit import broken

FULL = {"noise": 2.0, "steps": 4}, 5_000
POISSON = {"noise": 1.0, "steps": 8, "rate": 0.2}, 8_000
LONGER = {"noise": 1.0, "steps": 20, "rate": 0.1}, 8_000
DELTA = 1e-5
KINDS: dict[str, tuple[tuple[dict[str, Any], int], Any, tuple[Any, ...]]] = {
    "correct": (FULL, Trainer, ()),
    "correct, Poisson": (POISSON, Trainer, ()),
    "noise x 0.8": (FULL, broken.LessNoise, ()),
    "rule x 1.5": (FULL, broken.NotEnforced, (broken.Amplify(1.5),)),
    "faked": (POISSON, broken.FakedSampling, ()),
    "correct, Poisson, 20 steps": (LONGER, Trainer, ()),
    "faked, 20 steps": (LONGER, broken.FakedSampling, ()),
}


def one_run(kind: str, seed: int) -> dict[str, bool]:
    """Train once with canaries; return which audits contradict the claim."""
    (options, count), trainer, extra = KINDS[kind]
    make = broken.table_trainer(count + 4, kind=trainer, seed=seed, extra=extra, **options)
    canaries = broken.tokens(count + 4)
    canaries = (canaries[0][4:], canaries[1][4:])
    coins = draw_coins(count, seed=seed)
    with broken.wrong_rule():
        run = train_watched(
            make, insert_canaries(broken.background(), canaries, coins), canaries=canaries,
            stand_ins=None, observed="releases",
        )  # fmt: skip
    history = run.trainer.engine.ledger.history()
    claim = NoiseFamily.of(history, delta=DELTA, accountant=run.plan.accountant).curve()
    return {
        "curve": curve_test(run.scores, coins, confidence=0.999, independent=True)(claim),
        "theorem": curve_test(run.scores, coins, confidence=0.95)(claim),
    }


def energy(part: float, seed: int) -> bool:
    """Return whether noisy gradients have less energy than the plan's noise."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(lip.BoundedInput(1.0), lip.SpectralLinear(100, 20))
    x, y = torch.randn(256, 100), torch.randint(20, (256,))
    engine, criterion = PrivacyEngine(insecure_seed=seed), losses.CrossEntropy()
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), criterion=criterion,
        data_loader=torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(x, y), batch_size=32
        ),
        noise_multiplier=2.0,
    )  # fmt: skip
    plan = engine.session.plan
    vars(plan)["releases"] = [q._replace(deviation=q.deviation * part) for q in plan.releases]
    with ReleasedNoise(engine) as watch:
        for inputs, targets in loader:
            optimizer.zero_grad()
            criterion(model(inputs), targets).backward()
            optimizer.step()
    return watch.result(confidence=0.999).exposed


def summary(kind: str, audit: str, found: list[bool]) -> dict[str, Any]:
    interval = clopper_pearson(successes=sum(found), trials=len(found), confidence=0.95)
    row = {"runs of": kind, "audit": audit, "runs": len(found), "exposed": sum(found),
           "share": interval.value, "low": interval.low, "high": interval.high}  # fmt: skip
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--correct", type=int, default=200)
    parser.add_argument("--broken", type=int, default=100)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--name", default="audit-power")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for kind in given.kinds:
        runs = given.correct if kind.startswith("correct") else given.broken
        found = [one_run(kind, seed) for seed in range(runs)]
        rows += [summary(kind, each, [run[each] for run in found]) for each in found[0]]
    for kind, part, runs in (
        ("correct", 1.0, given.correct), ("noise x 0.8", 0.8, given.broken)
    ):  # fmt: skip
        if kind not in given.kinds:
            continue
        rows.append(summary(kind, "energy", [energy(part, seed) for seed in range(runs)]))
    save(
        given.name, rows,
        notes="noise is seeded, to be repeated: what the ledger counts is taken for the claim",
    )  # fmt: skip


if __name__ == "__main__":
    main()
