"""Notebooks as plain text: runs `docs/notebooks/*.py`, keeps what each cell prints and draws.

The sources are py:percent files: `# %% [markdown]` begins a cell of text, `# %%` one of code. They
run in order, each in a process and a folder of its own; a cell that raises an error fails the
build. Outputs are kept in `build/notebooks` until the source or the package changes.

python tools/site/notebooks.py SOURCE FOLDER    run one, write page.md and pictures to FOLDER
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "docs" / "notebooks"
KEPT = ROOT / "build" / "notebooks"
LIMIT_SECONDS = 180


def cells(text: str) -> Iterator[tuple[str, str]]:
    """Return the kind ("markdown" or "code") and the text of each cell."""
    for part in text.split("\n# %%")[0:]:
        head, _, body = part.removeprefix("# %%").partition("\n")
        if head.strip() == "[markdown]":
            lines = [line.removeprefix("#").removeprefix(" ") for line in body.splitlines()]
            yield "markdown", "\n".join(lines).strip()
        elif body.strip():
            yield "code", body.strip()


def title_of(source: Path) -> str:
    """Return the first heading of a notebook."""
    first = next(text for kind, text in cells(source.read_text("utf-8")) if kind == "markdown")
    return first.splitlines()[0].removeprefix("# ")


def sources() -> list[Path]:
    """Return the notebooks, in the order of their names."""
    return sorted(SOURCES.glob("*.py"))


def pages(*, run: bool = True) -> list[tuple[str, str, str | bytes]]:
    """Return titles, places and contents of all notebooks, their pictures and their sources.

    With `run=False` cells are shown without outputs: for trying out the look of the site.
    """
    found: list[tuple[str, str, str | bytes]] = []
    for source in sources():
        folder = _kept(source) if run else None
        text = (folder / "page.md").read_text("utf-8") if folder else _bare(source)
        found.append((title_of(source), f"notebooks/{source.stem}.md", text))
        for picture in sorted(folder.glob("*.svg")) if folder else ():
            found.append(("", f"notebooks/{picture.name}", picture.read_bytes()))
        found.append(("", f"notebooks/source/{source.name}", source.read_bytes()))
    return found


def _kept(source: Path) -> Path:
    """Return the folder with a notebook's outputs; run it unless nothing has changed."""
    digest = hashlib.sha256(source.read_bytes())
    for path in [
        *sorted((ROOT / "clipless").rglob("*.py")),
        *sorted(Path(__file__).parent.glob("*")),
    ]:
        if path.is_file():
            digest.update(path.read_bytes())
    folder = KEPT / f"{source.stem}-{digest.hexdigest()[:16]}"
    if (folder / "page.md").exists():
        return folder
    for old in KEPT.glob(f"{source.stem}-*"):
        shutil.rmtree(old)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, __file__, str(source), str(folder)],
            cwd=scratch, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS,
        )  # fmt: skip
    if done.returncode != 0:
        shutil.rmtree(folder)
        raise RuntimeError(f"{source.relative_to(ROOT)} failed:\n{done.stderr[-3000:]}")
    return folder


def _bare(source: Path) -> str:
    parts = []
    for kind, text in cells(source.read_text("utf-8")):
        parts.append(text if kind == "markdown" else f"```python\n{text}\n```")
    return "\n\n".join(parts) + "\n"


def execute(source: Path, folder: Path) -> str:
    """Run a notebook's cells in one namespace; return its page, with pictures kept in `folder`."""
    from drawing import save

    namespace: dict[str, Any] = {"__name__": "__main__"}
    parts: list[str] = []
    drawn = 0
    for kind, text in cells(source.read_text("utf-8")):
        if kind == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        printed, value = _run(text, namespace, name=source.name)
        if hasattr(value, "savefig"):
            drawn += 1
            name = f"{source.stem}-{drawn}"
            for uri, content in save(value, name).items():
                (folder / uri).write_text(content, encoding="utf-8")
            picture = f"![Output of the cell above]({name}"
            parts.append(f"{picture}.light.svg#only-light){picture}.dark.svg#only-dark)")
        elif value is not None:
            printed += f"{value!r}\n" if not isinstance(value, str) else f"{value}\n"
        if printed.strip():
            parts.append(f'```text title="Output"\n{printed.rstrip()}\n```')
    parts.append(
        f"[The source of this page](source/{source.name}) is a Python file that runs by itself."
    )
    return "\n\n".join(parts) + "\n"


def _run(code: str, namespace: dict[str, Any], *, name: str) -> tuple[str, Any]:
    """Run one cell; return what it printed, and the value of its last line if that is one."""
    tree = ast.parse(code, filename=name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        exec(compile(tree, name, "exec"), namespace)
        value = None
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    return printed.getvalue(), value


if __name__ == "__main__":
    target = Path(sys.argv[2])
    target.mkdir(parents=True, exist_ok=True)
    page = execute(Path(sys.argv[1]).resolve(), target)
    (target / "page.md").write_text(page, encoding="utf-8")
