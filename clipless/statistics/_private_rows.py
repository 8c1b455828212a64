"""`PrivateRows`: private rows that can only be queried with noise.

Whoever holds a `PrivateRows` cannot read it. It answers with noisy sums and noisy counts, each of
which is in the ledger before its noise is drawn, and it hands its rows over to private training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from clipless.common import Query, empty_row, fresh_bits, not_set_error, release_, require_positive
from clipless.data import Scratch, ScratchColumn
from clipless.errors import PrivacyError
from clipless.privacy import FullBatch, GaussianNoise, Ledger, Mechanism, Relation, Users
from clipless.statistics._answers import Answer, KeptAnswers
from clipless.statistics._values import leading_values, value_threshold

RowFunction = Callable[..., Tensor]

_CHUNK = 65_536
_PIECE = 1024  # of rows that are whole matrices
_WRITTEN = 16_384  # of rows that go to the disk
_WITNESSES = 4
# Sums are taken in float64, whose rounding moves a norm by far less than this.
_SLACK = 1 + 1e-9


class PrivateRows:
    """Rows of private numbers that answer queries with noise, each counted in the ledger.

    Guarantee: every value that leaves through `noisy_sum`, `noisy_gram`, `noisy_counts` or
    `noisy_values` is a Gaussian mechanism on all rows, whose noise multiplier is in `ledger` before
    the noise is drawn. Nothing else leaves: indexing, iterating, converting to an array or to text
    is refused. `len` is public, and so are the shapes.

    With `users`, what is protected is a user with all rows: every answer counts each user once, by
    the average of their rows' parts (of which values there are, one row of each user votes), and
    `len` is the number of users.

    A row may be an empty record, which keeps its place and contributes nothing to any answer; in
    training it is a row of zeros. Which rows are empty, and how many, is private.

    `map_rows` returns the rows under a function of single rows; `hand_over` gives them to the
    private loader of training, whose steps the engine accounts for in the same ledger.

    Args:
        columns: tensors of the same length; a row is one entry of each.
        ledger: where every answer is written down.
        present: (n,) booleans, False for empty records; by default none is empty.
        users: whose each row is, if what is protected is not a row.
        scratch: keep results of `map_rows` there and not in memory, for rows that do not fit into
            it, and whose columns are therefore files themselves.
        answers: those that were kept are given again, and further ones are kept there.
        insecure_seed: for tests: whoever knows it can remove the noise, so that nothing is private
            and the ledger's lines say so. By default the system's randomness is taken.

    Example:
        >>> from clipless.privacy import Ledger, Relation
        >>> ledger = Ledger.in_memory(dataset_size=1000, relation=Relation.ZERO_OUT)
        >>> rows = PrivateRows(torch.full((1000, 1), 3.0), ledger=ledger)
        >>> total = rows.noisy_sum(lambda x: x, bound=2.0, noise_multiplier=5.0, label="clipped")
        >>> 1900 < total.item() < 2100, ledger.releases
        (True, 1)
    """

    __slots__ = (
        "__answers", "__columns", "__function", "__insecure", "__ledger", "__line", "__noise",
        "__present", "__scratch", "__shares", "__users", "__votes",
    )  # fmt: skip

    def __init__(
        self,
        *columns: Tensor,
        ledger: Ledger,
        present: Tensor | None = None,
        users: Users | None = None,
        scratch: Scratch | None = None,
        answers: KeptAnswers | None = None,
        insecure_seed: int | None = None,
    ) -> None:
        if not columns or any(len(each) != len(columns[0]) for each in columns):
            raise ValueError("private rows are one or more tensors of the same length")
        if users is not None and len(users) != len(columns[0]):
            raise PrivacyError(
                f"there are ids of users for {len(users)} rows, but {len(columns[0])} rows: give "
                "one for each"
            )
        units = len(columns[0]) if users is None else users.number
        if units != ledger.dataset_size:
            raise PrivacyError(
                f"the ledger is kept for {ledger.dataset_size} examples, but there are "
                f"{units} {'rows' if users is None else 'users'}. Use one ledger for each data "
                "set, and for one unit of privacy."
            )
        ledger.require_unit(None if users is None else users.digest)
        if answers is not None:
            answers.require_paid(ledger)
        if present is None:
            present = torch.ones(len(columns[0]), dtype=torch.bool)
        if present.dtype is not torch.bool or present.shape != (len(columns[0]),):
            raise ValueError("present must be one boolean for each row")
        self.__columns = columns
        self.__scratch = scratch
        self.__answers = answers
        self.__function: Callable[..., tuple[Tensor, ...]] | None = None
        self.__ledger = ledger
        self.__line: str | None = None  # the digest of the ledger's line of the latest release
        self.__noise = GaussianNoise(insecure_seed=insecure_seed)
        self.__insecure = insecure_seed is not None
        self.__present = present
        self.__users = users
        self.__shares: Tensor | None = None
        self.__votes: Tensor | None = None
        if users is not None:
            codes = torch.from_numpy(users.codes)
            self.__shares = 1 / torch.bincount(codes)[codes].double()
            self.__votes = _one_of_each(codes)

    def __len__(self) -> int:
        """Return how many rows there are, or users: what answers count."""
        return len(self.__columns[0]) if self.__users is None else self.__users.number

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of a row's entries: public."""
        return tuple(tuple(each.shape[1:]) for each in self.__at(slice(1)))

    def noisy_sum(
        self, contribution: RowFunction, *, bound: float, noise_multiplier: float, label: str
    ) -> Tensor:
        """Return the sum of `contribution` over all rows, plus noise, in float64.

        `contribution` maps the columns of some rows, (n, ...) each, to (n, k); a row's part is
        clipped to norm `bound`, and counts as nothing where it is not finite. The noise of every
        entry has standard deviation `noise_multiplier * bound`.
        """
        limit = require_positive("bound", bound)
        self._check_apart(contribution)
        if isinstance(kept := self._kept(label), Tensor):
            return kept
        total: Tensor | None = None
        for present, shares, chunk in self._chunks():
            parts = contribution(*chunk).to(torch.float64).flatten(1)
            parts = torch.nan_to_num(parts, nan=0.0, posinf=0.0, neginf=0.0)
            parts = _emptied(parts, present)
            norms = torch.linalg.vector_norm(parts, dim=1, keepdim=True)
            parts = parts * (limit / norms.clamp(min=limit))
            if shares is not None:
                parts = parts * shares.to(parts.device)[:, None]
            total = parts.sum(dim=0) if total is None else total + parts.sum(dim=0)
        if total is None:
            raise not_set_error("total")
        return self._keep(label, self._release(total, limit, noise_multiplier, label))

    def noisy_gram(self, matrix_of: RowFunction, *, noise_multiplier: float, label: str) -> Tensor:
        """Return the sum of M M^T over all rows, plus noise, in float64: (k, k), symmetric.

        `matrix_of` maps the columns of some rows to (n, k, ...) matrices M, columns in any number
        of axes; each is scaled into the unit ball of the Frobenius norm, and counts as nothing
        where it is not finite. Then `||M M^T||_F <= ||M||_F^2 <= 1`, and the norm of the entries on
        and above the diagonal, which are released, is not larger. Their noise has standard
        deviation `noise_multiplier`; those below are their mirror image.
        """
        self._check_apart(matrix_of)
        if isinstance(kept := self._kept(label), Tensor):
            return kept
        total: Tensor | None = None
        for present, shares, chunk in self._chunks(_PIECE):
            matrices = matrix_of(*chunk).to(torch.float64).flatten(2)
            matrices = torch.nan_to_num(matrices, nan=0.0, posinf=0.0, neginf=0.0)
            matrices = _emptied(matrices, present)
            norms = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True)
            matrices = matrices / norms.clamp(min=1.0)
            if shares is not None:
                matrices = matrices * shares.to(matrices.device).sqrt()[:, None, None]
            matrices = matrices.movedim(1, 0).flatten(1)
            part = matrices @ matrices.mT
            total = part if total is None else total + part
        if total is None:
            raise not_set_error("total")
        above = torch.triu_indices(*total.shape, device=total.device).unbind()
        upper = torch.zeros_like(total)
        upper[above] = self._release(total[above], 1.0, noise_multiplier, label)
        return self._keep(label, upper + upper.triu(1).mT)

    def noisy_counts(
        self, bins_of: RowFunction, *, bins: Sequence[int], noise_multiplier: float, label: str
    ) -> list[Tensor]:
        """Return how many rows fall into each bin of several histograms, plus noise.

        `bins_of` maps the columns of some rows to (n, len(bins)) bin numbers, one for each
        histogram; a number outside `range(bins[j])` is counted nowhere. One row moves one count of
        each histogram: the joint sensitivity is `sqrt(len(bins))`. A user moves several, by one in
        all.
        """
        sizes = torch.tensor(list(bins))
        offsets = torch.cumsum(sizes, 0) - sizes
        width = int(sizes.sum())
        self._check_apart(bins_of)
        if isinstance(kept := self._kept(label), Tensor):
            return list(kept.split(list(bins)))
        total = torch.zeros(width, dtype=torch.float64)
        for present, shares, chunk in self._chunks():
            numbers = bins_of(*chunk).cpu()
            if numbers.shape != (len(chunk[0]), len(bins)):
                raise ValueError(
                    f"bins_of returned shape {tuple(numbers.shape)} for {len(chunk[0])} rows and "
                    f"{len(bins)} histograms"
                )
            valid = (numbers >= 0) & (numbers < sizes) & present.cpu()[:, None]
            weights = None if shares is None else shares[:, None].expand(numbers.shape)[valid]
            total += torch.bincount((numbers + offsets)[valid], weights, minlength=width)
        noisy = self._release(total, math.sqrt(len(bins)), noise_multiplier, label)
        return list(self._keep(label, noisy).split(list(bins)))

    def noisy_values(
        self, places_of: RowFunction, *, values: Sequence[str], noise_multiplier: float,
        failure: float, label: str,
    ) -> dict[str, float]:  # fmt: skip
        """Return the values that many rows hold, each with a noisy count; others are not told.

        `values` are the names that occur, which are private, and `places_of` maps the columns of
        some rows to (n,) places in them; a place outside is no value. See `_values.py`
        for what is released: one row moves it by one, and `failure` is added to delta.
        """
        self._check_apart(places_of)
        if isinstance(found := self._kept(label), dict):
            return found
        counts = torch.zeros(len(values), dtype=torch.float64)
        votes = self.__votes  # of a user one row: with several, a user could lift many values
        start = 0
        for present, _, chunk in self._chunks():
            places = places_of(*chunk).cpu()
            valid = (places >= 0) & (places < len(values)) & present.cpu()
            if votes is not None:
                valid &= votes[start : start + len(valid)]
            start += len(valid)
            counts += torch.bincount(places[valid], minlength=len(values))
        leads, leaders = leading_values(values, counts)
        noisy = self._release(leads, 1.0, noise_multiplier, label, failure)
        threshold = value_threshold(
            noise_multiplier=noise_multiplier * _SLACK,
            failure=failure,
            changes=2 if self.__ledger.relation is Relation.REPLACE_ONE else 1,
        )
        above = torch.nonzero(noisy > threshold).flatten().tolist()
        told = {leaders[place]: noisy[place].item() for place in above if place in leaders}
        if self.__answers is not None:
            self.__answers.keep(label, told, release=self.__line)
        return told

    def map_rows(self, function: Callable[..., tuple[Tensor, ...]]) -> PrivateRows:
        """Return the rows under a function of each row alone, in the same custody.

        With `scratch`, it is computed whenever rows are looked at, and kept by `hand_over` alone.
        """
        self._check_apart(function)
        mapped = self._same_rows()
        if self.__scratch is not None:
            first = self.__function
            mapped.__function = (
                function if first is None else lambda *columns: function(*first(*columns))
            )
            return mapped
        parts = [function(*chunk) for _, _, chunk in self._chunks()]
        mapped.__columns = tuple(torch.cat(pieces) for pieces in zip(*parts, strict=True))
        if any(len(each) != len(self.__present) for each in mapped.__columns):
            raise ValueError("a function of rows must return one row for each row")
        return mapped

    def _same_rows(self) -> PrivateRows:
        """Return the same rows in the same custody."""
        same = PrivateRows.__new__(PrivateRows)
        same.__columns, same.__function = self.__columns, self.__function
        same.__scratch, same.__answers = self.__scratch, self.__answers
        same.__ledger, same.__noise = self.__ledger, self.__noise
        same.__present, same.__insecure = self.__present, self.__insecure
        same.__users, same.__shares = self.__users, self.__shares
        same.__votes, same.__line = self.__votes, None
        return same

    def where(self, condition: RowFunction) -> PrivateRows:
        """Return the rows in which those are empty records, too, that do not fulfil a condition.

        `condition` maps the columns of some rows to (n,) booleans, each row by itself.
        """
        kept = self._same_rows()
        self._check_apart(condition)
        parts = [present & condition(*chunk).to(present) for present, _, chunk in self._chunks()]
        kept.__present = torch.cat(parts)
        return kept

    def hand_over(self) -> TensorDataset:
        """Return the rows for private training: for `Trainer.fit` or a `PrivacyEngine` only."""
        if self.__scratch is not None:
            return TensorDataset(*self._written(self.__scratch))
        if self.__present.all():
            return TensorDataset(*self.__columns)
        return TensorDataset(*(_emptied(each, self.__present) for each in self.__columns))

    def _written(self, scratch: Scratch) -> list[Tensor]:
        """Write the rows to the disk, empty ones as zeros, and return them as tensors."""
        count, written = len(self.__present), list[ScratchColumn]()
        for start in range(0, max(count, 1), _WRITTEN):
            place = slice(start, min(start + _WRITTEN, count))
            columns, present = self.__at(place), self.__present[place]
            if any(len(each) != len(present) for each in columns):
                raise ValueError("a function of rows must return one row for each row")
            if not written:
                sizes = [each[0].numel() * each.element_size() for each in columns if len(each)]
                scratch.require_room(count * sum(sizes), f"{count:,} rows of the model's inputs")
                written = [scratch.column() for _ in columns]
            for column, part in zip(written, columns, strict=True):
                column.append(_emptied(part, present))
        return [column.finish() for column in written]

    def _kept(self, label: str) -> Answer | None:
        """The answer that was given to this question before a break, if it was."""
        return None if self.__answers is None else self.__answers.take(label)

    def _keep(self, label: str, answer: Tensor) -> Tensor:
        if self.__answers is not None:
            self.__answers.keep(label, answer, release=self.__line)
        return answer

    def __at(self, place: slice) -> tuple[Tensor, ...]:
        """The columns of some rows, under the functions that are mapped over them."""
        columns = tuple(each[place] for each in self.__columns)
        return columns if self.__function is None else self.__function(*columns)

    def _release(
        self,
        value: Tensor,
        sensitivity: float,
        noise_multiplier: float,
        label: str,
        failure: float = 0.0,
    ) -> Tensor:
        """The only exit: write the ledger, then add noise."""
        multiplier = require_positive("noise_multiplier", noise_multiplier)
        sampling = FullBatch(dataset_size=len(self))
        mechanism = Mechanism(
            noise_multiplier=multiplier,
            sampling=sampling,
            relation=self.__ledger.relation,
            failure=failure,
        )
        seeded = " (not private: insecure_seed)" if self.__insecure else ""
        if self.__answers is not None:
            self.__answers.require_writable()
        with self.__ledger.held():  # nobody writes between the line and its digest
            self.__ledger.record(mechanism, label=label + seeded)
            self.__line = self.__ledger.head
        value = value.clone()
        bound = sensitivity * _SLACK
        release_([value], [Query(label, bound, multiplier * bound)], self.__noise)
        return value

    def _chunks(
        self, size: int = _CHUNK
    ) -> Iterator[tuple[Tensor, Tensor | None, tuple[Tensor, ...]]]:
        """Some rows at a time: which are present, their shares of a user, and their columns."""
        present, empty = self.__present, empty_row(len(self))
        if empty is not None:
            units = torch.arange(len(present))
            if self.__users is not None:
                units = torch.from_numpy(self.__users.codes)
            present = present & (units != empty)
        for start in range(0, max(len(present), 1), size):
            chunk = self.__at(slice(start, start + size))
            shares = None if self.__shares is None else self.__shares[start : start + size]
            yield present[start : start + size], shares, chunk

    def _check_apart(self, function: Callable[..., Any]) -> None:
        """A row's part must not depend on the rows around it: try it among other rows."""
        few = self.__at(slice(_WITNESSES))
        count = len(few[0])
        others = [
            torch.rand_like(each) if each.is_floating_point() else torch.randint_like(each, 0, 2)
            for each in few
        ]
        surrounded = (torch.cat([o, each, o, o]) for o, each in zip(others, few, strict=True))
        alone, among = function(*few), function(*surrounded)
        pairs = [(alone, among)]
        if not isinstance(alone, Tensor):
            pairs = list(zip(alone, among, strict=True))
        for one, other in pairs:
            if not _close_rows(one, other[count : 2 * count]):
                raise PrivacyError(
                    "a function of private rows gave another result for the same row among other "
                    "rows. A statistic of several rows must come from noisy_sum, noisy_gram, "
                    "noisy_counts or noisy_values, which pay for it."
                )

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise PrivacyError(
            "private rows cannot be read: a statistic taken from them by hand is paid for by "
            "nobody. Use noisy_sum, noisy_gram or noisy_counts, which write the ledger."
        )

    __array__ = __getitem__ = __iter__ = __reduce_ex__ = __getattr__ = _refuse

    def __repr__(self) -> str:
        seeded = ", not private: insecure_seed" if self.__insecure else ""
        units = "rows" if self.__users is None else "users"
        return f"PrivateRows({len(self)} {units}, shapes {list(self.shapes)}{seeded})"


def _emptied(parts: Tensor, present: Tensor) -> Tensor:
    """Zeros in place of what empty records would contribute."""
    kept = present.to(parts.device).view(-1, *[1] * (parts.ndim - 1))
    return torch.where(kept, parts, torch.zeros((), dtype=parts.dtype, device=parts.device))


def _one_of_each(codes: Tensor) -> Tensor:
    """Return which rows speak for their users: one of each, drawn without looking at any."""
    generator = torch.Generator().manual_seed(fresh_bits(63))
    order = torch.randperm(len(codes), generator=generator)
    last = torch.empty(int(codes.max()) + 1, dtype=torch.int64)
    last[codes[order]] = order
    chosen = torch.zeros(len(codes), dtype=torch.bool)
    chosen[last] = True
    return chosen


def _close_rows(one: Tensor, other: Tensor) -> bool:
    """Whether rows agree up to rounding, which in sums of products is that of their largest."""
    if one.shape != other.shape:
        return False
    if not one.numel():
        return True
    one, other = one.unsqueeze(-1).flatten(1).double(), other.unsqueeze(-1).flatten(1).double()
    largest = torch.nan_to_num(one.abs(), nan=0.0, posinf=0.0).amax(dim=1, keepdim=True)
    near = (one - other).abs() <= 1e-4 * largest + 1e-7
    same = (one == other) | (one.isnan() & other.isnan())
    return bool((near | same).all())
