"""The pictures of the pages, drawn while the site is built; curves are computed, not sketched.

python tools/site/pictures.py     write the one picture that README shows, docs/pictures/overview.*
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent)]

from drawing import save  # noqa: E402 (a sibling, found by the line above)
from results import load  # noqa: E402

from clipless.plots import COLOURS, EDGE, INK, new_figure  # noqa: E402

BLUE, ORANGE, GREY, GREEN = COLOURS
NOTE: dict[str, Any] = {"color": INK, "fontsize": 9}


def files() -> dict[str, str]:
    """Return places and contents of all pictures that are generated."""
    found: dict[str, str] = {}
    for name, draw in PICTURES.items():
        drawn = save(draw(), name)
        found |= {f"pictures/{file}": content for file, content in drawn.items()}
    return found


def _grid(low: float, high: float, count: int = 400) -> list[float]:
    return [low + (high - low) * k / (count - 1) for k in range(count)]


def _normal(x: float, mean: float, deviation: float) -> float:
    return math.exp(-(((x - mean) / deviation) ** 2) / 2) / (deviation * math.sqrt(2 * math.pi))


def two_worlds() -> Any:
    """Densities of a noisy count with and without one person."""
    figure, (axes,) = new_figure(width=6.4, height=2.8)
    xs = _grid(86, 113)
    for mean, name, colour in ((100, "with Ada", BLUE), (99, "without Ada", ORANGE)):
        ys = [_normal(x, mean, 4.0) for x in xs]
        axes.plot(xs, ys, color=colour, label=name)
        axes.fill_between(xs, ys, color=colour, alpha=0.12)
    axes.axvline(101.3, color=EDGE, linestyle="--")
    axes.text(101.6, 0.012, "published: 101.3", **NOTE)
    axes.set(xlabel="published count (noise of standard deviation 4)", yticks=[])
    axes.legend(frameon=False, labelcolor=INK)
    return figure


def guess() -> Any:
    """The largest probability of a right guess, over epsilon."""
    figure, (axes,) = new_figure(width=6.4, height=2.8)
    xs = _grid(0, 8)
    axes.plot(xs, [math.exp(e) / (1 + math.exp(e)) for e in xs], color=BLUE)
    axes.axhline(0.5, color=EDGE, linestyle="--")
    axes.text(5.6, 0.515, "without any release", **NOTE)
    for epsilon in (0.5, 1, 2, 3):
        right = math.exp(epsilon) / (1 + math.exp(epsilon))
        axes.plot([epsilon], [right], marker="o", color=BLUE)
        axes.annotate(
            f"{right:.1%}", (epsilon, right), (6, -12), textcoords="offset points", **NOTE
        )
    axes.set(xlabel="epsilon", ylabel="right guesses at most", ylim=(0.45, 1.02), xlim=(0, 8))
    return figure


def delta() -> Any:
    """The part of one density that lies above e^epsilon times the other."""
    figure, (axes,) = new_figure(width=6.4, height=2.8)
    epsilon, deviation = 1.0, 1.0
    xs = _grid(-3, 4.5)
    first = [_normal(x, 1, deviation) for x in xs]
    second = [math.exp(epsilon) * _normal(x, 0, deviation) for x in xs]
    axes.plot(xs, first, color=BLUE, label="one world")
    axes.plot(xs, second, color=ORANGE, label="e^epsilon times the other")
    above = [a > b for a, b in zip(first, second, strict=True)]
    axes.fill_between(xs, first, second, where=above, color=BLUE, alpha=0.35)
    arrow = {"arrowstyle": "->", "color": EDGE}
    axes.annotate("its area is delta", (2.0, 0.2), (2.6, 0.45), arrowprops=arrow, **NOTE)
    axes.set(
        xlabel="what is released (noise as large as the sensitivity, epsilon 1)",
        yticks=[],
        ylim=(0, 0.75),
    )
    axes.legend(frameon=False, labelcolor=INK, loc="upper left")
    return figure


def sensitivity() -> Any:
    """Contributions of examples below the bound that all of them keep."""
    figure, (axes,) = new_figure(width=6.4, height=2.6)
    lengths = [0.2 + 0.55 * abs(math.sin(7.3 * k + 1)) for k in range(24)]
    axes.bar(range(24), lengths, color=BLUE, width=0.7)
    axes.axhline(1.0, color=ORANGE)
    axes.text(0, 1.03, "the bound: noise is proportional to this", **NOTE)
    axes.axhline(max(lengths), color=EDGE, linestyle="--")
    axes.text(23.6, max(lengths) + 0.03, "largest in these data: secret", ha="right", **NOTE)
    axes.set(xlabel="examples", ylabel="contribution", xticks=[], ylim=(0, 1.2))
    return figure


def clipping() -> Any:
    """Gradients cut to a circle, and gradients that never leave it."""
    figure, panels = new_figure(panels=2, width=3.6, height=3.4)
    raw = [(2.4, 0.5), (0.3, 0.8), (-0.1, 0.7), (0.5, 0.3)]
    for axes, title in zip(
        panels, ("DP-SGD: cut each one", "Lipschitz: never longer"), strict=True
    ):
        clips = title.startswith("DP-SGD")
        scale = 1.0 if clips else 0.95 / max(math.hypot(*each) for each in raw)
        vectors = [(scale * x, scale * y) for x, y in raw]
        turn = _grid(0, 2 * math.pi, 100)
        axes.plot([math.cos(t) for t in turn], [math.sin(t) for t in turn], color=EDGE)
        used = []
        for x, y in vectors:
            factor = min(1.0, 1 / math.hypot(x, y))
            used.append((factor * x, factor * y))
            if factor < 1:
                axes.plot([0, x], [0, y], color=GREY, linestyle=":")
            _arrow(axes, used[-1], BLUE)
        for group, colour, dashes in ((vectors, GREY, ":"), (used, ORANGE, "-")):
            x, y = (sum(v[i] for v in group) for i in (0, 1))
            length = math.hypot(x, y)
            tip = (1.45 * x / length, 1.45 * y / length)
            axes.plot([0, tip[0]], [0, tip[1]], color=colour, linestyle=dashes, linewidth=2)
        axes.set(
            title=title, xlim=(-1.1, 2.5), ylim=(-1.7, 1.7), xticks=[], yticks=[], aspect="equal"
        )
        axes.grid(visible=False)
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.text(
            -1.05,
            -1.65,
            "orange: direction of the sum that is used\ndotted grey: of the true sum",
            **NOTE | {"fontsize": 8},
        )
    return figure


def _arrow(axes: Any, tip: tuple[float, float], colour: str) -> None:
    axes.annotate(
        "", tip, (0, 0), arrowprops={"arrowstyle": "->", "color": colour, "linewidth": 1.6}
    )


def chain() -> Any:
    """Bounds of a small network, those that `clipless.sensitivity` proves."""
    import torch

    import clipless
    from clipless import losses
    from clipless import nn as lip

    model = torch.nn.Sequential(
        lip.BoundedInput(4.0), lip.SpectralLinear(20, 32, bias=False), lip.GroupSort(2),
        lip.SpectralLinear(32, 10, bias=False),
    )  # fmt: skip
    report = clipless.sensitivity(model, loss=losses.CrossEntropy(), input_shape=(20,))
    names = ("input guard", "linear", "GroupSort", "linear")
    figure, (axes,) = new_figure(width=8.0, height=2.5)
    nodes = [node for node in report.nodes if node.input_bounds]
    for place, (name, node) in enumerate(zip(names, nodes, strict=True)):
        box = {"boxstyle": "round,pad=0.5", "facecolor": "none", "edgecolor": EDGE}
        axes.text(place, 0, name, ha="center", va="center", color=INK, fontsize=10, bbox=box)
        axes.annotate(
            "",
            (place + 0.75, 0.42),
            (place + 0.25, 0.42),
            arrowprops={"arrowstyle": "->", "color": BLUE},
        )
        axes.annotate(
            "",
            (place + 0.25, -0.42),
            (place + 0.75, -0.42),
            arrowprops={"arrowstyle": "->", "color": ORANGE},
        )
        axes.text(
            place + 0.5, 0.52, f"X = {node.output_bound:.3g}", ha="center", color=BLUE, fontsize=9
        )
        axes.text(
            place + 0.5,
            -0.68,
            f"G = {node.cotangent_bound:.3g}",
            ha="center",
            color=ORANGE,
            fontsize=9,
        )
        for bound in node.gradient_bounds.values():
            axes.text(place, -1.05, f"gradient at most {bound:.3g}", ha="center", **NOTE)
    axes.text(4.0, 0, "loss", ha="center", va="center", color=INK, fontsize=10)
    axes.set(xlim=(-0.5, 4.3), ylim=(-1.2, 0.8))
    axes.axis("off")
    return figure


def sampling() -> Any:
    """Epsilon of one step over the sampling rate."""
    from clipless.accounting import Mechanism, PoissonSampling, epsilon

    figure, (axes,) = new_figure(width=6.4, height=2.8)
    rates = [10 ** (-3 + 3 * k / 12) for k in range(13)]
    found = []
    for rate in rates:
        step = Mechanism(
            noise_multiplier=1.0, sampling=PoissonSampling(dataset_size=100_000, rate=rate)
        )
        found.append(epsilon([(step, 1)], 1e-6))
    axes.plot(rates, found, marker="o", markersize=3.5, color=BLUE)
    axes.set(xscale="log", yscale="log", xlabel="sampling rate q", ylabel="epsilon of one step",
             title="noise multiplier 1, delta 1e-6")  # fmt: skip
    return figure


def composition() -> Any:
    """Epsilon over steps, by adding up and by the accountant."""
    from clipless.accounting import Mechanism, PoissonSampling, epsilon

    figure, (axes,) = new_figure(width=6.4, height=2.8)
    step = Mechanism(
        noise_multiplier=2.42, sampling=PoissonSampling(dataset_size=60_000, rate=4096 / 60_000)
    )
    counts = [1, 10, 25, 50, 100, 150, 200, 250, 300, 350, 400, 450]
    # Adding up splits delta as well: each step gets its part of it.
    added = [count * epsilon([(step, 1)], 1e-6 / count) for count in counts]
    together = [epsilon([(step, count)], 1e-6) for count in counts]
    axes.plot(counts, added, color=ORANGE, label="adding up")
    axes.plot(counts, together, color=BLUE, label="the accountant")
    axes.set(
        xlabel="steps", ylabel="epsilon at delta 1e-6", xlim=(0, None), ylim=(0, 4 * together[-1])
    )
    axes.legend(frameon=False, labelcolor=INK)
    return figure


def batches() -> Any:
    """Noise of an update over the batch size at a fixed epsilon."""
    from clipless.accounting import PoissonSampling, noise_multiplier_for

    figure, (axes,) = new_figure(width=6.4, height=2.8)
    sizes = [256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768]
    noise = []
    for size in sizes:
        plan = PoissonSampling(dataset_size=60_000, rate=size / 60_000)
        sigma = noise_multiplier_for(
            target_epsilon=3.0, target_delta=1e-6, steps=450, sampling=plan
        )
        noise.append(sigma / size)
    axes.plot(sizes, noise, marker="o", markersize=3.5, color=BLUE)
    axes.set(xscale="log", yscale="log", xlabel="batch size", ylabel="sigma / b",
             title="60,000 examples, 450 steps, epsilon 3, delta 1e-6")  # fmt: skip
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    return figure


def certificate() -> Any:
    """Points, a boundary, and the discs that cannot cross it."""
    figure, (axes,) = new_figure(width=5.2, height=3.4)
    xs = _grid(-3, 3)
    slope = 0.35
    boundary = [slope * math.sin(1.2 * x) for x in xs]
    axes.plot(xs, boundary, color=EDGE)
    # y - h(x) is Lipschitz with constant sqrt(1 + max h'^2): margins over it are certified radii.
    lipschitz = math.sqrt(1 + (1.2 * slope) ** 2)
    turn = _grid(0, 2 * math.pi, 80)
    for x, y in (
        (-2.2, 1.2),
        (-0.6, 0.5),
        (1.2, 1.4),
        (2.3, 0.35),
        (-1.6, -1.2),
        (0.3, -0.8),
        (1.9, -1.1),
    ):
        margin = y - slope * math.sin(1.2 * x)
        radius, colour = abs(margin) / lipschitz, BLUE if margin > 0 else ORANGE
        axes.plot([x], [y], marker="o", markersize=4, color=colour)
        disc = [(x + radius * math.cos(t), y + radius * math.sin(t)) for t in turn]
        axes.fill(*zip(*disc, strict=True), color=colour, alpha=0.15)
    axes.set(
        aspect="equal",
        xticks=[],
        yticks=[],
        ylim=(-2.4, 2.7),
        title="radius = margin / Lipschitz constant",
    )
    axes.grid(visible=False)
    return figure


def overview() -> Any:
    """Time and memory of a step, and accuracy on tables, against Opacus: from committed results."""
    figure, (left, right) = new_figure(panels=2, width=4.6, height=3.3)
    shown = step_times()
    names = list(shown)[::-1]
    colours = [
        BLUE if "clipless" in name else GREY if "no privacy" in name else ORANGE for name in names
    ]
    left.barh(names, [shown[name] for name in names], color=colours, height=0.62)
    for place, name in enumerate(names):
        left.annotate(
            f"{shown[name]:.1f}", (shown[name], place), (4, 0), textcoords="offset points",
            va="center", **NOTE,
        )  # fmt: skip
    left.grid(visible=False, axis="y")
    left.margins(x=0.15)
    left.set(xlabel="milliseconds a step, batch 2,048, one H200", title="Time")
    ours, theirs = auroc("clipless"), auroc("opacus")
    order = sorted(ours, key=lambda name: ours[name] - theirs[name])
    for place, name in enumerate(order):
        right.plot([theirs[name], ours[name]], [place, place], color=EDGE, linewidth=1)
    right.plot(
        [theirs[n] for n in order], range(len(order)), "o", color=ORANGE, label="Opacus, tuned"
    )
    right.plot([ours[n] for n in order], range(len(order)), "o", color=BLUE, label="clipless")
    right.set_yticks(range(len(order)), order)
    right.set(xlabel="AUROC at epsilon 1, eight tables", title="Accuracy")
    right.legend(frameon=False, labelcolor=INK, fontsize=9, loc="lower left")
    return figure


def step_times() -> dict[str, float]:
    """Return milliseconds of a step of the CNN of 0.4M parameters, batch 2,048, by method."""
    _, rows = load("speed-gpu")
    wanted = {
        "no privacy": ("nonprivate-relu", "eager"),
        "no privacy, compiled": ("nonprivate-relu", "compiled"),
        "clipless": ("clipless", "eager"),
        "clipless, compiled": ("clipless", "compiled"),
        "Opacus, hooks": ("opacus-hooks", "eager"),
        "Opacus, ghost": ("opacus-ghost", "eager"),
    }
    cnn = {
        (r["method"], r["mode"]): r for r in rows if r["model"] == "cnn-400K" and r["batch"] == 2048
    }
    return {name: cnn[key]["milliseconds"] for name, key in wanted.items()}


def auroc(method: str) -> dict[str, float]:
    """Return a method's mean AUROC of each table."""
    _, rows = load("tabular")
    names = sorted({row["dataset"] for row in rows})
    return {
        name: statistics.mean(
            row["auroc"] for row in rows if (row["dataset"], row["method"]) == (name, method)
        )
        for name in names
    }


PICTURES: dict[str, Callable[[], Any]] = {
    "two-worlds": two_worlds,
    "guess": guess,
    "delta": delta,
    "sensitivity": sensitivity,
    "clipping": clipping,
    "chain": chain,
    "sampling": sampling,
    "composition": composition,
    "batches": batches,
    "certificate": certificate,
}

if __name__ == "__main__":
    folder = HERE.parents[1] / "docs" / "pictures"
    folder.mkdir(exist_ok=True)
    for file, content in save(overview(), "overview").items():
        (folder / file).write_text(content, encoding="utf-8")
