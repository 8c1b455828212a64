"""The figures of the page, drawn from the data of a report."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from clipless.report._format import number, percent, upper
from clipless.report.drawing._plots import Mark, Row, Rule, Series, chart, histograms, rows
from clipless.report.drawing._scale import Axis, around, decades, whole_numbers

Data = Mapping[str, Any]
MOST_ROWS = 40
MOST_HISTOGRAMS = 24
MOST_CURVES, MOST_LINES = 12, 2
NAMES = {
    "loss": "training loss",
    "accuracy": "training accuracy",
    "validation_loss": "validation loss",
    "validation_accuracy": "validation accuracy",
}


class Figures:
    """The figures of a page, each drawn when a template asks for it; None where data lack."""

    def __init__(self, report: Data) -> None:
        self._draw: dict[str, Callable[[], Any]] = {}
        training, spending = report.get("training"), report.get("spending")
        if training is not None:
            self._draw |= {
                "loss": lambda: _by_epoch(training["epochs"], "loss"),
                "accuracy": lambda: _by_epoch(training["epochs"], "accuracy"),
                "front": lambda: _front(training),
            }
        curve = (report.get("claim") or {}).get("trade_off")
        if curve is not None:
            self._draw["trade_off"] = lambda: _trade_off(curve)
        if spending is not None and spending["epsilon"] is not None:  # null stands for infinite
            self._draw["spending"] = lambda: _spending(spending)
        for name, drawing in (("signal", _signal), ("tightness", _tightness)):
            data = report.get(name)
            if data is not None:
                self._draw[name] = functools.partial(drawing, data)
        columns = report.get("columns")
        if columns is not None:
            self._draw["dependence"] = lambda: _dependence(columns)
        robustness, audit = report.get("robustness"), report.get("audit")
        if robustness is not None:
            self._draw["certified"] = lambda: [_certified(e) for e in robustness["certified"]]
        if audit is not None:
            self._draw |= {
                "audits": lambda: _audits(audit["epsilon"]),
                "membership": lambda: [_membership(each) for each in audit["membership"]],
                "attacks": lambda: [_attack(each) for each in audit["bounds"]],
            }

    def __getitem__(self, name: str) -> Any:
        return self._draw[name]() if name in self._draw else None


def _by_epoch(epochs: Sequence[Data], kind: str) -> Markup | None:
    """Training and validation, over the epochs."""
    series = []
    for look, name in enumerate((kind, f"validation_{kind}")):
        known = [each for each in epochs if each[name] is not None]
        series.append(
            Series(
                name=NAMES[name],
                look=look,
                points=[(each["epoch"], each[name]) for each in known],
                titles=[f"epoch {each['epoch']}: {number(each[name])}" for each in known],
            )
        )
    series = [each for each in series if each.points]
    if not series:
        return None
    values = [value for each in series for _, value in each.points]
    shares = kind == "accuracy"
    label = kind if len(series) > 1 else series[0].name
    y = around(values, label=label, zero=kind == "loss", percent=shares)
    last = max(each["epoch"] for each in epochs)
    first = min(each["epoch"] for each in epochs)
    return chart(
        title=f"{kind.capitalize()} by epoch",
        description=f"{' and '.join(each.name for each in series)} over {last} epochs",
        x=whole_numbers(last, first=first, label="epoch"),
        y=y,
        series=series,
    )


def _spending(spending: Data) -> Markup:
    points = [(each["step"], each["epsilon"]) for each in spending["curve"]]
    target = spending["target_epsilon"]
    rules = [] if target is None else [Rule(value=target, name=f"budget {number(target)}")]
    return chart(
        title="Epsilon over steps",
        description=(
            f"epsilon at delta {number(spending['delta'])}, recomputed from the ledger; it ends at "
            f"{upper(spending['epsilon'])} after {spending['steps']} steps"
        ),
        x=whole_numbers(max(spending["steps"], 1), label="training steps counted by the ledger"),
        y=around(
            [*(value for _, value in points), target],
            label=f"epsilon at delta {number(spending['delta'])}",
            zero=True,
        ),
        series=[
            Series(
                name="epsilon",
                points=points,
                titles=[f"after {step} steps: epsilon {upper(value)}" for step, value in points],
            )
        ],
        rules=rules,
    )


def _trade_off(curve: Data) -> Markup:
    """Misses against false alarms: the best attack, and blind guesses."""
    points = list(zip(curve["false_alarms"], curve["misses"], strict=True))
    return chart(
        title="What attacks can reach",
        description="the fewest members that an attack misses, by its share of false alarms",
        x=Axis(label="false alarms: says “used” of an example that was not", low=0, high=1,
               percent=True),
        y=Axis(label="misses: does not say so of one that was", low=0, high=1, percent=True),
        series=[
            Series(
                name="best attack", points=points,
                titles=[f"{percent(a)} false alarms: misses {percent(b)}" for a, b in points],
            ),
            Series(name="blind guesses", look=1, points=[(0.0, 1.0), (1.0, 0.0)]),
        ],
    )  # fmt: skip


def _front(training: Data) -> Markup | None:
    """Every epoch as a point; those that nothing beats are joined."""
    name = training["utility"]
    known = [
        each
        for each in training["epochs"]
        if each["epsilon"] is not None and each[name] is not None
    ]
    if not known:
        return None

    def points(chosen: Sequence[Data], look: int, label: str, kind: Any) -> Series:
        return Series(
            name=label,
            look=look,
            kind=kind,
            points=[(each["epsilon"], each[name]) for each in chosen],
            titles=[
                f"epoch {each['epoch']}: {NAMES[name]} {number(each[name])} at epsilon "
                f"{upper(each['epsilon'])}"
                for each in chosen
            ],
        )

    front = sorted((each for each in known if each["on_front"]), key=lambda each: each["epsilon"])
    return chart(
        title="Privacy against utility",
        description=f"{NAMES[name]} and epsilon after each of {len(known)} epochs; "
        f"{len(front)} epochs are on the front",
        x=around([each["epsilon"] for each in known], label="epsilon, had the run ended there",
                 zero=True),
        y=around([each[name] for each in known], label=NAMES[name],
                 percent=name.endswith("accuracy")),
        series=[
            points([each for each in known if not each["on_front"]], 2, "other epochs", "points"),
            points(front, 0, "front", "steps"),
        ],
    )  # fmt: skip


def _signal(signal: Data) -> Markup:
    """Signal over noise for every parameter, early and late in training."""
    parts = [signal[name]["parameters"] for name in ("early", "late")]
    ratios = [each["ratio"] for part in parts for each in part]
    floor = [each["resolution"] for part in parts for each in part]
    x = decades([*ratios, *floor], label="signal energy / noise energy", include=1.0)
    late = {each["name"]: each for each in parts[1]}
    found = []
    for early in parts[0][:MOST_ROWS]:
        marks = []
        for look, each in ((0, early), (1, late.get(early["name"]))):
            if each is None or each["ratio"] is None:
                continue
            visible = each["ratio"] > each["resolution"]
            when = "early" if look == 0 else "late"
            title = f"{each['name']}, {when}: {number(each['ratio'])}"
            if not visible:
                title += f", not visible (below {number(each['resolution'])})"
            marks.append(Mark(value=each["ratio"], look=look, hollow=not visible, title=title))
        found.append(Row(name=early["name"], marks=marks))
    return rows(
        title="Signal to noise of every layer",
        description="energy of the released gradient's signal over that of its noise",
        x=x,
        rows=found,
        names=[(_epochs(signal["early"]), 0), (_epochs(signal["late"]), 1)],
        rules=[Rule(value=1.0, name="as much signal as noise")],
    )


def _dependence(columns: Data) -> list[tuple[str, Markup]]:
    """The mean output over the values of each numeric column, of the most important ones."""
    classes = columns["classes"]
    label = "predicted" if not classes else "logit" if len(classes) > 2 else "log odds"
    drawn = [each for each in columns["columns"] if each["outputs"]][:MOST_CURVES]
    every = [value for each in drawn for line in each["outputs"][:MOST_LINES] for value in line]
    found = []
    for each in drawn:
        names = classes if len(each["outputs"]) > 1 else [""]
        series = [
            Series(name=name, look=look % 2, points=list(zip(each["values"], line, strict=True)))
            for look, (name, line) in enumerate(
                zip(names, each["outputs"][:MOST_LINES], strict=False)
            )
        ]
        ends = each["values"][0], each["values"][-1]
        picture = chart(
            title=f"Partial dependence on {each['name']}",
            description=f"mean {label} from {number(ends[0])} to {number(ends[1])}",
            x=around(ends, label=each["name"]),
            y=around(every, label=label),
            series=series,
            height=220,
        )
        found.append((each["name"], picture))
    return found


def _epochs(part: Data) -> str:
    first, last = part["first_epoch"], part["last_epoch"]
    return f"epoch {first}" if first == last else f"epochs {first} to {last}"


def _tightness(tightness: Data) -> list[Markup]:
    """Histograms of gradient norm over bound: the whole gradient first, then the parameters."""
    start, end = tightness["start"], tightness["end"]
    edges = start["edges"]
    later = {each["name"]: each for each in (*end["parameters"], end["whole"])}
    pairs = [
        (each, later[each["name"]])
        for each in (start["whole"], *start["parameters"])
        if each["name"] in later and end["edges"] == edges
    ]
    filled = [
        edges[index] or edges[1] / 2
        for pair in pairs
        for each in pair
        for index, count in enumerate(each["counts"])
        if count
    ]
    x = Axis(
        label="gradient norm / bound",
        low=10.0 ** math.floor(math.log10(min(filled, default=0.1))),
        high=1.0,
        log=True,
    )
    names = (f"step {start['step']}", f"step {end['step']}")
    return [
        histograms(
            title=first["name"],
            description=(
                f"norms of one example's gradient over their bound {number(first['bound'])}: "
                f"median {number(first['quantiles'][2])} at {names[0]}, "
                f"{number(second['quantiles'][2])} at {names[1]}; largest "
                f"{number(second['largest'])}"
            ),
            x=x,
            edges=edges,
            first=first["counts"],
            second=second["counts"],
            names=names,
        )
        for first, second in pairs[: MOST_HISTOGRAMS + 1]
    ]


def _certified(each: Data) -> Markup:
    points = list(zip(each["curve_radii"], each["curve_accuracies"], strict=True))
    table = list(zip(each["radii"], each["accuracies"], strict=True))
    return chart(
        title="Certified accuracy",
        description=f"from {percent(points[0][1])} at radius 0, falling with the radius",
        x=around([radius for radius, _ in points], zero=True,
                 label=f"radius, Euclidean, in units of {each.get('unit', 'the input')}"),
        y=Axis(label="certified accuracy", low=0.0, high=1.0, percent=True),
        series=[
            Series(name="proved for every change", points=points, kind="steps"),
            Series(name="radii of the table", points=table, look=1, kind="points",
                   titles=[f"radius {number(r)}: {percent(a)}" for r, a in table]),
        ],
    )  # fmt: skip


def _audits(audits: Sequence[Data]) -> Markup | None:
    """Claimed epsilon and the lower bound that an attack has proved, on one axis."""
    known = [each for each in audits if each["lower_bound"] is not None]
    if not known:
        return None
    values = [each[name] for each in known for name in ("lower_bound", "claimed_epsilon")]
    found = []
    for each in known:
        bound, claimed = each["lower_bound"], each.get("claimed_epsilon")
        marks = [Mark(value=bound, look=1, title=f"lower bound {number(bound)}")]
        if claimed is not None:
            marks.append(Mark(value=claimed, look=0, title=f"claimed {upper(claimed)}"))
        found.append(
            Row(name=(each["label"] or each.get("kind") or "audit").replace("_", " "), marks=marks)
        )
    return rows(
        title="Claimed epsilon and what attacks have proved",
        description="a lower bound to the right of the claim would contradict it",
        x=around(values, label="epsilon", zero=True),
        rows=found,
        names=[("proved by the attack", 1), ("claimed", 0)],
    )


def _membership(each: Data) -> Markup:
    x = around(
        [attack["auroc"][end] for attack in each["attacks"] for end in ("low", "high")] + [0.5],
        label="AUROC",
    )
    return rows(
        title="Membership inference",
        description="how well attacks tell members from others; 0.5 is guessing",
        x=x,
        rows=[
            Row(
                name=attack["name"],
                marks=[
                    Mark(
                        value=attack["auroc"]["value"],
                        low=attack["auroc"]["low"],
                        high=attack["auroc"]["high"],
                        look=1,
                        title=f"{attack['name']}: {number(attack['auroc']['value'])}",
                    )
                ],
            )
            for attack in each["attacks"][:MOST_ROWS]
        ],
        rules=[Rule(value=0.5, name="guessing")],
    )


def _attack(each: Data) -> Markup:
    known = {name: ratio for name, ratio in each["ratios"].items() if ratio is not None}
    return rows(
        title="Attack on the bounds",
        description="largest gradient norm that a search could find, over its proved bound",
        x=around([*known.values(), 1.0], label="largest norm found / bound", zero=True),
        rows=[
            Row(name=name, marks=[Mark(value=ratio, look=1, title=f"{name}: {number(ratio)}")])
            for name, ratio in list(known.items())[:MOST_ROWS]
        ],
        rules=[Rule(value=1.0, name="the bound")],
    )
