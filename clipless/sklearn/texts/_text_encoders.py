"""From texts to vectors: hashed n-grams, frozen transformers, or a function of the user's.

A vector must depend on its own text alone: a vector in which other texts have a part would let one
row touch others, which no noise is made for. Transformers are therefore run on one text at a time.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from clipless.errors import PrivacyError
from clipless.sklearn.texts._vector_cache import Vectors


class TextEncoder(Protocol):
    """Maps texts to vectors, each by itself."""

    @property
    def identity(self) -> str:
        """What tells this encoder from all others: a key of cached vectors."""

    def describe(self) -> dict[str, Any]:
        """Return plain data from which `restored_encoder` finds the encoder again."""

    def __call__(self, texts: Sequence[str]) -> Vectors:
        """Return (n, d) vectors."""


@dataclass(frozen=True, kw_only=True)
class HashedNgrams:
    """Counts of words, pairs of words and parts of words, hashed into a fixed number of places.

    Nothing is learned from texts: there is no vocabulary. Half of the places are for words and
    pairs, half for 3 to 5 characters within a word. Counts enter by their square root, with a sign
    by their hash, so that what shares a place cancels on average.

    Example:
        >>> vectors = HashedNgrams(places=64)(["a cat sat", "a cat sat", ""])
        >>> vectors.shape, bool((vectors[0] == vectors[1]).all()), float(abs(vectors[2]).max())
        ((3, 64), True, 0.0)
    """

    places: int = 2048
    words: tuple[int, int] = (1, 2)
    characters: tuple[int, int] = (3, 5)

    @classmethod
    def for_rows(cls, rows: int) -> HashedNgrams:
        """Return the encoder for a public number of rows: each place takes its part of the noise.

        >>> HashedNgrams.for_rows(5000).places, HashedNgrams.for_rows(10**6).places
        (256, 2048)
        """
        return cls(places=min(max(1 << round(math.log2(max(rows, 1) / 20)), 128), 2048))

    @property
    def identity(self) -> str:
        """The settings."""
        return f"hashed n-grams {asdict(self)}"

    def describe(self) -> dict[str, Any]:
        """Return the settings."""
        return {"kind": "ngrams", **asdict(self)}

    def __call__(self, texts: Sequence[str]) -> Vectors:
        """Return (n, places) vectors, zero for a text without letters."""
        text = importlib.import_module("sklearn.feature_extraction.text")
        half = self.places // 2
        parts = []
        for analyzer, lengths, size in (
            ("word", self.words, half),
            ("char_wb", self.characters, self.places - half),
        ):
            hashing = text.HashingVectorizer(
                n_features=size, analyzer=analyzer, ngram_range=lengths, norm=None,
                alternate_sign=True, decode_error="replace", dtype=np.float32,
            )  # fmt: skip
            counts = hashing.transform(list(texts)).toarray()
            found = np.sign(counts) * np.sqrt(np.abs(counts))
            norms = np.linalg.norm(found, axis=1, keepdims=True)
            parts.append(found / np.maximum(norms, 1e-12))
        return np.concatenate(parts, 1).astype(np.float32)


class FolderEncoder:
    """A frozen model of the `transformers` library in a folder: the mean of its last states.

    Nothing is downloaded. Each text is run by itself, so that its vector does not depend, in the
    last digits, on which other texts there are.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, longest: int = 256, device: str | None = None
    ) -> None:
        self._folder, self._longest = Path(folder).resolve(), longest
        self._device = torch.device(device or "cpu")
        if not self._folder.is_dir():
            raise FileNotFoundError(
                f"encoder={str(folder)!r} is no folder. Give the folder of a transformers model, "
                "or a function from strings to vectors; nothing is downloaded."
            )
        self._digest = _digest_of(self._folder)
        self._loaded: tuple[Any, Any] | None = None

    @property
    def identity(self) -> str:
        """A digest of the folder's files, and how many tokens are read."""
        return f"transformers {self._digest} {self._longest}"

    def describe(self) -> dict[str, Any]:
        """Return folder and digest."""
        return {
            "kind": "folder", "folder": str(self._folder), "longest": self._longest,
            "digest": self._digest,
        }  # fmt: skip

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> Vectors:
        """Return (n, width) vectors of norm 1."""
        tokenizer, model = self._model()
        found = []
        for text in texts:
            tokens = tokenizer(
                text, truncation=True, max_length=self._longest, return_tensors="pt"
            ).to(self._device)
            states = model(**tokens).last_hidden_state[0]
            found.append(torch.nn.functional.normalize(states.mean(0), dim=0).float().cpu())
        width = model.config.hidden_size
        return np.stack([each.numpy() for each in found]) if found else np.zeros((0, width), "f4")

    def _model(self) -> tuple[Any, Any]:
        if self._loaded is None:
            try:
                library = importlib.import_module("transformers")
            except ImportError as error:
                raise ImportError(
                    "a model in a folder needs the transformers library: "
                    "pip install 'clipless[transformers]'"
                ) from error
            place = str(self._folder)
            options = {"local_files_only": True, "trust_remote_code": False}
            tokenizer = library.AutoTokenizer.from_pretrained(place, **options)
            model = library.AutoModel.from_pretrained(place, use_safetensors=True, **options)
            self._loaded = tokenizer, model.eval().to(self._device)
        return self._loaded


_PUBLIC_TEXTS = ("an example", "12 other texts, and one more", "", "nothing")


class FunctionEncoder:
    """A function of the user's from strings to vectors; that texts stay apart is its promise.

    It is tried on public texts, before a fit: alone and among others a text must have one vector.
    """

    def __init__(self, function: Callable[[list[str]], Any]) -> None:
        self._function = function

    @property
    def identity(self) -> str:
        """The function's name: who changes it uses another cache."""
        name = getattr(self._function, "__qualname__", type(self._function).__qualname__)
        return f"function {getattr(self._function, '__module__', '')}.{name}"

    def describe(self) -> dict[str, Any]:
        """Return its name; a function cannot be saved."""
        return {"kind": "function", "name": self.identity}

    def try_apart(self) -> None:
        """Raise `PrivacyError` if the vector of a public text depends on the texts around it."""
        among, alone = self(_PUBLIC_TEXTS), self(_PUBLIC_TEXTS[:1])
        size = float(np.linalg.norm(alone))
        if among.shape[1] != alone.shape[1] or not (
            float(np.linalg.norm(among[:1] - alone)) <= 1e-3 * size
        ):
            raise PrivacyError(
                "the encoder gave a text another vector among other texts than alone. One row "
                "would then change the vectors of others, which no noise is made for: fit what it "
                "learns (a vocabulary, weights of words, a mean) on public texts beforehand, and "
                "let it map each text by itself"
            )

    def __call__(self, texts: Sequence[str]) -> Vectors:
        """Return (n, d) vectors."""
        found = self._function(list(texts))
        array = found.numpy(force=True) if isinstance(found, torch.Tensor) else np.asarray(found)
        if array.ndim != 2 or len(array) != len(texts):
            raise ValueError(
                f"the encoder must return one vector for each of {len(texts)} texts, got shape "
                f"{array.shape}"
            )
        return array.astype(np.float32)


def as_encoder(given: Any, *, rows: int = 0, device: str | None = None) -> TextEncoder:
    """Return the encoder that is meant: None for n-grams, a folder, or a function."""
    if given is None:
        return HashedNgrams.for_rows(rows)
    if isinstance(given, HashedNgrams | FolderEncoder | FunctionEncoder):
        return given
    if isinstance(given, str | os.PathLike):
        return FolderEncoder(given, device=device)
    if callable(given):
        return FunctionEncoder(given)
    raise ValueError(
        f"encoder must be None, the folder of a transformers model or a function from strings to "
        f"vectors, got {given!r}"
    )


def restored_encoder(described: dict[str, Any], given: Any = None) -> TextEncoder | None:
    """Return the encoder of a saved estimator: itself, or `given`; None if neither is there."""
    if described["kind"] == "ngrams":
        return HashedNgrams(
            places=int(described["places"]),
            words=(int(described["words"][0]), int(described["words"][1])),
            characters=(int(described["characters"][0]), int(described["characters"][1])),
        )
    if given is not None:
        return as_encoder(given)
    if described["kind"] == "folder" and Path(described["folder"]).is_dir():
        found = FolderEncoder(described["folder"], longest=int(described["longest"]))
        if found.describe()["digest"] == described["digest"]:
            return found
    return None


def _digest_of(folder: Path) -> str:
    """A digest of a model's files: weights by content, so that changed ones are another encoder."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(folder.rglob("*")):
        if file.suffix in (".safetensors", ".json", ".txt", ".model"):
            digest.update(str(file.relative_to(folder)).encode())
            with file.open("rb") as opened:
                while block := opened.read(1 << 20):
                    digest.update(block)
    return digest.hexdigest()
