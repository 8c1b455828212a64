"""A worker with runs of a few milliseconds, to be started as a process, and killed.

    python -m tests.sweeps.worker OUT STORAGE TRIALS BLOCK

Run BLOCK hangs at its first attempt. STORAGE may be `-` for the file in OUT. No torch here: a
worker of this kind starts in about a second.
"""

import os
import sys
import time
from pathlib import Path

import optuna

from clipless.sweeps import Outcome, Sweep, run_sweep


def definition(trials, **sections):
    given = {"trials": trials, "sampler": "random", "pruner": "none"}
    space = {"training.learning_rate": {"low": 1e-3, "high": 1.0}}
    return Sweep.from_dict({"sweep": given, "space": space, **sections})


def release(sigma=1.0, count=10):
    sampling = {"kind": "poisson", "dataset_size": 1000, "rate": 0.1, "max_batch_size": None}
    fields = {"noise_multiplier": sigma, "sampling": sampling, "relation": "zero_out"}
    return [(fields, count)]


def train(settings, folder, report, block=-1):
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "attempts").open("a") as file:
        file.write(f"{os.getpid()}\n")
    if int(folder.name) == block and len((folder / "attempts").read_text().split()) == 1:
        time.sleep(300)
    time.sleep(0.02)
    rate = settings["training"]["learning_rate"]
    return Outcome(value=1.0 - abs(rate - 0.1), epsilon=1.0, delta=1e-5, history=release())


def main():
    out, storage, trials, block = sys.argv[1:]
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    run_sweep(
        definition(int(trials)),
        out,
        storage=None if storage == "-" else storage,
        train=lambda settings, folder, report: train(settings, folder, report, int(block)),
        heartbeat=1,
    )
    print(sorted(path.name for path in Path(out, "trials").iterdir()))


if __name__ == "__main__":
    main()
