"""Count the imports that reach into another room by an underscore, and fail above a limit.

    python tools/front_doors.py [--limit TREE=NUMBER ...] [--quiet]

A room is a folder of `clipless/`, with all that lies below it; a tree is a folder of the
repository. `from clipless.room._module import name` and `from clipless.room import _name` are back
doors for everybody outside of the room. Tests of a room (`tests/room/`) may look inside of it, as
white-box tests: their back doors are counted apart, as the tree `whitebox`.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TREES = ("clipless", "benchmarks", "examples", "tests")
WHITE_BOX = "whitebox"


class BackDoor(NamedTuple):
    """One import of a private module or name of another room."""

    path: Path
    line: int
    target: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.target}"


def room_of(path: Path) -> str | None:
    """Return the room that a file belongs to: none outside of the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[1] if parts[0] == "clipless" and len(parts) > 1 else None


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and full dotted name of everything that a file imports from the package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def is_back_door(name: str, room: str | None) -> bool:
    """Return whether a dotted name passes through an underscore of another room."""
    parts = name.split(".")
    if parts[0] != "clipless" or len(parts) < 3 or parts[1] == room:
        return False
    return any(part.startswith("_") and not part.startswith("__") for part in parts[2:])


def back_doors(folder: str) -> list[BackDoor]:
    """Return all back doors of a tree, a statement once for each module that it reaches into."""
    found: dict[tuple[Path, int, str], BackDoor] = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        for line, name in imported(ast.parse(path.read_text(encoding="utf-8"))):
            if is_back_door(name, room_of(path)):
                parts = name.split(".")
                target = name if parts[-1].startswith("_") else ".".join(parts[:-1])
                found.setdefault((path, line, target), BackDoor(path, line, target))
    return list(found.values())


def is_white_box(door: BackDoor) -> bool:
    """Return whether an import leads from the tests of a room into that room."""
    parts = door.path.relative_to(ROOT).with_suffix("").parts
    return len(parts) > 2 and parts[0] == "tests" and door.target.split(".")[1] == parts[1]


def main() -> int:
    """Print the back doors of every tree, and return 1 if one has more than its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--limit", action="append", default=[], metavar="TREE=NUMBER")
    parser.add_argument("--quiet", action="store_true", help="print the counts only")
    options = parser.parse_args()
    limits = {
        tree: int(number) for tree, _, number in (each.partition("=") for each in options.limit)
    }
    failed = False
    trees = {tree: back_doors(tree) for tree in TREES}
    trees[WHITE_BOX] = [each for each in trees["tests"] if is_white_box(each)]
    trees["tests"] = [each for each in trees["tests"] if not is_white_box(each)]
    for tree, found in trees.items():
        limit = limits.get(tree)
        over = limit is not None and len(found) > limit
        failed |= over
        if over or not options.quiet:
            print(*found, sep="\n", end="\n" if found else "")
        print(f"{tree}: {len(found)} back doors" + ("" if limit is None else f", at most {limit}"))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
