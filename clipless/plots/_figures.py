"""The figures themselves, each from plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from clipless.plots._style import COLOURS, EDGE, INK, finish_legend, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_BARS = 40
_CURVES = (
    ("loss", "training"),
    ("validation_loss", "validation"),
    ("accuracy", "training"),
    ("validation_accuracy", "validation"),
)


def training_figure(history: Sequence[Mapping[str, Any]], *, title: str = "") -> Figure:
    """Return loss, accuracy and epsilon over the epochs of a training, as far as they are known.

    Losses and accuracies were computed from data without noise: the guarantee does not cover them.
    """
    if not history:
        raise ValueError("there is nothing to plot: the training ended before its first epoch")
    known = [name for name, _ in _CURVES if any(e.get(name) is not None for e in history)]
    kinds = [kind for kind in ("loss", "accuracy") if any(name.endswith(kind) for name in known)]
    if any(epoch.get("epsilon_bound") is not None for epoch in history):
        kinds.append("epsilon_bound")
    figure, panels = new_figure(panels=len(kinds), width=3.8, height=3.2)
    for axes, kind in zip(panels, kinds, strict=True):
        lines = [c for c in _CURVES if c[0] in known and c[0].endswith(kind)]
        for number, (name, label) in enumerate(lines or [(kind, "")]):
            points = [(e["epoch"], e[name]) for e in history if e.get(name) is not None]
            style = {"marker": "o", "markersize": 3.5, "color": COLOURS[number]}
            axes.plot(*zip(*points, strict=True), label=label, **style)
        axes.set(xlabel="epoch", title=kind.partition("_")[0])
        axes.xaxis.get_major_locator().set_params(integer=True)
        if kind != "accuracy":
            axes.set_ylim(bottom=0)
        finish_legend(axes)
    if title:
        figure.suptitle(title, fontsize=10, color=INK)
    return figure


def bounds_figure(bounds: Mapping[str, float], *, title: str = "") -> Figure:
    """Return bars of the gradient bounds of parameters, in the order of the network.

    The longest bars are what most of the noise is for. Beyond 40 parameters, the largest are drawn.
    """
    if not bounds:
        raise ValueError("there is nothing to plot: the model has no trainable parameter")
    drawn = dict(bounds)
    if len(drawn) > _MOST_BARS:
        largest = sorted(drawn, key=drawn.__getitem__, reverse=True)[:_MOST_BARS]
        drawn = {name: drawn[name] for name in bounds if name in largest}
        title += f" ({_MOST_BARS} largest of {len(bounds)})"
    names = list(drawn)[::-1]
    figure, (axes,) = new_figure(height=1.1 + 0.26 * len(names))
    axes.barh(names, [drawn[name] for name in names], color=COLOURS[0], height=0.65)
    axes.grid(visible=False, axis="y")
    axes.set(xlabel="bound of one example's gradient norm", title=title.strip())
    for place, name in enumerate(names):
        text = f" {drawn[name]:.3g}"
        axes.text(drawn[name], place, text, va="center", fontsize=8, color=INK)
    axes.margins(x=0.14)
    return figure


def privacy_utility_figure(
    points: Sequence[tuple[float, float]],
    *,
    baseline: float | None = None,
    metric: str = "score",
    title: str = "",
) -> Figure:
    """Return the utility of models over the epsilon that each of them was trained at.

    `points` are pairs of epsilon and utility; several of one epsilon are averaged, and shown.
    `baseline` is drawn as a line across: what the same costs without privacy, or chance.
    """
    if not points:
        raise ValueError("there is nothing to plot: no pair of epsilon and utility was given")
    figure, (axes,) = new_figure()
    means: dict[float, list[float]] = {}
    for epsilon, value in points:
        means.setdefault(epsilon, []).append(value)
    ordered = sorted((epsilon, sum(v) / len(v)) for epsilon, v in means.items())
    axes.plot(*zip(*ordered, strict=True), marker="o", color=COLOURS[0])
    if len(points) > len(ordered):
        axes.scatter(*zip(*points, strict=True), s=10, color=COLOURS[2], label="single runs")
    if baseline is not None:
        axes.axhline(baseline, color=EDGE, linestyle="--", label=f"baseline {baseline:.3g}")
    axes.set_xscale("log")
    ticks = [epsilon for epsilon, _ in ordered]
    axes.set_xticks(ticks, [f"{epsilon:g}" for epsilon in ticks], minor=False)
    axes.minorticks_off()
    axes.set(xlabel="epsilon (stronger privacy to the left)", ylabel=metric, title=title)
    finish_legend(axes)
    return figure


def certificate_figure(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], *, title: str = ""
) -> Figure:
    """Return certified accuracy over the radius, a curve for each name: radii and accuracies."""
    if not curves:
        raise ValueError("there is nothing to plot: no curve was given")
    figure, (axes,) = new_figure()
    for name, (radii, accuracies) in curves.items():
        axes.step(radii, accuracies, where="post", label=name)
    axes.set(xlabel="radius (Euclidean)", ylabel="certified accuracy", title=title)
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1)
    finish_legend(axes)
    return figure


def calibration_figure(
    confidences: Sequence[float], correct: Sequence[bool], *, bins: int = 10, title: str = ""
) -> Figure:
    """Return how often predictions are right, over how sure the model said it was.

    Examples are sorted by confidence into bins of equal width; below, how many are in each. On the
    diagonal a model knows what it does not know. The error in the title is the mean distance from
    it, weighted by examples.
    """
    if len(confidences) == 0 or len(confidences) != len(correct):
        raise ValueError(
            f"{len(confidences)} confidences and {len(correct)} outcomes: as many of both, at "
            "least one, are needed"
        )
    groups: list[list[tuple[float, bool]]] = [[] for _ in range(bins)]
    for confidence, right in zip(confidences, correct, strict=True):
        groups[min(int(confidence * bins), bins - 1)].append((float(confidence), bool(right)))
    filled = [group for group in groups if group]
    means = [sum(c for c, _ in g) / len(g) for g in filled]
    rates = [sum(r for _, r in g) / len(g) for g in filled]
    error = sum(len(g) * abs(m - r) for g, m, r in zip(filled, means, rates, strict=True))
    error /= len(confidences)
    figure, (axes,) = new_figure(width=4.4, height=4.0)
    axes.plot([0, 1], [0, 1], color=EDGE, linestyle="--", label="perfect")
    axes.plot(means, rates, marker="o", color=COLOURS[0], label="model")
    shares = [len(g) / len(confidences) for g in groups]
    axes.bar(
        [(i + 0.5) / bins for i in range(bins)], [0.25 * s for s in shares],
        width=0.8 / bins, color=COLOURS[2], alpha=0.5, label="share of examples, times 1/4",
    )  # fmt: skip
    heading = f"{title}\n" if title else ""
    axes.set(xlabel="confidence", ylabel="right", title=f"{heading}calibration error {error:.3f}")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    finish_legend(axes, loc="upper left")
    return figure
