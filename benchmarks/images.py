"""Private image accuracy by recipe, with certificates, membership inference and an ablation.

    python benchmarks/images.py --data FOLDER [--recipes NAME ...] [--parts NAME ...] [--seeds 3]

FOLDER holds the data sets as `clipless.data.load` reads them. Parts: `accuracy` (every recipe, all
seeds), `certificates` (CIFAR-10 at epsilon 20 and 1 over the temperature, with membership
inference), `dropin` (one Lipschitz network under this library and under Opacus), `tightness`
(gradient norms over their bounds by colour space), `tables`, `plots`. Results are kept under
`results/`: `images.json` is a list of `{dataset, recipe, epsilon, delta, seed, accuracy, seconds}`,
to which a later call adds; rows of the same recipe and seed are replaced. Rows of the prior from
random processes come from `examples/random_prior.py`.
"""

import argparse
import dataclasses
import itertools
import json
from pathlib import Path

import torch
from _images_dropin import dropin
from _images_tables import PAPER_RADII, plot, print_tables
from _images_tightness import tightness_by_colour
from _results import RESULTS, save, save_rows

from clipless.audit import membership_inference
from clipless.images import (
    ImageFeatures,
    image_config,
    image_recipes,
    rule_of,
    run_recipe,
    train_images,
)
from clipless.losses import CrossEntropy
from clipless.robustness import certified_accuracy
from clipless.runs import load_data

CERTIFIED = "cifar10-certified"
TEMPERATURES = (4.0, 8.0, 16.0, 32.0, 64.0)
PARTS = ("accuracy", "certificates", "dropin", "tightness", "tables", "plots")
FIRST_SEED = 100
"""Seeds below were used to choose the rule's constants."""


class Sets:
    """Data sets and features of their training images, each computed once."""

    def __init__(self, root, device):
        self.root, self.device = root, device
        self._data, self._features = {}, {}

    def data(self, config):
        name = config.data.name
        if name not in self._data:
            self._features.clear()  # those of one set at a time fit into memory
            found = load_data(dataclasses.replace(config.data, root=str(self.root)))
            moved = [tuple(t.to(self.device) for t in pair) for pair in (found.train, found.test)]
            self._data[name] = dataclasses.replace(found, train=moved[0], test=moved[1])
        return self._data[name]

    def features(self, config):
        data = self.data(config)
        rule = rule_of(config, examples=data.size)
        key = config.data.name, rule.mirror, rule.root
        if key not in self._features:
            self._features.clear()
            front = ImageFeatures(data.input_shape, mirror=rule.mirror, root=rule.root)
            self._features[key] = front.to(self.device).compute(data.train[0])
        return self._features[key]


def keep(rows):
    """Add rows to the list of results, in place of those of the same recipe and seed."""
    path = RESULTS / "images.json"
    known = json.loads(path.read_text()) if path.exists() else []
    new = {(row["recipe"], row["seed"]) for row in rows}
    known = [row for row in known if (row["recipe"], row["seed"]) not in new]
    merged = sorted([*known, *rows], key=lambda row: (row["recipe"], row["seed"]))
    save_rows("images", merged, notes="seconds: features given, statistics and training")


def accuracy(sets, names, seeds):
    for name in names:
        config = image_config(name)
        for seed in seeds:
            result, _ = run_recipe(
                name, seed=seed, device=sets.device, data=sets.data(config),
                features=sets.features(config),
            )  # fmt: skip
            row = result.to_dict()
            row |= {key: round(row[key], 4) for key in ("epsilon", "accuracy")}
            row["seconds"] = round(row["seconds"], 1)
            print(row, flush=True)
            keep([row])


def certificates(sets, seeds, epsilons):
    """Certified accuracy over the temperature, and what membership inference finds."""
    config = image_config(CERTIFIED)
    data, features = sets.data(config), sets.features(config)
    test, labels = data.test
    rows = []
    for epsilon, temperature, seed in itertools.product(epsilons, TEMPERATURES, seeds):
        privacy = dataclasses.replace(config.privacy, epsilon=epsilon)
        rule = rule_of(dataclasses.replace(config, privacy=privacy), examples=data.size)
        chosen = dataclasses.replace(rule, temperature=temperature)
        trained = train_images(
            *data.train, classes=10, epsilon=epsilon,
            delta=config.privacy.delta, rule=chosen, features=features,
        )  # fmt: skip
        found = certified_accuracy(
            trained.model, test, labels, radii=[r / 255 for r in PAPER_RADII]
        )
        attack = membership_inference(
            trained.model, tuple(part[: len(test)] for part in data.train), data.test,
            loss=CrossEntropy(tau=temperature),
        )  # fmt: skip
        rows.append({
            "dataset": "cifar10", "recipe": CERTIFIED, "temperature": temperature,
            "epsilon": round(trained.privacy.epsilon, 4), "delta": trained.privacy.delta,
            "seed": seed, "lipschitz": found.lipschitz,
            "radii_of_255": list(PAPER_RADII),
            "certified": [round(a, 4) for a in found.accuracies],
            "membership_auroc": round(attack.best_auroc.value, 4),
            "membership_advantage": round(attack.best_advantage.value, 4),
            "seconds": round(trained.seconds, 1),
        })  # fmt: skip
        print(rows[-1], flush=True)
        save("images-certificates", rows, notes="Radii are Euclidean, pixels from 0 to 1.")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--recipes", nargs="+", default=list(image_recipes()))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["accuracy", "tables"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[20.0, 1.0],
                        help="of the certificates")  # fmt: skip
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    # The slack in the sensitivities covers float32, not TF32.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    sets = Sets(options.data, options.device)
    seeds = range(FIRST_SEED, FIRST_SEED + options.seeds)
    if "accuracy" in options.parts:
        accuracy(sets, options.recipes, seeds)
    if "certificates" in options.parts:
        certificates(sets, seeds, options.epsilons)
    if "dropin" in options.parts:
        save("images-dropin", dropin(options.data, options.device))
    if "tightness" in options.parts:
        save("images-tightness", tightness_by_colour(options.data, options.device))
    if "tables" in options.parts:
        print_tables()
    if "plots" in options.parts:
        plot()


if __name__ == "__main__":
    main()
