"""The data of a run, from its configuration: tensors, or a table."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from clipless.common import not_set_error
from clipless.data import (
    ColourSpace,
    DataFileError,
    DataNotFoundError,
    LargeTable,
    datasets,
    load,
    parse_cell,
    read_table,
    split_rows,
)
from clipless.errors import CliplessError
from clipless.privacy import Users
from clipless.runs.config._errors import ConfigError
from clipless.runs.config._sections import DataConfig
from clipless.runs.data._arrays import read_arrays
from clipless.runs.data._large import large_parts, reads_pieces

Kind = Literal["images", "vectors", "table"]
_TEXT = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
PIXELS = "pixels from 0 to 1"


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Training and test examples. Training examples are private, test examples are not.

    `train` and `test` are pairs of inputs and targets: tensors, or for a `table` a data frame and
    a column; of one that is read in pieces, `train` is a `LargeTable` and the name of its target.
    `unit` says what the numbers of an input are, for certified radii; `input_lipschitz` is the
    constant of what was done to them here.
    """

    train: tuple[Any, Any]
    test: tuple[Any, Any]
    kind: Kind
    input_shape: tuple[int, ...]
    classes: int
    """How many labels there are, which is public; 1 for a table, whose labels are its own."""
    unit: str
    input_lipschitz: float = 1.0
    verified: bool = False
    """Whether the files have their published checksums."""
    labels: tuple[Any, ...] | None = None
    """The labels that there can be, where that is public."""
    users: Users | None = None
    """Whose each training example is, where people are what is protected."""

    @property
    def size(self) -> int:
        """How many training examples there are, or people in them, if these are protected."""
        return len(self.train[0]) if self.users is None else self.users.number


def load_data(config: DataConfig, *, progress: bool | None = None) -> RunData:
    """Read the data that a configuration names.

    Raises:
        DataNotFoundError, DataFileError: files are missing or corrupt.
        ConfigError: there is no such data set, or the configuration does not fit it.

    Example:
        >>> data = load_data(DataConfig(name="digits"))
        >>> data.size, data.input_shape, data.classes
        (1434, (1, 8, 8), 10)
    """
    if config.is_table:
        found = _table(config)
    elif config.file is not None:
        found = _arrays(config)
    elif config.name == "digits":
        found = _digits(config)
    else:
        found = _named(config, progress)
    found = _coloured(found, config)
    if config.limit is not None and not isinstance(found.train[0], LargeTable):
        x, y = found.train
        found = replace(found, train=(x[: config.limit], y[: config.limit]))
        if found.users is not None:
            ids = found.users.ids[: config.limit]
            found = replace(found, users=replace(found.users, ids=ids))
    return found


def _named(config: DataConfig, progress: bool | None) -> RunData:
    known = {name.lower(): info for name, info in datasets().items()}
    info = known.get((config.name or "").lower().replace("_", "-"))
    try:
        data = load(
            config.name or "",
            root=config.root,
            download=config.download,
            progress=progress,
            split_seed=None if info is None or info.published_split else config.split_seed,
        )
    except (DataFileError, DataNotFoundError):
        raise
    except ValueError as error:
        raise ConfigError(f"{error} (Or digits, which comes with scikit-learn.)") from error
    images = len(data.info.example_shape) == 3
    return RunData(
        train=data.train,
        test=data.test,
        kind="images" if images else "vectors",
        input_shape=data.info.example_shape,
        classes=len(data.info.classes),
        labels=tuple(range(len(data.info.classes))),
        unit=PIXELS if images else "the features as published",
        verified=data.verified,
    )


def _digits(config: DataConfig) -> RunData:
    """Scikit-learn's 8 x 8 digits: small, and on the disk wherever scikit-learn is."""
    try:
        bundle = importlib.import_module("sklearn.datasets").load_digits()
    except ImportError as error:
        raise ImportError("digits need scikit-learn: pip install 'clipless[sklearn]'") from error
    x = torch.tensor(bundle.images, dtype=torch.float32)[:, None] / 16.0
    return _split(x, torch.tensor(bundle.target), config, classes=10, unit=PIXELS)


def _arrays(config: DataConfig) -> RunData:
    if config.file is None:
        raise not_set_error("file")
    found = read_arrays(Path(config.file))
    if config.class_count is None:
        raise ConfigError(
            f"say how many classes the labels of {config.file} have, 0 to n - 1, by "
            "data.class_count (--set data.class_count=10): the largest label of private rows is "
            "not public"
        )
    unit = PIXELS if found["pixels"] else "the numbers of the file"
    options: dict[str, Any] = {"classes": config.class_count, "unit": unit}
    if "x_test" not in found:
        return _split(found["x"], found["y"], config, **options)
    return _tensors((found["x"], found["y"]), (found["x_test"], found["y_test"]), **options)


def _split(x: Tensor, y: Tensor, config: DataConfig, *, classes: int, unit: str) -> RunData:
    train, test = split_rows(len(x), test_fraction=config.test_fraction, seed=config.split_seed)
    return _tensors((x[train], y[train]), (x[test], y[test]), classes=classes, unit=unit)


def _tensors(
    train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], *, classes: int, unit: str
) -> RunData:
    shape = tuple(train[0].shape[1:])
    return RunData(
        train=_within(train, classes),
        test=_within(test, classes),
        kind="images" if len(shape) == 3 else "vectors",
        input_shape=shape,
        classes=classes,
        labels=tuple(range(classes)),
        unit=unit,
    )


def _within(pair: tuple[Tensor, Tensor], classes: int) -> tuple[Tensor, Tensor]:
    """Make an example whose label is no class one of zeros, of the first class.

    Which labels occur is private, so nothing is said of it.
    """
    x, y = pair
    strange = (y < 0) | (y >= classes)
    x = torch.where(strange.view(-1, *[1] * (x.ndim - 1)), 0.0, x)
    return x, torch.where(strange, 0, y)


def _table(config: DataConfig) -> RunData:
    file, column = config.file, config.target
    if file is None:
        raise not_set_error("file")
    if column is None:
        raise not_set_error("target")
    if reads_pieces(config):
        return _large(config, column)
    features, target = read_table(file, target=column, separator=config.separator)
    people: Users | None = None
    if config.unit is not None:
        if config.unit not in features.columns:
            raise ConfigError(
                f"{file} has no column {config.unit!r} that says whose each row is (data.unit, "
                f"--unit). It has {', '.join(map(str, features.columns))}."
            )
        people = _users(features[config.unit], config)
        features = features.drop(columns=config.unit)
        if not features.shape[1]:
            raise ConfigError(f"{file} has no column besides the target and the unit")
    if config.text is not None:
        if config.text not in features.columns:
            raise ConfigError(
                f"{file} has no column {config.text!r} of texts (data.text, --text). It has "
                f"{', '.join(map(str, features.columns))}."
            )
        features = features[[config.text]]
    labels = _labels(config)
    count = len(features) if people is None else people.number
    chosen = split_rows(count, test_fraction=config.test_fraction, seed=config.split_seed)
    if people is not None:  # nobody is in both parts
        codes = torch.from_numpy(people.codes)
        kept, left = (torch.isin(codes, part).nonzero().flatten() for part in chosen)
        chosen = kept, left
        people = _users(people.ids.iloc[kept.numpy()], config)
    train, test = ((features.iloc[rows.numpy()], target.iloc[rows.numpy()]) for rows in chosen)
    return RunData(
        train=train,
        test=test,
        kind="table",
        input_shape=(features.shape[1],),
        classes=1,
        labels=labels,
        users=people,
        unit="private spreads of the columns" if config.text is None else "unit vectors of texts",
    )


def _large(config: DataConfig, column: str) -> RunData:
    table, features, target = large_parts(config, column)
    return RunData(
        train=(table, column),
        test=(features, target),
        kind="table",
        input_shape=(features.shape[1],),
        classes=1,
        labels=_labels(config),
        unit="private spreads of the columns",
    )


def _labels(config: DataConfig) -> tuple[Any, ...] | None:
    """The labels that were named; of a text table as its cells are read."""
    if config.classes is None or not (config.file or "").lower().endswith(_TEXT):
        return config.classes
    return tuple(parse_cell(each) if isinstance(each, str) else each for each in config.classes)


def _users(column: Any, config: DataConfig) -> Users:
    """Return whose the rows are that a column of ids belongs to."""
    try:
        if config.unit_records is None:
            return Users(column)
        return Users(column, records=config.unit_records)
    except CliplessError as error:
        raise ConfigError(f"{config.file}, column {config.unit}: {error}") from error


def _coloured(data: RunData, config: DataConfig) -> RunData:
    if config.colour == "rgb":
        return data
    if data.kind != "images" or data.input_shape[0] != 3 or data.unit != PIXELS:
        raise ConfigError(
            f"data.colour={config.colour!r} is for RGB images with pixels from 0 to 1; these "
            f"examples have shape {data.input_shape}"
        )
    convert = ColourSpace(config.colour)
    (x, y), (x_test, y_test) = data.train, data.test
    return replace(
        data,
        train=(convert(x), y),
        test=(convert(x_test), y_test),
        input_shape=(convert.channels, *data.input_shape[1:]),
        input_lipschitz=convert.lipschitz,
    )
