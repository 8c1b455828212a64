"""The table and the figure of the speed benchmark."""

import json
from pathlib import Path

from _results import save_figure

from clipless.plots import COLOURS as SERIES
from clipless.plots import EDGE, INK, new_figure

BLUE, ORANGE, GREY, GREEN = SERIES
LABELS = {
    "nonprivate-relu": "non-private, ReLU",
    "nonprivate-lipschitz": "non-private, Lipschitz",
    "clipless": "clipless",
    "clipless-enforced": "clipless, enforced bounds",
    "opacus-hooks": "Opacus, hooks",
    "opacus-ghost": "Opacus, ghost clipping",
    "vmap-clipping": "torch.func.vmap, clipping",
}
COLOURS = dict(zip(LABELS, (GREY, EDGE, BLUE, "#7a4fb2", ORANGE, "#e0a03e", GREEN), strict=True))
STYLES = {"eager": "--", "compiled": "-", "bfloat16": ":"}


def show(rows: list[dict], largest: list[dict]) -> None:
    """Print times and memory, and what they are relative to non-private training, per example."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None)
    for heading in (
        "model",
        "parameters",
        "batch",
        "method",
        "mode",
        "empty",
        "ms",
        "GiB",
        "x time",
        "x GiB",
    ):
        table.add_column(heading, justify="left" if heading in ("model", "method") else "right")
    base = {
        (r["model"], r["batch"], r["mode"]): r for r in rows if r["method"] == "nonprivate-relu"
    }
    for row in rows:
        plain = base.get((row["model"], row["batch"], row["mode"]))
        table.add_row(
            row["model"], f"{row['parameters']:,}", str(row["batch"]), row["method"], row["mode"],
            f"{row['empty']:.1%}" if row.get("empty") else "",
            f"{row['milliseconds']:.2f}",
            "" if row["peak_gib"] is None else f"{row['peak_gib']:.2f}",
            *(_ratio(row, plain, key) for key in ("milliseconds", "peak_gib")),
        )  # fmt: skip
    console = Console(width=120)
    console.print(table)
    for each in largest:
        console.print(f"{each['method']}: largest batch {each['largest_batch']} ({each['model']})")


def _ratio(row: dict, plain: dict | None, key: str) -> str:
    if plain is None or row[key] is None or not plain[key]:
        return ""
    return f"{row[key] / plain[key]:.2f}"


def draw(folder: Path) -> Path:
    """Redraw the paper's figure: time and memory of a step against the size of the batch."""
    from matplotlib.lines import Line2D

    names = ("speed-examples-gpu", "speed-gpu", "speed-examples-cpu")
    source = next(p for p in (folder / f"{name}.json" for name in names) if p.exists())
    rows = _lines(json.loads(source.read_text()))
    machine = json.loads(source.with_suffix(".about.json").read_text())["machine"]
    where = machine.get("gpu", machine["cpu"])
    models = sorted({r["model"] for r in rows}, key=lambda m: _size(rows, m))
    figure, panels = new_figure(panels=2 * len(models), width=3.9, height=3.9)
    for place, model in enumerate(models):
        for axes, key, unit in zip(
            panels[2 * place :], ("milliseconds", "peak_gib"),
            ("milliseconds a step", "peak memory, GiB"), strict=False,
        ):  # fmt: skip
            for method, colour in COLOURS.items():
                for mode, style in STYLES.items():
                    points = sorted(
                        (r["batch"], r[key])
                        for r in rows
                        if (r["model"], r["method"], r["mode"]) == (model, method, mode)
                        and r[key] is not None
                    )
                    if points:
                        axes.plot(*zip(*points, strict=True), style, color=colour, marker=".")
            axes.set(xscale="log", yscale="log", xlabel="batch", ylabel=unit)
            sizes = sorted({r["batch"] for r in rows if r["model"] == model})
            axes.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=30)
            axes.minorticks_off()
        panels[2 * place].set_title(f"{_size(rows, model):,} parameters, {where}")
    shown = {row["method"] for row in rows}
    methods = [Line2D([], [], color=COLOURS[m], label=LABELS[m]) for m in COLOURS if m in shown]
    drawn = {row["mode"] for row in rows}
    modes = [
        Line2D([], [], color=INK, linestyle=s, label=m) for m, s in STYLES.items() if m in drawn
    ]
    figure.legend(
        handles=[*methods, *modes], loc="outside lower center", ncols=3, frameon=False,
        labelcolor=INK, fontsize=9,
    )  # fmt: skip
    return save_figure(figure, folder / "speed.svg")


def _lines(rows: list[dict]) -> list[dict]:
    """The rows that were measured at several sizes: one point says nothing about a slope."""
    batches: dict[tuple, set[int]] = {}
    for row in rows:
        batches.setdefault((row["model"], row["method"], row["mode"]), set()).add(row["batch"])
    several = {key for key, found in batches.items() if len(found) > 1}
    return [r for r in rows if (r["model"], r["method"], r["mode"]) in several] or rows


def _size(rows: list[dict], model: str) -> int:
    return next(row["parameters"] for row in rows if row["model"] == model)
