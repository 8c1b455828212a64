"""Data sets by name: from a folder, or from the network."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from clipless.common import did_you_mean
from clipless.data._errors import DataFileError, DataNotFoundError
from clipless.data._split import split_rows
from clipless.data.sources._contents import checksum, contents_of, holds_one_file
from clipless.data.sources._download import DownloadBar, DownloadFailedError, fetch, locked
from clipless.data.sources._info import DatasetInfo, FileInfo, LoadedDataset
from clipless.data.sources._layout import Layout, Parts, Source, data_root, present
from clipless.data.sources._registry import SOURCES


def datasets() -> dict[str, DatasetInfo]:
    """Return the facts about every data set that `load` knows, by name.

    Example:
        >>> sorted(datasets())[:4]
        ['ALOI', 'campaign', 'celeba', 'census']
        >>> datasets()["cifar10"].example_shape
        (3, 32, 32)
    """
    return {name: source.info for name, source in SOURCES.items()}


def load(
    name: str,
    *,
    root: str | os.PathLike[str] | None = None,
    download: bool = True,
    progress: bool | None = None,
    split_seed: int | None = None,
) -> LoadedDataset:
    """Read a data set, downloading it first if it is not there, into tensors.

    Images are float32 in [0, 1] of shape (rows, channels, height, width), so that
    `info.norm_bound` holds; tables are float32 as published. Labels are int64 from 0.

    Args:
        name: one of `datasets()`, upper or lower case.
        root: the folder of all data; by default `CLIPLESS_DATA`, or a cache folder of the user.
        download: whether to try the network for files that are missing.
        progress: show a progress bar; by default on a terminal.
        split_seed: for tables without a published test set, the seed by which `split_rows` draws
            a fifth of the rows; 0 by default.

    Raises:
        DataNotFoundError: it says which files to put where.
        DataFileError: a file is corrupt, truncated or something else; it is named.

    Files that lie in the folder already and differ from the published ones in their checksum, but
    not in structure, are read with a warning. A download that differs is refused.
    """
    source = _source(name)
    if split_seed is not None and source.info.published_split:
        raise ValueError(f"{source.info.name} has a published test set: split_seed does not apply")
    folder = data_root(root)
    layout, paths = _find(source, folder, download=download, progress=progress)
    contents = [
        contents_of(path, inflate=holds_one_file(file))
        for path, file in zip(paths, layout.files, strict=True)
    ]
    other = _differing(source, layout, paths, contents)
    parts = layout.read(contents, paths, source.info)
    if other:
        warnings.warn(
            f"{source.info.name}: {', '.join(path.name for path in other)} in {other[0].parent} "
            "differ from the published files in their checksums. Sizes, shapes and labels are "
            "right, so they are read; results may differ from published ones.",
            stacklevel=2,
        )
    verified = not other and all(file.checksum is not None for file in layout.files)
    return _loaded(source.info, parts, paths, verified=verified, seed=split_seed or 0)


def _source(name: str) -> Source:
    by_key = {known.lower(): source for known, source in SOURCES.items()}
    key = name.lower().replace("_", "-")
    if key not in by_key:
        hint = did_you_mean(key, (each.info.name for each in by_key.values()))
        raise ValueError(f"no data set {name!r}.{hint} There are {', '.join(SOURCES)}.")
    return by_key[key]


def _find(
    source: Source, root: Path, *, download: bool, progress: bool | None
) -> tuple[Layout, list[Path]]:
    for layout in source.layouts:
        paths = layout.find(root)
        if paths is not None:
            return layout, paths
    layout = source.published
    home = layout.home(root)
    if not download:
        raise DataNotFoundError(_instructions(source, root, "and download=False"))
    try:
        home.mkdir(parents=True, exist_ok=True)
        with locked(home), DownloadBar(progress) as bar:
            paths = [_there(file, home, layout, source.info, bar) for file in layout.files]
    except DownloadFailedError as error:
        reason = f"and could not be downloaded:\n{error}\n"
        raise DataNotFoundError(_instructions(source, root, reason)) from error
    except OSError as error:
        reason = f"and cannot be stored there ({error})"
        raise DataNotFoundError(_instructions(source, root, reason)) from error
    return layout, paths


def _there(file: FileInfo, home: Path, layout: Layout, info: DatasetInfo, bar: DownloadBar) -> Path:
    """Return the path of a file after downloading it, unless another process just has."""
    path = present(home, file)
    if path is not None:
        return path

    def check(part: Path) -> None:
        # Without a checksum the structure is all there is to go by, so it comes before the rename.
        # Only tables in one file come without.
        if file.checksum is None:
            layout.read([contents_of(part, inflate=holds_one_file(file))], [part], info)

    bar.begin(file.name)
    fetch(file, home / file.name, bar=bar, check=check)
    return home / file.name


def _instructions(source: Source, root: Path, reason: str) -> str:
    """Say what is missing, why it did not come by itself, and which files to put where."""
    incomplete = []
    for layout in source.layouts[:-1]:
        folder = layout.home(root)
        names = [file.name for file in layout.files if present(folder, file) is None]
        if len(names) < len(layout.files):
            incomplete.append(f"{folder} lacks {', '.join(names)}.")
    home = source.published.home(root)
    missing = [file for file in source.published.files if present(home, file) is None]
    return "\n".join(
        [
            f"{source.info.name} is not in {root}, {reason}",
            *incomplete,
            f"Put into {home}:",
            *(f"  {file.name}    from {' or '.join(file.urls)}" for file in missing),
            "or name a folder that has it by root= or the environment variable CLIPLESS_DATA.",
        ]
    )


def _differing(
    source: Source, layout: Layout, paths: Sequence[Path], contents: Sequence[bytes]
) -> list[Path]:
    """Return the files whose checksum is not the published one; refuse those of another set."""
    elsewhere = {
        file.checksum: (other.info.name, file.name)
        for other in SOURCES.values()
        for known in other.layouts
        for file in known.files
        if file.checksum is not None
    }
    differing = []
    for file, path, raw in zip(layout.files, paths, contents, strict=True):
        if file.checksum is None:
            continue
        found = checksum(raw, like=file.checksum)
        if found == file.checksum:
            continue
        if found in elsewhere:
            owner, name = elsewhere[found]
            raise DataFileError(f"{path} is {name} of {owner}, not of {source.info.name}")
        differing.append(path)
    return differing


def _loaded(
    info: DatasetInfo, parts: Parts, paths: Sequence[Path], *, verified: bool, seed: int
) -> LoadedDataset:
    pairs = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in parts]
    if not info.published_split:
        ((x, y),) = pairs
        rows = split_rows(len(x), test_fraction=0.2, seed=seed)
        pairs = [(x[chosen], y[chosen]) for chosen in rows]
    train, test = pairs
    return LoadedDataset(info=info, train=train, test=test, paths=tuple(paths), verified=verified)
