"""Draw ARCHITECTURE.md from the code: the rooms, the imports between them, the walk of a step.

python tools/architecture.py            write it
python tools/architecture.py --check    fail if what is written differs from the code
"""

from __future__ import annotations

import ast
import gc
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "clipless"
PAGE = ROOT / "ARCHITECTURE.md"
sys.path.insert(0, str(ROOT))  # the step that is walked is that of this copy of the code
STEADY = 5
"""The step that is walked: the sixth, at which nothing is prepared and no trial run is due."""
EVERYWHERE = {"common", "errors", "_version", "__version__"}
"""Rooms that all others import, whose arrows would hide the picture."""


def first_line(path: Path) -> str:
    """Return the first line of a file's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").partition("\n")[0]


def rooms() -> dict[str, list[Path]]:
    """Return the files of every room, a room being a package right below `clipless`."""
    folders = (each.parent for each in sorted(PACKAGE.glob("*/__init__.py")))
    return {folder.name: sorted(folder.rglob("*.py")) for folder in folders}


def arrows(room: str, files: list[Path]) -> Counter[str]:
    """Count a room's import statements by the room that they import from, types included."""
    found: Counter[str] = Counter()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = []
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("clipless"):
                whole = node.module == "clipless"
                names = [f"clipless.{a.name}" for a in node.names] if whole else [node.module or ""]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name.startswith("clipless.")]
            found.update({name.split(".")[1] for name in names} - {room})
    return found


def walk_of_a_step() -> list[Path]:
    """Return our files that a plain eager private step enters, in the order of first entry."""
    import torch

    from clipless import PrivacyEngine, losses
    from clipless import nn as lip

    torch.manual_seed(0)
    model = torch.nn.Sequential(lip.BoundedInput(1.0), lip.SpectralLinear(4, 2))
    data = torch.utils.data.TensorDataset(torch.randn(256, 4), torch.randint(2, (256,)))
    criterion = losses.CrossEntropy()
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader(data, batch_size=16),
        criterion=criterion,
        noise_multiplier=1.0,
    )
    entered: dict[str, None] = {}

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            entered.setdefault(frame.f_code.co_filename)

    batches = iter(loader)
    gc.collect()
    gc.disable()  # what is collected meanwhile is no part of the step
    for step in range(STEADY + 1):
        sys.setprofile(note if step == STEADY else None)
        inputs, targets = next(batches)
        optimizer.zero_grad()
        criterion(model(inputs), targets).backward()
        optimizer.step()
    sys.setprofile(None)
    gc.enable()
    paths = (Path(name) for name in entered)
    return [path for path in paths if path.is_relative_to(PACKAGE)]


def page() -> str:
    """Return the text of ARCHITECTURE.md."""
    found = rooms()
    lines = [
        "# Architecture", "",
        "Drawn from the code by `tools/architecture.py`; `make lint` checks that it is still true.",
        "Words of our own are explained in [docs/glossary.md](docs/glossary.md), and what the",
        "guarantee rests on in [docs/guarantee.md](docs/guarantee.md).", "",
        "## Rooms", "",
        "| room | files | what it is |", "|---|---:|---|",
        *(
            f"| `{room}/` | {len(files)} | {first_line(PACKAGE / room / '__init__.py')} |"
            for room, files in found.items()
        ), "",
        "## Imports between rooms", "",
        "An arrow says that a room imports another, types included; `common` and `errors`, which",
        "all rooms import, are left out. The order of layers is a contract in `pyproject.toml`.",
        "", "```mermaid", "graph TD",
        *(
            f"    {room} --> {other}"
            for room, files in found.items()
            for other in sorted(set(arrows(room, files)) - EVERYWHERE)
            if room not in EVERYWHERE
        ),
        "```", "",
        "## The walk of a step", "",
    ]  # fmt: skip
    steps = walk_of_a_step()
    lines += [
        "A plain eager private step (sample, forward, criterion, backward, optimizer step) enters",
        f"{len(steps)} files of the package, in this order of first entry. It is step {STEADY} of",
        "a run: the first steps also prepare, and the running model is tried before steps",
        "0, 1, 2, 4, 8, ...", "",
        *(
            f"{number}. `{path.relative_to(ROOT).as_posix()}`: {first_line(path)}"
            for number, path in enumerate(steps, start=1)
        ), "",
    ]  # fmt: skip
    return "\n".join(lines)


def main() -> int:
    """Write the page, or with `--check` compare it with what is written."""
    text = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text("utf-8") == text:
        return 0
    print(
        "ARCHITECTURE.md differs from the code: run python tools/architecture.py", file=sys.stderr
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
