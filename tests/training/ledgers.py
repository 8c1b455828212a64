"""Ledgers with other lines than they had."""

import json

from clipless.ledger._writing import encode


def without(path, lines):
    """Write the ledger anew as if some of its lines had never been there."""
    fields = [json.loads(line) for line in path.read_text().splitlines()]
    number: dict[int, int] = {}
    digest = ""
    text: list[str] = []
    for old, each in enumerate(fields, start=1):
        if old in lines:
            continue
        number[old] = len(text) + 1
        each.pop("digest")
        if "line" in each:
            each["line"] = number[old]
        if "reservation" in each:
            each["reservation"] = number[each["reservation"]]
        line, digest = encode(each, digest)
        text.append(line + "\n")
    path.write_text("".join(text))
