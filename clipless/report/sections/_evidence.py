"""Results of audits, certificates and measurements, read from their files and validated.

Results are recognised by their fields and not by the name they were filed under, so that one file
may hold one result or several.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Fields = Mapping[str, Any]


def signal(lines: Sequence[Fields]) -> dict[str, Any] | None:
    """Pool the lines of `signal.jsonl` over the first and the last quarter of the epochs."""
    if not lines:
        return None
    quarter = max(1, len(lines) // 4)
    return {
        "epochs": [line["epoch"] for line in lines],
        "ratios": {
            each["name"]: [_ratio_in(line, each["name"]) for line in lines]
            for each in lines[-1]["parameters"]
        },
        "early": _pool(lines[:quarter]),
        "late": _pool(lines[-quarter:]),
    }


def _ratio_in(line: Fields, name: str) -> float | None:
    return next((each["ratio"] for each in line["parameters"] if each["name"] == name), None)


def _pool(lines: Sequence[Fields]) -> dict[str, Any]:
    """Average energies over several epochs, each weighted by its steps."""
    steps = sum(int(line["steps"]) for line in lines)
    parameters = []
    for each in lines[-1]["parameters"]:
        name, size = each["name"], int(each["size"])
        released = _mean_energy(lines, name, "released_energy")
        noise = _mean_energy(lines, name, "noise_energy")
        energy = None if released is None or noise is None else max(0.0, released - noise)
        parameters.append(
            {
                "name": name,
                "size": size,
                "signal_energy": energy,
                "noise_energy": noise,
                "ratio": energy / noise if energy is not None and noise else None,
                "resolution": 2 * math.sqrt(2 / (size * steps)),
            }
        )
    return {
        "first_epoch": lines[0]["epoch"],
        "last_epoch": lines[-1]["epoch"],
        "steps": steps,
        "parameters": parameters,
    }


def _mean_energy(lines: Sequence[Fields], name: str, kind: str) -> float | None:
    """The mean over all steps; None if an epoch does not know it."""
    total, steps = 0.0, 0
    for line in lines:
        value = next((each[kind] for each in line["parameters"] if each["name"] == name), None)
        if value is None:
            return None
        total, steps = total + line["steps"] * value, steps + line["steps"]
    return total / steps


def tightness(lines: Sequence[Fields]) -> dict[str, Any] | None:
    """Take the first and the last measurement, and the largest quotient of all."""
    if not lines:
        return None
    first, last = (_measurement(line) for line in (lines[0], lines[-1]))
    largest = [
        math.inf if each["largest"] is None else float(each["largest"])
        for line in lines
        for each in (*line["parameters"], line["whole"])
    ]
    return {
        "start": first,
        "end": last,
        "measurements": len(lines),
        "largest": max(largest) if math.isfinite(max(largest)) else None,
        "violations": sorted({name for line in lines for name in line["violations"]}),
    }


def _measurement(line: Fields) -> dict[str, Any]:
    names = ("step", "epoch", "examples", "slack", "loss", "edges")
    found = {name: line[name] for name in names}
    numbers(line["edges"], "edges")
    return found | {
        "parameters": [_distribution(each, line) for each in line["parameters"]],
        "whole": _distribution(line["whole"], line),
    }


def _distribution(each: Fields, line: Fields) -> dict[str, Any]:
    names = ("name", "bound", "mean", "quantiles", "largest", "counts")
    found = {name: each[name] for name in names}
    if len(numbers(found["counts"], "counts")) != len(line["edges"]) - 1:
        raise ValueError(f"{each['name']} has {len(found['counts'])} counts for the bins given")
    numbers(found["quantiles"], "quantiles")
    return found


def columns(data: Fields) -> dict[str, Any]:
    """Find what the model makes of each column of a table."""
    found = []
    for each in data["columns"]:
        lines = each.get("outputs", [])
        for line in lines:
            if len(numbers(line, "outputs")) != len(numbers(each["values"], "values")):
                raise ValueError(f"there is not one output for every value of {each['name']}")
        kind = {None: "undecided"}.get(each["kind"], each["kind"])
        found.append(
            {
                "name": str(each["name"]),
                "kind": str(kind),
                "importance": float(each["importance"]),
                "values": each.get("values", []),
                "outputs": lines,
            }
        )
    found.sort(key=lambda each: -each["importance"])
    return {"classes": [str(each) for each in data["classes"]], "columns": found}


def robustness(data: Fields) -> dict[str, Any]:
    """Find certified accuracies and attacks on certificates."""
    certified, attacks = [], []
    for label, each in _results(data):
        if {"radii", "accuracies"} <= set(each):
            curve = each.get("curve_radii", each["radii"])
            values = each.get("curve_accuracies", each["accuracies"])
            pairs = [(each["radii"], each["accuracies"]), (curve, values)]
            for radii, accuracies in pairs:
                if len(numbers(radii, "radii")) != len(numbers(accuracies, "accuracies")):
                    raise ValueError("there is not one accuracy for every radius")
            curves = {"curve_radii": curve, "curve_accuracies": values}
            certified.append({"label": label, **each, **curves})
        elif {"broken", "attacked"} <= set(each):
            attacks.append({"label": label, **each, "broken": len(each["broken"])})
    if not certified and not attacks:
        raise ValueError("it holds no certified accuracy (radii, accuracies) that is known here")
    return {"certified": certified, "attacks": attacks}


def audit(data: Fields) -> dict[str, Any]:
    """Find audits of epsilon, membership attacks, and attacks on bounds."""
    audits, memberships, bounds = [], [], []
    for label, each in _results(data):
        if "lower_bound" in each:
            bound = each["lower_bound"]
            claimed = each.get("claimed_epsilon")
            for name, value in (("lower_bound", bound), ("claimed_epsilon", claimed)):
                numbers([value], name)
            infinite = bound is None  # what is infinite becomes null in their files
            exposed = claimed is not None and (infinite or bound > claimed)
            audits.append({"label": label, **each, "infinite": infinite, "exposed": exposed})
        elif "attacks" in each:
            for attack in each["attacks"]:
                for name in ("auroc", "advantage"):
                    numbers([attack[name][end] for end in ("value", "low", "high")], name)
            memberships.append({"label": label, **each})
        elif {"found", "bounds"} <= set(each) or "ratios" in each:
            ratios = each.get("ratios") or _ratios(each)
            numbers(list(ratios.values()), "ratios")
            bounds.append({"label": label, "ratios": dict(ratios), "tolerance": 1e-6})
    if not (audits or memberships or bounds):
        raise ValueError("it holds no result of an audit that is known here")
    against = data.get("exposed")
    return {
        "epsilon": audits,
        "membership": memberships,
        "bounds": bounds,
        "against": [str(each) for each in against] if isinstance(against, list) else [],
    }


def _ratios(each: Fields) -> dict[str, float | None]:
    return {
        name: norm / each["bounds"][name] if each["bounds"][name] else None
        for name, norm in each["found"].items()
    }


def _results(data: Fields, label: str = "") -> Iterator[tuple[str, Fields]]:
    """The objects in a file that may be results: itself, and those inside, but not their parts."""
    known = {"radii", "broken", "lower_bound", "attacks", "found", "ratios"}
    if known & set(data):
        yield label, data
        return
    for name, value in data.items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Mapping):
                yield from _results(each, name)


def numbers(values: Any, name: str) -> list[float | None]:
    """Return a list of numbers, null among them allowed, or refuse what is none."""
    if not isinstance(values, list) or not all(
        value is None or (isinstance(value, int | float) and not isinstance(value, bool))
        for value in values
    ):
        raise ValueError(f"{name} is not a list of numbers")
    return values
