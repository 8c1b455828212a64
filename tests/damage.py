"""Saved data with a part replaced by something else: every part, by things of all kinds."""

import copy
import json
import math
from typing import Any

VALUES: list[Any] = [None, "x", -1, 1.5, math.inf, math.nan, [], {"a": 1}, True, 10**400]
RAW = {
    "empty": b"",
    "cut": b'{"format": ',
    "no text": b"\xff\xfe\x00",
    "a list": b"[]",
    "a number": b"1",
    "an empty object": b"{}",
    "deep": b"[" * 100_000,
    "long number": b"9" * 5000,
}


def paths(tree, before=()):
    """The places in nested data; of lists, the first two."""
    yield before
    if isinstance(tree, dict | list):
        for key in tree if isinstance(tree, dict) else range(min(len(tree), 2)):
            yield from paths(tree[key], (*before, key))


def damaged(tree):
    """Yield nested data with one part replaced, and with one field left out."""
    for path in paths(tree):
        if not path:
            continue
        for value in VALUES:
            yield _changed(tree, path, value)
        if isinstance(path[-1], str):
            yield _changed(tree, path, None, remove=True)


def _changed(tree, path, value, *, remove=False):
    result = copy.deepcopy(tree)
    inner = result
    for key in path[:-1]:
        inner = inner[key]
    if remove:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return result


def damaged_bytes(data):
    """Yield the contents of a JSON file, damaged."""
    yield from RAW.values()
    yield data[: len(data) // 2]
    for tree in damaged(json.loads(data)):
        yield json.dumps(tree).encode()
