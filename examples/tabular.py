"""For people who know scikit-learn: a private classifier for a table with text and gaps.

    python examples/tabular.py [--rows 8000]

The table is made up: customers with an age, an income that is sometimes missing, a city, a
contract, and whether they left. Nothing is scaled, filled in or encoded beforehand.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

from clipless import sklearn as private


def customers(rows: int, seed: int = 0) -> tuple[pd.DataFrame, pd.Series]:
    random = np.random.default_rng(seed)
    age = random.integers(18, 90, rows)
    income = random.lognormal(10, 0.6, rows)
    contract = random.choice(["monthly", "yearly", "two years"], rows, p=[0.5, 0.3, 0.2])
    pull = 1.5 * (contract == "monthly") - 0.03 * (age - 50) - 0.5 * np.log(income / 22_000)
    left = random.random(rows) < 1 / (1 + np.exp(-1.5 * pull))
    income[random.random(rows) < 0.15] = np.nan
    table = pd.DataFrame(
        {
            "age": age,
            "income": income,
            "city": random.choice(["Lyon", "Nantes", "Lille", None], rows),
            "contract": contract,
        }
    )
    return table, pd.Series(np.where(left, "left", "stayed"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8000)
    rows = parser.parse_args().rows
    table, label = customers(rows)
    train, test = slice(0, 3 * rows // 4), slice(3 * rows // 4, None)

    model = private.CliplessClassifier(epsilon=1.0).fit(table[train], label[train])
    print(f"accuracy {model.score(table[test], label[test]):.3f} at epsilon 1")

    print(model.privacy_)

    radius = model.certified_radius(table[test])
    print(f"half of the predictions hold if numbers move by up to {np.median(radius):.3f} spreads")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        model.save(path)  # one file, no pickle
        restored = private.load(path)
    assert (restored.predict(table[test]) == model.predict(table[test])).all()


if __name__ == "__main__":
    main()
