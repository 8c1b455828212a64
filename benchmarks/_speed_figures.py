"""The table and the figure of the speed benchmark."""

import json
from pathlib import Path

LABELS = {
    "nonprivate-relu": "non-private, ReLU",
    "nonprivate-lipschitz": "non-private, Lipschitz",
    "clipless": "clipless",
    "clipless-enforced": "clipless, enforced bounds",
    "opacus-hooks": "Opacus, hooks",
    "opacus-ghost": "Opacus, ghost clipping",
    "vmap-clipping": "torch.func.vmap, clipping",
}
COLOURS = {
    "nonprivate-relu": "#555555",
    "nonprivate-lipschitz": "#9a9a9a",
    "clipless": "#1f6fb2",
    "clipless-enforced": "#7a4fb2",
    "opacus-hooks": "#c8553d",
    "opacus-ghost": "#e09f3e",
    "vmap-clipping": "#6a994e",
}
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
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D

    names = ("speed-examples-gpu", "speed-gpu", "speed-examples-cpu")
    source = next(p for p in (folder / f"{name}.json" for name in names) if p.exists())
    rows = _lines(json.loads(source.read_text()))
    machine = json.loads(source.with_suffix(".about.json").read_text())["machine"]
    models = sorted({r["model"] for r in rows}, key=lambda m: _size(rows, m))
    figure, axes = plt.subplots(
        len(models), 2, figsize=(10, 3.4 * len(models) + 1), squeeze=False, layout="constrained"
    )
    for line, model in enumerate(models):
        for axis, key, unit in zip(
            axes[line], ("milliseconds", "peak_gib"), ("milliseconds a step", "peak memory, GiB"),
            strict=True,
        ):  # fmt: skip
            axis.set_ylabel(unit)
            for method, colour in COLOURS.items():
                for mode, style in STYLES.items():
                    points = sorted(
                        (r["batch"], r[key])
                        for r in rows
                        if (r["model"], r["method"], r["mode"]) == (model, method, mode)
                        and r[key] is not None
                    )
                    if points:
                        axis.plot(*zip(*points, strict=True), style, color=colour, marker=".")
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.grid(alpha=0.3)
            axis.set_xlabel("batch")
        axes[line][0].set_title(f"{model} ({_size(rows, model):,} parameters)", fontsize=10)
    shown = {row["method"] for row in rows}
    methods = [Line2D([], [], color=COLOURS[m], label=LABELS[m]) for m in COLOURS if m in shown]
    drawn = {row["mode"] for row in rows}
    modes = [
        Line2D([], [], color="black", linestyle=s, label=m) for m, s in STYLES.items() if m in drawn
    ]
    figure.legend(handles=[*methods, *modes], loc="outside lower center", ncols=4, fontsize=8)
    where = machine.get("gpu", machine["cpu"])
    figure.suptitle(f"One training step, {where}", fontsize=11)
    path = folder / "speed.png"
    figure.savefig(path, dpi=130)
    return path


def _lines(rows: list[dict]) -> list[dict]:
    """The rows that were measured at several sizes: one point says nothing about a slope."""
    batches: dict[tuple, set[int]] = {}
    for row in rows:
        batches.setdefault((row["model"], row["method"], row["mode"]), set()).add(row["batch"])
    several = {key for key, found in batches.items() if len(found) > 1}
    return [r for r in rows if (r["model"], r["method"], r["mode"]) in several] or rows


def _size(rows: list[dict], model: str) -> int:
    return next(row["parameters"] for row in rows if row["model"] == model)
