"""Texts as the input of an estimator: read, encoded as vectors, standardised privately."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clipless.data import Cell, read_cells
from clipless.sklearn._base import CliplessEstimator, Query
from clipless.sklearn._rule import TabularRule
from clipless.sklearn.tables._table import Rows
from clipless.sklearn.texts._text_encoders import FunctionEncoder, TextEncoder, as_encoder
from clipless.sklearn.texts._text_encoders import restored_encoder as restored_text_encoder
from clipless.sklearn.texts._vector_cache import VectorCache
from clipless.sklearn.texts._vectors import VectorEncoder
from clipless.statistics import PrivateRows, fit_scaling

_PIECE = 1024
"""Texts that are passed to an encoder at a time."""
_NOTES = (
    "The encoder of texts is public: it was not made from these rows, or its making is accounted "
    "for elsewhere.",
    "Each text's vector depends on that text alone; of a function that was passed as encoder, this "
    "is the user's promise.",
)


class TextInputs(CliplessEstimator):
    """What an estimator knows of texts. Not public: use a subclass."""

    _reads_pieces = False
    encoder: Any
    cache: str | os.PathLike[str] | None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = False
        tags.input_tags.one_d_array = True
        tags.input_tags.string = True
        return tags

    def _read(self, table: Any, *, reset: bool) -> Rows:
        """Return the vectors of texts; those of rows without a text are NaN."""
        places, cells = read_cells(_column_of(table))
        if reset:
            self._text_encoder: TextEncoder | None = as_encoder(
                self.encoder, rows=len(places), device=self.device
            )
            if isinstance(self._text_encoder, FunctionEncoder):
                self._text_encoder.try_apart()
        if self._text_encoder is None:
            raise ValueError(
                "the encoder of this estimator could not be saved with it, or is not where it was: "
                "pass it when loading, clipless.sklearn.load(path, encoder=...)"
            )
        vectors = self._vectors_of([_text_of(cell) for cell in cells])
        if not reset and vectors.shape[1] != len(self._encoder.center):
            raise ValueError(
                f"the encoder returns vectors of length {vectors.shape[1]}, but the estimator was "
                f"fitted with length {len(self._encoder.center)}: pass the same encoder"
            )
        rows = len(places)
        codes = torch.zeros(rows, 0, dtype=torch.long)
        return Rows(vectors[torch.from_numpy(places)], codes, codes)

    def _vectors_of(self, texts: Sequence[str | None]) -> Tensor:
        """(n, d) vectors in float32. A text that is missing is encoded as an empty one, and left
        out afterwards, so that how many there are changes nothing but their rows.
        """
        encoder = self._text_encoder
        if encoder is None:
            raise ValueError("there is no encoder")

        def encode(some: Sequence[str]) -> Any:
            pieces = [encoder(some[at : at + _PIECE]) for at in range(0, len(some), _PIECE)]
            return np.concatenate(pieces)

        plain = [text or "" for text in texts]
        if self.cache is None:
            found = encode(plain)
        else:
            found = VectorCache(self.cache, encoder=encoder.identity).get(plain, encode)
        vectors = torch.from_numpy(np.array(found, dtype=np.float32))
        missing = torch.tensor([text is None for text in texts], dtype=torch.bool)
        vectors[missing] = torch.nan
        return vectors

    def _choose_rule(self, rows: int) -> TabularRule:
        return TabularRule.choose_for_vectors(rows=rows, epsilon=self.epsilon)

    def _queries(self, rule: TabularRule, rows: int, delta: float) -> list[Query]:
        return [(rule.query_noise, 0.0)] * (4 if self._extra_columns else 1)

    def _prepare(self, rows: PrivateRows, rule: TabularRule) -> PrivateRows:
        (size,) = rows.shapes[0]
        self._encoder = VectorEncoder.from_rows(rows, size=size, noise_multiplier=rule.query_noise)
        if self._extra_columns:
            self._take_target(
                fit_scaling(
                    rows,
                    numbers=lambda x, codes, votes, y: y[:, None].double(),
                    numeric=1,
                    noise_multiplier=rule.query_noise,
                )
            )
        return rows.map_rows(lambda x, codes, votes, y: (x, codes, y))

    def _notes(self) -> tuple[str, ...]:
        return _NOTES if isinstance(self._text_encoder, FunctionEncoder) else _NOTES[:1]

    @property
    def feature_importances_(self) -> Any:
        """Texts have no columns."""
        raise AttributeError("texts have no columns whose importance could be told")

    def contributions(self, X: Any) -> Any:  # noqa: N803
        """Texts have no columns."""
        raise AttributeError("texts have no columns that could contribute")

    def _describe_inputs(self) -> dict[str, Any]:
        if self._text_encoder is None:
            raise ValueError("an estimator without its encoder cannot be saved")
        return {"text": self._text_encoder.describe()}

    def _restore_inputs(
        self, described: dict[str, Any], parts: dict[str, Tensor], encoder: Any
    ) -> None:
        self.encoder = encoder
        self._text_encoder = restored_text_encoder(described["text"], encoder)
        self._encoder = VectorEncoder.from_dict(parts)


def _column_of(texts: Any) -> Any:
    """The one column of texts in a list, an array, a series, or a table of one column."""
    if isinstance(texts, str):
        raise ValueError("X must hold one text for each row, got a single string: pass a list")
    if hasattr(texts, "iloc") and getattr(texts, "ndim", 1) == 2:
        if texts.shape[1] != 1:
            raise ValueError(f"X must be one column of texts, got {texts.shape[1]} columns")
        texts = texts.iloc[:, 0]
    elif hasattr(texts, "shape") and getattr(texts, "ndim", 1) == 2 and texts.shape[1] == 1:
        texts = texts[:, 0]
    if getattr(texts, "ndim", 1) != 1 or not hasattr(texts, "__len__"):
        raise ValueError("X must be one column of texts: a list, an array or a series of strings")
    if not len(texts):
        raise ValueError("Found a table with 0 sample(s), while a minimum of 1 is required.")
    if isinstance(texts, list | tuple):
        column = np.empty(len(texts), dtype=object)
        column[:] = texts
        return column
    return np.asarray(texts, dtype=object)


def _text_of(cell: Cell) -> str | None:
    """What a cell says: text as it is, numbers and dates as they print, None where missing.

    What no encoder could read, half of a surrogate pair, becomes a question mark.
    """
    if cell.kind == "missing":
        return None
    return str(cell.value).encode("utf-8", "replace").decode()
