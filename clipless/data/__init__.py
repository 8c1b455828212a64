"""Data: loaders, preprocessing of single examples, augmentation."""

from clipless.data._augmentation import Augmentation, Compose, RandomCrop, RandomFlip
from clipless.data._cells import Cell, hash_bucket, parse_cell, read_cell, read_cells
from clipless.data._colour import ColourSpace
from clipless.data._dates import NumericDate, parse_date, parse_numeric_date
from clipless.data._errors import DataFileError, DataNotFoundError
from clipless.data._normalize import Standardize, clip_norm, normalize
from clipless.data._split import split_rows
from clipless.data._table import read_rows, read_table
from clipless.data.large._columns import Piece, Repeated
from clipless.data.large._scratch import Scratch, ScratchColumn
from clipless.data.large._table import LargeTable, as_large_table
from clipless.data.sources._idx import read_idx
from clipless.data.sources._info import DatasetInfo, FileInfo, LoadedDataset
from clipless.data.sources._layout import data_root
from clipless.data.sources._load import datasets, load
from clipless.data.sources._packages import TABLES, LoadedTable, PackagedTable, load_packaged
from clipless.data.sources._registry import SOURCES

__all__ = [
    "load",
    "load_packaged",
    "TABLES",
    "PackagedTable",
    "LoadedTable",
    "datasets",
    "DatasetInfo",
    "FileInfo",
    "LoadedDataset",
    "read_idx",
    "read_table",
    "read_rows",
    "split_rows",
    "LargeTable",
    "as_large_table",
    "Piece",
    "Repeated",
    "Scratch",
    "ScratchColumn",
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
    "Cell",
    "NumericDate",
    "parse_date",
    "parse_numeric_date",
    "SOURCES",
    "data_root",
    "hash_bucket",
    "parse_cell",
    "read_cell",
    "read_cells",
]
