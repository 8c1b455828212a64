"""Readers of data set files, one for each layout, which check sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clipless.data._errors import DataFileError
from clipless.data.sources._cifar import Batch, parse_binary_batch, parse_python_batch, read_members
from clipless.data.sources._idx import parse_idx
from clipless.data.sources._info import DatasetInfo
from clipless.data.sources._layout import Parts
from clipless.data.sources._npz import parse_npz

TRAIN_BATCHES = 5
"""CIFAR-10's training set comes in five files."""


def read_idx_images(contents: Sequence[bytes], paths: Sequence[Path], info: DatasetInfo) -> Parts:
    """Training images, training labels, test images, test labels."""
    shapes = [
        shape
        for rows in (info.train_size, info.test_size)
        for shape in ((rows, *info.example_shape[1:]), (rows,))
    ]
    arrays = []
    for raw, path, shape in zip(contents, paths, shapes, strict=True):
        array = parse_idx(raw, where=path)
        if array.shape != shape or array.dtype != np.uint8:
            raise DataFileError(
                f"{path} has shape {array.shape} and type {array.dtype}, expected {shape} and bytes"
            )
        arrays.append(array)
    _check_labels(arrays[1], info, paths[1])
    _check_labels(arrays[3], info, paths[3])
    return [
        (_scaled(images, info), labels.astype(np.int64))
        for images, labels in (arrays[:2], arrays[2:])
    ]


def read_cifar_binary(contents: Sequence[bytes], paths: Sequence[Path], info: DatasetInfo) -> Parts:
    """Five training batches and a test batch, binary records."""
    batches = [
        parse_binary_batch(raw, rows=rows, where=path)
        for raw, path, rows in zip(contents, paths, _batch_rows(info), strict=True)
    ]
    return _joined(batches, paths, info)


def read_cifar_python(contents: Sequence[bytes], paths: Sequence[Path], info: DatasetInfo) -> Parts:
    """Five training batches and a test batch, pickled by Python."""
    batches = [
        parse_python_batch(raw, rows=rows, where=path)
        for raw, path, rows in zip(contents, paths, _batch_rows(info), strict=True)
    ]
    return _joined(batches, paths, info)


def read_cifar_archive(
    contents: Sequence[bytes], paths: Sequence[Path], info: DatasetInfo
) -> Parts:
    """A .tar.gz of either layout, told by its name."""
    binary = "binary" in paths[0].name
    ending = ".bin" if binary else ""
    names = [f"data_batch_{k + 1}{ending}" for k in range(TRAIN_BATCHES)] + [f"test_batch{ending}"]
    members = read_members(contents[0], names=names, where=paths[0])
    inside = [paths[0] / name for name in names]
    return (read_cifar_binary if binary else read_cifar_python)(members, inside, info)


def read_table_arrays(contents: Sequence[bytes], paths: Sequence[Path], info: DatasetInfo) -> Parts:
    """One .npz file with all rows."""
    rows = info.train_size + info.test_size
    features, labels = parse_npz(contents[0], shape=(rows, *info.example_shape), where=paths[0])
    with np.errstate(over="ignore"):
        x = features.astype(np.float32)
    bad = int((~np.isfinite(x)).any(axis=1).sum())
    if bad:
        raise DataFileError(f"{paths[0]} has {bad:,} rows with values that are no finite float32")
    if info.value_range is not None:
        low, high = info.value_range
        if x.min() < low or x.max() > high:
            raise DataFileError(
                f"{paths[0]} has values in [{x.min():g}, {x.max():g}], expected [{low:g}, {high:g}]"
            )
    _check_labels(labels, info, paths[0])
    return [(x, labels.astype(np.int64))]


def _batch_rows(info: DatasetInfo) -> list[int]:
    return [info.train_size // TRAIN_BATCHES] * TRAIN_BATCHES + [info.test_size]


def _joined(batches: Sequence[Batch], paths: Sequence[Path], info: DatasetInfo) -> Parts:
    for (_, labels), path in zip(batches, paths, strict=True):
        _check_labels(labels, info, path)
    parts: Parts = []
    for group in (batches[:TRAIN_BATCHES], batches[TRAIN_BATCHES:]):
        labels = np.concatenate([labels for _, labels in group])
        x = np.empty((len(labels), *info.example_shape), np.float32)
        start = 0
        for pixels, _ in group:  # batch by batch: no second copy of all images
            x[start : start + len(pixels)] = _scaled(pixels, info)
            start += len(pixels)
        parts.append((x, labels.astype(np.int64)))
    return parts


def _scaled(pixels: NDArray[Any], info: DatasetInfo) -> NDArray[np.float32]:
    """Bytes as float32 in [0, 1], in the shape of examples."""
    scaled: NDArray[np.float32] = np.divide(pixels, np.float32(255), dtype=np.float32)
    return scaled.reshape(len(pixels), *info.example_shape)


def _check_labels(labels: NDArray[Any], info: DatasetInfo, where: Path) -> None:
    known = np.isin(labels, np.arange(len(info.classes)))
    if not known.all():
        row = int(np.argmin(known))
        raise DataFileError(
            f"{where} has labels outside 0 to {len(info.classes) - 1}: {labels[row]} in row {row}, "
            f"{int((~known).sum()):,} such rows"
        )
