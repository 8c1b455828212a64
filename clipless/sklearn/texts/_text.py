"""Private classifier and regressor for texts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from clipless.privacy import Ledger
from clipless.sklearn._classifier import CliplessClassifier
from clipless.sklearn._regressor import CliplessRegressor
from clipless.sklearn._rule import TabularRule
from clipless.sklearn.texts._text_inputs import TextInputs


class CliplessTextClassifier(TextInputs, CliplessClassifier):
    """A classifier for texts, trained with differential privacy and nothing to tune.

    Guarantee: that of `CliplessClassifier`, for replacing one row (a text and its label) by an
    empty one. Texts become vectors by an encoder that was made from other data; the vectors are
    centred by a private query, and one linear layer on them is trained.

    Args:
        epsilon, delta: the total budget, as for `CliplessClassifier`.
        encoder: the folder of a `transformers` model, or a function from a list of strings to
            (n, d) vectors, each of which must depend on its own string alone. By default, hashed
            n-grams (`HashedNgrams`), which know no language and need no files.
        cache: a folder for vectors, found again by a digest of their texts. It is as private as
            the texts. A function as encoder is known by its name only: one folder for each.
        classes, class_weight, rule, ledger, random_state, device, progress, run_dir: as for
            `CliplessClassifier`.

    Example:
        >>> texts = ["good film", "bad film"] * 500
        >>> labels = ["+", "-"] * 500
        >>> model = CliplessTextClassifier(classes=["+", "-"], random_state=0).fit(texts, labels)
        >>> model.predict(["a good one", "a bad one"]).tolist()
        ['+', '-']
    """

    def __init__(
        self,
        epsilon: float = 1.0,
        delta: float | None = None,
        *,
        encoder: Any = None,
        cache: str | os.PathLike[str] | None = None,
        classes: Sequence[Any] | None = None,
        class_weight: Mapping[Any, float] | str | None = None,
        rule: TabularRule | None = None,
        ledger: Ledger | str | os.PathLike[str] | None = None,
        random_state: Any = None,
        device: str | None = None,
        progress: bool = False,
        run_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(
            epsilon, delta, classes=classes, class_weight=class_weight, rule=rule, ledger=ledger,
            random_state=random_state, device=device, progress=progress, run_dir=run_dir,
        )  # fmt: skip
        self.encoder, self.cache = encoder, cache


class CliplessTextRegressor(TextInputs, CliplessRegressor):
    """A regressor for texts: `CliplessRegressor` behind the encoders of `CliplessTextClassifier`.

    Example:
        >>> texts = ["one star", "five stars"] * 500
        >>> model = CliplessTextRegressor(random_state=0).fit(texts, [1.0, 5.0] * 500)
        >>> bool(model.predict(["five stars"])[0] > model.predict(["one star"])[0])
        True
    """

    def __init__(
        self,
        epsilon: float = 1.0,
        delta: float | None = None,
        *,
        encoder: Any = None,
        cache: str | os.PathLike[str] | None = None,
        rule: TabularRule | None = None,
        ledger: Ledger | str | os.PathLike[str] | None = None,
        random_state: Any = None,
        device: str | None = None,
        progress: bool = False,
        run_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(
            epsilon, delta, rule=rule, ledger=ledger, random_state=random_state, device=device,
            progress=progress, run_dir=run_dir,
        )  # fmt: skip
        self.encoder, self.cache = encoder, cache
