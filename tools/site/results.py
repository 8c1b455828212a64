"""Pages of results: tables and figures from `benchmarks/results/*.json`, nothing typed by hand."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
TITLES = {
    "speed": "Speed and memory",
    "overhead": "Overhead of a private step",
    "enforcement": "Price of enforcement",
    "tabular": "Tables",
    "mnist": "MNIST from Lipschitz layers",
    "images": "Images",
    "images-certificates": "Certified accuracy of images",
    "images-dropin": "Drop-in against Opacus",
    "images-tightness": "Tightness of bounds",
    "scaling-model": "A model of scaling",
}
LONG = ("edges", "counts")
"""Columns of histograms, which tables leave out."""


def pages() -> list[tuple[str, str, str]]:
    """Return titles, places and texts: an index, and a page for each group of files."""
    groups: dict[str, list[Path]] = {}
    for path in sorted(FOLDER.glob("*.json")):
        if not path.name.endswith(".about.json"):
            groups.setdefault(_group(path.stem), []).append(path)
    order = sorted(groups, key=lambda name: (name not in TITLES, [*TITLES, name].index(name)))
    found = [(_title(name), f"results/{name}.md", _page(name, groups[name])) for name in order]
    return [("All results", "results/index.md", _index(found)), *found]


def load(name: str) -> tuple[dict[str, Any], Any]:
    """Return what is behind a file (command, date, machine, versions), and its results."""
    data = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    if isinstance(data, dict) and "results" in data:
        return {key: value for key, value in data.items() if key != "results"}, data["results"]
    return json.loads((FOLDER / f"{name}.about.json").read_text(encoding="utf-8")), data


def _group(stem: str) -> str:
    for ending in ("-compiled", "-cpu", "-gpu"):
        stem = stem.removesuffix(ending)
    return stem


def _title(name: str) -> str:
    return TITLES.get(name, name.replace("-", " ").capitalize())


def _index(pages: Sequence[tuple[str, str, str]]) -> str:
    lines = [
        "# Results", "",
        "Every table here is generated from the JSON files in `benchmarks/results/`, which hold "
        "machine, date, versions and command. Accuracies of several seeds are means, with the "
        "smallest and the largest behind them. Rows in which we lose are there too. Each page "
        "begins with the exact command.",
        "",
        "| page | measured with |", "|---|---|",
    ]  # fmt: skip
    for title, uri, _ in pages:
        name = uri.removeprefix("results/").removesuffix(".md")
        stems = [p.stem for p in sorted(FOLDER.glob("*.json")) if _group(p.stem) == name]
        programs = {re.search(r"\w+\.py", load(stem)[0]["command"])[0] for stem in stems}  # type: ignore[index]
        commands = ", ".join(f"`python benchmarks/{each}`" for each in sorted(programs))
        lines.append(f"| [{title}]({name}.md) | {commands} |")
    return "\n".join(lines) + "\n"


def _page(name: str, files: Sequence[Path]) -> str:
    lines = [f"# {_title(name)}", ""]
    if (FOLDER / f"{name}.svg").exists():
        lines += [f"![{_title(name)}](../results/{name}.svg)", ""]
    for path in files:
        about, results = load(path.stem)
        lines += [f"## {_heading(name, path.stem)}", "", *_behind(about), ""]
        lines += _table_of(results)
    return "\n".join(lines) + "\n"


def _heading(name: str, stem: str) -> str:
    """What tells a file from others of its page: where it was measured."""
    kind = stem.removeprefix(name).strip("-")
    return {
        "": "Measured",
        "cpu": "On a CPU",
        "gpu": "On a GPU",
        "cpu-compiled": "On a CPU, compiled",
    }.get(kind, stem)


def _behind(about: dict[str, Any]) -> list[str]:
    machine, versions = about["machine"], about["versions"]
    place = machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores"
    software = ", ".join(f"{key} {value}" for key, value in versions.items())
    lines = [f"    {about['command']}", "", f"{about['date']}, {place}; {software}."]
    if about.get("notes"):
        lines += ["", f"Notes: {about['notes'].rstrip('.')}."]
    for row in about.get("largest_batches", []):
        lines += [
            "",
            f"Largest batch of {row['method']} ({row['model']}): {row['largest_batch']:,}.",
        ]
    return lines


def _table_of(results: Any) -> list[str]:
    if isinstance(results, dict):
        flat = {key: value for key, value in results.items() if not _is_rows(value)}
        lines = _table([{"what": key, "value": text} for key, text in _flat(flat)])
        for key, value in results.items():
            if _is_rows(value):
                lines += [f"### {key.replace('_', ' ')}", "", *_table(value)]
        return lines
    return _table(mean_over_seeds(results))


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _flat(values: dict[str, Any], before: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        name = f"{before}{key.replace('_', ' ')}"
        found += _flat(value, f"{name}: ") if isinstance(value, dict) else [(name, value)]
    return found


def mean_over_seeds(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each setting: means over seeds, with the smallest and the largest."""
    if not rows or "seed" not in rows[0]:
        return list(rows)
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        key = [row.get(k) for k in ("dataset", "method", "recipe", "temperature")]
        groups.setdefault((*key, round(row["epsilon"], 1)), []).append(row)
    return [_merged(group) for group in groups.values()]


def _merged(group: Sequence[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for key, value in group[0].items():
        values = [row[key] for row in group]
        if key == "seed":
            merged["seeds"] = len(group)
        elif isinstance(value, float) and key not in ("epsilon", "delta", "temperature"):
            mean = statistics.mean(values)
            spread = f" ({_number(min(values))} to {_number(max(values))})"
            merged[key] = _number(mean) + (spread if len(group) > 1 else "")
        elif isinstance(value, list) and key not in LONG:
            merged[key] = [statistics.mean(column) for column in zip(*values, strict=True)]
        else:
            merged[key] = value
    return merged


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    columns = [key for key in dict.fromkeys(k for row in rows for k in row) if key not in LONG]
    heading = " | ".join(column.replace("_", " ") for column in columns)
    lines = [f"| {heading} |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_text(row.get(key)) for key in columns) + " |" for row in rows]
    return [*lines, ""]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "" if value is None else str(value).replace("|", "\\|")


def _number(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
