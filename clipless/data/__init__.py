"""Data: loaders, preprocessing of single examples, augmentation."""

from clipless.data._augmentation import Augmentation, Compose, RandomCrop, RandomFlip
from clipless.data._colour import ColourSpace
from clipless.data._errors import DataFileError, DataNotFoundError
from clipless.data._normalize import Standardize, clip_norm, normalize
from clipless.data._split import split_rows
from clipless.data._table import read_table
from clipless.data.sources._idx import read_idx
from clipless.data.sources._info import DatasetInfo, FileInfo, LoadedDataset
from clipless.data.sources._load import datasets, load

__all__ = [
    "load",
    "datasets",
    "DatasetInfo",
    "FileInfo",
    "LoadedDataset",
    "read_idx",
    "read_table",
    "split_rows",
    "DataFileError",
    "DataNotFoundError",
    "ColourSpace",
    "Standardize",
    "clip_norm",
    "normalize",
    "Augmentation",
    "Compose",
    "RandomCrop",
    "RandomFlip",
]
