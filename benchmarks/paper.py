"""The paper's tables and figures, each beside ours: `python benchmarks/paper.py --table 1`.

Figures of the paper are quoted where it prints numbers; ours come from the committed results
(`benchmarks/results/*.json`), or, for tables of constants, from the library itself. `--list` names
all; `--run` measures ours again (hours for some, on a GPU for the speed), into a scratch folder
unless CLIPLESS_COMMIT_RESULTS=1; `--markdown` prints all as they stand in docs/paper.md.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Comparison:
    """Rows of text: the first one holds the titles of the columns."""

    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """Return a table in Markdown."""
        head, *rest = ("| " + " | ".join(row) + " |" for row in self.rows)
        return "\n".join((head, "|" + "---|" * len(self.rows[0]), *rest))


@dataclass(frozen=True)
class Item:
    """A table or figure of the paper: what it shows, what we have, and how to measure it again."""

    name: str
    title: str
    compare: Callable[[], Comparison]
    command: str | None
    remark: str = ""

    def markdown(self) -> str:
        """Return heading, command, table and remark."""
        how = f"`{self.command}`" if self.command else "Computed from the library as it is."
        parts = [f"### {self.name}: {self.title}", how, self.compare().markdown(), self.remark]
        return "\n\n".join(part for part in parts if part)


def results(name: str) -> Any:
    """Return committed results."""
    data = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return data["results"] if isinstance(data, dict) and "results" in data else data


def mean(values: Sequence[float], digits: int = 1) -> str:
    """Return the mean as text."""
    return f"{statistics.fmean(values):.{digits}f}"


PAPER_TABLES = {  # AUROC and seconds: DP-SGD, Clipless DP-SGD
    "ALOI": (56.5, 56.2, 159.1, 11.3), "campaign": (90.0, 82.2, 155.6, 11.8),
    "celeba": (96.6, 96.5, 41.1, 34.6), "census": (93.3, 92.5, 820.0, 79.8),
    "donors": (100.0, 100.0, 257.9, 90.2), "magic": (90.7, 89.7, 89.9, 56.0),
    "shuttle": (98.3, 99.4, 11.1, 6.8), "skin": (100.0, 99.8, 54.2, 40.2),
    "yeast": (66.8, 75.1, 22.1, 5.6),
}  # fmt: skip
PAPER_CERTIFIED = (47.4, 39.1, 35.6, 30.9, 25.9, 19.7)
"""The best of each radius over six temperatures, at epsilon 20."""


def tables() -> Comparison:
    """AUROC of tables at epsilon 1, and seconds of a training."""
    found = results("tabular")
    rows = [("set", "paper: DP-SGD", "paper: Clipless", "ours", "tuned Opacus, our features",
             "seconds: paper's Clipless", "ours")]  # fmt: skip
    for name, (clipped, clipless, _, seconds) in PAPER_TABLES.items():
        ours, opacus = (
            [
                each
                for each in found
                if each["dataset"].startswith(name) and each["method"] == method
            ]
            for method in ("clipless", "opacus")
        )
        if ours:
            rows.append((
                name, f"{clipped}", f"{clipless}", mean([each["auroc"] for each in ours]),
                mean([each["auroc"] for each in opacus]) if opacus else "",
                f"{seconds}", mean([each["seconds"] for each in ours]),
            ))  # fmt: skip
        else:
            rows.append((name, f"{clipped}", f"{clipless}", "not run", "", f"{seconds}", ""))
    return Comparison(rows)


def certificates() -> Comparison:
    """Certified accuracy of CIFAR-10, for each epsilon and temperature."""
    found = results("images-certificates")
    radii = found[0]["radii_of_255"]
    rows: list[Sequence[str]] = [("", *(f"r = {each}/255" for each in radii), "attack AUROC")]
    rows.append(("paper, epsilon 20, best of each radius", *map(str, PAPER_CERTIFIED), "59.8"))
    for budget in sorted({round(each["epsilon"]) for each in found}, reverse=True):
        best = [0.0] * len(radii)
        for tau in sorted({each["temperature"] for each in found}):
            runs = [each for each in found
                    if each["temperature"] == tau and round(each["epsilon"]) == budget]  # fmt: skip
            if not runs:
                continue
            columns = zip(*(each["certified"] for each in runs), strict=True)
            means = [100 * statistics.fmean(each) for each in columns]
            best = list(map(max, best, means))
            attack = mean([100 * each["membership_auroc"] for each in runs])
            label = f"ours, epsilon {budget}, tau {tau:g}"
            rows.append((label, *(f"{each:.1f}" for each in means), attack))
        rows.append((f"**ours, epsilon {budget}, best**", *(f"**{x:.1f}**" for x in best), ""))
    return Comparison(rows)


def loss_constants() -> Comparison:
    """Lipschitz constants of losses, the paper's and the proved ones."""
    from clipless import losses

    def ours(loss: Any, outputs: int) -> str:
        return f"{loss.lipschitz_for((outputs,)):.4g}"

    return Comparison([
        ("loss", "paper", "ours", "why"),
        ("cross-entropy, CE(tau y) / tau", "1.414", ours(losses.CrossEntropy(tau=2.0), 10), ""),
        ("cosine similarity, floor c = 0.5", "1/c = 2", ours(losses.CosineSimilarity(0.5), 10), ""),
        ("multiclass hinge, mean over 10 classes", "1", ours(losses.MulticlassHinge(1.0), 10),
         "each class has 1/K of the loss: `1/sqrt(K)`"),
        ("Kantorovich-Rubinstein, 2 classes", "1", ours(losses.KantorovichRubinstein(), 2),
         "per example; weighting by counts of a batch reached 256"),
    ])  # fmt: skip


def layer_constants() -> Comparison:
    """Parameter Jacobians of layers for an input of norm one, the paper's and the proved ones."""
    import torch

    import clipless
    from clipless import losses
    from clipless import nn as lip

    def bound(layer: torch.nn.Module, shape: tuple[int, ...], name: str) -> float:
        model = torch.nn.Sequential(lip.BoundedInput(1.0), layer, torch.nn.Flatten())
        report = clipless.sensitivity(model, loss=losses.CrossEntropy(), input_shape=shape)
        return report.gradient_bounds[f"1.{name}"] / math.sqrt(2)

    dense = bound(lip.SpectralLinear(16, 8), (16,), "weight")
    kernel = bound(lip.SpectralConv2d(3, 8, 3, padding=1), (3, 28, 28), "weight")
    bias = bound(lip.SpectralConv2d(3, 8, 3, padding=1, bias=True), (3, 28, 28), "bias")
    averaged = math.sqrt(1 / ((1 - 2 / (2 * 28)) * (1 - 2 / (2 * 28))))
    return Comparison([
        ("layer", "paper", "ours", "why"),
        ("1-Lipschitz dense", "1", f"{dense:.4g}", ""),
        ("RKO convolution, 3x3 on 28x28", f"{averaged:.4g}", f"{kernel:.4g}",
         "the coefficient is of our own size, `1/sqrt(m)`, so that the constant is exact"),
        ("bias on 28x28 positions", "1", f"{bias:.4g}", "`sqrt(H W)`: the bias is used everywhere"),
    ])  # fmt: skip


def images() -> Comparison:
    """Accuracy of images at each epsilon; the paper draws Pareto fronts."""
    rows: list[Sequence[str]] = [("data", "ours, recipe", "epsilon", "accuracy, mean of seeds")]
    found = [*results("images"), *results("mnist")]
    for key in dict.fromkeys((r["dataset"], r["recipe"], round(r["epsilon"])) for r in found):
        runs = [r["accuracy"] for r in found
                if (r["dataset"], r["recipe"], round(r["epsilon"])) == key]  # fmt: skip
        rows.append((key[0], key[1], str(key[2]), mean([100 * each for each in runs])))
    return Comparison(rows)


def speed() -> Comparison:
    """Milliseconds and memory of a step."""
    found = [r for r in results("speed-gpu") if r["model"] == "cnn-400K"]
    methods = [("plain PyTorch, compiled", "nonprivate-relu", "compiled"),
               ("clipless, compiled", "clipless", "compiled"),
               ("clipless, eager", "clipless", "eager"),
               ("Opacus, hooks", "opacus-hooks", "eager"),
               ("Opacus, ghost clipping", "opacus-ghost", "eager")]  # fmt: skip
    sizes = sorted({r["batch"] for r in found})
    rows: list[Sequence[str]] = [("ms (GiB) a step", *(f"batch {each:,}" for each in sizes))]
    for title, method, mode in methods:
        cells = {r["batch"]: f"{r['milliseconds']:.1f} ({r['peak_gib']:.2f})"
                 for r in found if (r["method"], r["mode"]) == (method, mode)}  # fmt: skip
        rows.append((title, *(cells.get(each, "") for each in sizes)))
    return Comparison(rows)


def tightness() -> Comparison:
    """Largest gradient over its bound, for each colour space and layer."""
    found = results("images-tightness")
    names = list(dict.fromkeys(r["parameter"] for r in found))
    rows: list[Sequence[str]] = [("largest over bound, in %", *names)]
    for colour in dict.fromkeys(r["colour"] for r in found):
        cells = {r["parameter"]: f"{100 * r['largest'] / r['bound']:.2f}"
                 for r in found if r["colour"] == colour}  # fmt: skip
        rows.append((colour, *(cells[name] for name in names)))
    return Comparison(rows)


def drop_in() -> Comparison:
    """The same Lipschitz network under clipping by Opacus and without."""
    rows: list[Sequence[str]] = [("method", "data", "epsilon", "accuracy", "seconds an epoch")]
    rows += [
        (r["method"], r["dataset"], f"{r['epsilon']:.1f}", f"{100 * r['accuracy']:.1f}",
         f"{r['seconds_per_epoch']:.2f}")
        for r in results("images-dropin")
    ]  # fmt: skip
    return Comparison(rows)


_IMAGES = "python benchmarks/images.py --data FOLDER --parts"
_PLOT = "The paper has a drawing and prints no numbers."
ITEMS = (
    Item("Table 1", "certified accuracy of CIFAR-10 at epsilon 20", certificates,
         f"{_IMAGES} certificates",
         "The paper takes the best temperature of each radius; ours are shown one by one."),
    Item("Table 4", "Lipschitz constants of losses", loss_constants, None),
    Item("Table 5", "Lipschitz constants with respect to parameters", layer_constants, None),
    Item("Table 7", "tables at epsilon 1 (the table of Figure 3 too)", tables,
         "python benchmarks/tabular.py --data FOLDER",
         "The paper's are the best of a sweep, ours one default, everything paid for."),
    Item("Figure 3", "accuracy and epsilon on MNIST", images, f"{_IMAGES} accuracy", _PLOT),
    Item("Figure 4", "privacy, accuracy and robustness on CIFAR-10", certificates,
         f"{_IMAGES} certificates", _PLOT),
    Item("Figure 5", "time and memory of a step, on one H200", speed, "python benchmarks/speed.py",
         "The paper's were measured on another GPU, as a drawing."),
    Item("Figure 8", "norms in colour spaces", tightness, f"{_IMAGES} tightness", _PLOT),
    Item("Figure 14", "Pareto fronts of MNIST, Fashion-MNIST and CIFAR-10", images,
         f"{_IMAGES} accuracy", _PLOT),
    Item("Figure 19", "gradient norm preserving networks under DP-SGD", drop_in,
         f"{_IMAGES} dropin", _PLOT),
)  # fmt: skip


def markdown(items: Sequence[Item]) -> str:
    """Return several comparisons as one text; what shows the same as another one refers to it."""
    parts, shown = [], dict[Callable[[], Comparison], str]()
    for item in items:
        if item.compare in shown:
            parts.append(
                f"### {item.name}: {item.title}\n\nSee {shown[item.compare]}. {item.remark}"
            )
        else:
            shown[item.compare] = item.name
            parts.append(item.markdown())
    return "\n\n".join(parts)


def main() -> None:
    """Print or measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", type=int, action="append", default=[])
    parser.add_argument("--figure", type=int, action="append", default=[])
    parser.add_argument("--list", action="store_true", help="name what there is")
    parser.add_argument("--markdown", action="store_true", help="print all, as in docs/paper.md")
    parser.add_argument("--run", metavar="FOLDER", help="measure again, with the data of FOLDER")
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{item.name:10} {item.title}" for item in ITEMS))
        return
    if options.markdown:
        print(markdown(ITEMS))
        return
    wanted = {f"Table {n}" for n in options.table} | {f"Figure {n}" for n in options.figure}
    chosen = [item for item in ITEMS if item.name in wanted]
    unknown = wanted - {item.name for item in chosen}
    if unknown or not wanted:
        parser.error(f"no {' or '.join(sorted(unknown)) or 'choice'}: see --list for what there is")
    for item in chosen:
        if options.run and item.command:
            command = shlex.split(item.command.replace("FOLDER", shlex.quote(options.run)))
            subprocess.run([sys.executable, *command[1:]], check=True, cwd=ROOT)
        print(item.markdown())


if __name__ == "__main__":
    main()
