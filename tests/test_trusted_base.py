"""The table of what the guarantee rests on is about the code as it is."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "guarantee.md").read_text(encoding="utf-8")


def lines_of(path):
    files = path.rglob("*.py") if path.is_dir() else [path]
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def rows():
    """Of each row: the files or rooms that it names, and how many lines it says they have."""
    table = TEXT.split("| claim | where | lines |\n|---|---|---|\n")[1].split("\n\n")[0]
    for line in table.splitlines():
        _, claim, where, counts, _ = line.split("|")
        named = re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", where)
        yield claim, named, [int(n.replace(",", "")) for n in counts.strip().split(", ")]


def alike(said, found):
    return abs(said - found) <= 0.15 * found


def test_files_are_there_and_as_long_as_is_said():
    found = list(rows())
    assert len(found) >= 9
    for claim, named, counts in found:
        lengths = [lines_of(ROOT / "clipless" / name) for name in named]
        assert 0 not in lengths, f"{claim}: of {named}, one is not there or empty"
        assert len(lengths) == len(counts), f"{claim}: a count for each of {named}"
        assert all(map(alike, counts, lengths)), (
            f"docs/guarantee.md, {claim.strip()}: write {', '.join(f'{n:,}' for n in lengths)}"
        )


def test_the_sums_in_the_text():
    said = re.search(
        r"some ([\d,]+) lines, and ([\d,]+) in ledger.*?The first two rows, ([\d,]+) lines",
        TEXT, flags=re.S,
    )  # fmt: skip
    known = [(named, sum(counts)) for _, named, counts in rows()]
    books = sum(count for named, count in known if named[0] in ("ledger/", "accounting/"))
    rest = sum(count for _, count in known) - books
    sums = [rest, books, known[0][1] + known[1][1]]
    assert all(map(alike, [int(n.replace(",", "")) for n in said.groups()], sums)), (
        f"docs/guarantee.md: the sums are {sums}"
    )
