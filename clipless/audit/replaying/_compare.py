"""Comparing what is public of two runs: identical, bit for bit, or different."""

from __future__ import annotations

import dataclasses
import json
import re
import struct
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_SHOWN = 60
_VOLATILE = {
    ".json": frozenset({"time", "seconds"}),
    ".jsonl": frozenset({"time", "seconds", "process", "digest", "identifier", "source"}),
}
"""Fields of public files that say when, and in ledgers by which process, and not what."""
_SECONDS = re.compile(r"\d+(\.\d+)?(e[+-]?\d+)?(?= seconds)")
_MOMENTS = re.compile(r"\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}(:\d{2})?(\+\d{2}:\d{2}|Z| UTC)?")


def differences(one: Any, other: Any, place: str) -> list[str]:
    """Return where two public values differ, by their places.

    Plain data, arrays, tensors, data frames, dataclasses and models (their state) are compared.

    Raises:
        TypeError: of something else it cannot be said whether it is the same.

    Example:
        >>> differences({"classes": [0, 1]}, {"classes": [0, 1, 2]}, "result")
        ["result['classes']: 2 entries, on the neighbour 3"]
    """
    return list(_differences(one, other, place))


def _differences(one: Any, other: Any, place: str) -> Iterator[str]:
    one, other = _plain(one, place), _plain(other, place)
    if type(one) is not type(other):
        yield f"{place}: {_short(one)}, on the neighbour {_short(other)}"
    elif isinstance(one, dict):
        if list(one) != list(other):
            yield f"{place}: entries {_short(list(one))}, on the neighbour {_short(list(other))}"
        for key in one:
            if key in other:
                yield from _differences(one[key], other[key], f"{place}[{key!r}]")
    elif isinstance(one, list):
        if len(one) != len(other):
            yield f"{place}: {len(one)} entries, on the neighbour {len(other)}"
        for index, (left, right) in enumerate(zip(one, other, strict=False)):
            yield from _differences(left, right, f"{place}[{index}]")
    elif isinstance(one, np.ndarray):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            yield (
                f"{place}: {one.dtype} of shape {one.shape}, on the neighbour {other.dtype} of "
                f"shape {other.shape}"
            )
        elif one.tobytes() != other.tobytes():
            yield f"{place}: an array of shape {one.shape} with other values"
    elif isinstance(one, float):
        if struct.pack("d", one) != struct.pack("d", other):
            yield f"{place}: {one!r}, on the neighbour {other!r}"
    elif one != other:
        yield f"{place}: {_short(one)}, on the neighbour {_short(other)}"


def _plain(value: Any, place: str) -> Any:
    """Return a value as dicts, lists, arrays and plain data."""
    if value is None or isinstance(value, bool | int | float | str | bytes | Enum | Path):
        return value
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return {"dtype": str(value.dtype), "shape": list(value.shape), "values": flat}
    if isinstance(value, nn.Module):
        return dict(value.state_dict())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist() if value.dtype.kind == "O" else value
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [each.name for each in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names}
    if hasattr(value, "dtypes") and hasattr(value, "iloc"):  # a data frame, or a column of one
        return {"types": str(value.dtypes), "values": value.to_numpy(dtype=object).tolist()}
    raise TypeError(
        f"{place} is a {type(value).__name__}, of which it cannot be said whether it is the same "
        "in both runs. Return what is public as plain data, arrays, tensors or models."
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def public_files(folder: Path, *, private: frozenset[str]) -> dict[str, Any]:
    """Return the contents of all files in a folder but those that are called private.

    `private` holds names of files and folders. What says when something happened, in JSON and in
    text, is left out.
    """
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_dir() or private.intersection(name.parts):
            continue
        content: Any = path.read_bytes()
        if path.suffix == ".json":
            content = _lasting(json.loads(content), _VOLATILE[".json"])
        elif path.suffix == ".jsonl":
            lines = content.splitlines()
            content = [_lasting(json.loads(line), _VOLATILE[".jsonl"]) for line in lines]
        elif path.suffix in (".html", ".txt", ".md", ".csv"):
            content = [_timeless(line) for line in content.decode().splitlines()]
        found[name.as_posix()] = content
    return found


def _timeless(line: str) -> str:
    """A line of text without moments, and without how many seconds something took."""
    return _SECONDS.sub("(number)", _MOMENTS.sub("(moment)", line))


def _lasting(data: Any, volatile: frozenset[str]) -> Any:
    """Plain data without what differs from one moment to the next."""
    if isinstance(data, dict):
        kept = {key: value for key, value in data.items() if key not in volatile}
        return {key: _lasting(value, volatile) for key, value in kept.items()}
    if isinstance(data, list):
        return [_lasting(each, volatile) for each in data]
    return _timeless(data) if isinstance(data, str) else data
