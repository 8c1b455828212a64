"""Mechanisms as frozen data: how examples are sampled, how much noise is added, which relation.

Nothing here computes an epsilon; `clipless.accounting._epsilon` interprets these objects. Their
form as plain dictionaries, which the ledger and saved plans hold, is defined here and nowhere else.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from clipless.errors import PrivacyError

SAMPLER_EPSILON = 1e-5
"""What the noise that is drawn lacks of a Gaussian, for up to 2^38 draws (docs/arithmetic.md).

Every epsilon contains it. The total variation that belongs to it is below 3e-14."""


class Relation(StrEnum):
    """The neighbouring relation: which data sets differ by one record.

    `ZERO_OUT`: both have N examples, and one example of the first is in the second an empty record:
    it is sampled like any other, and contributes nothing. `REPLACE_ONE`: one example differs.

    `ADD_REMOVE`, one example more, is what ledgers and plans of earlier versions say. It costs the
    same, but a public N with a rate b/N does not keep it (one more example moves N, the rate, b and
    delta), so nothing new is begun under it.
    """

    ZERO_OUT = "zero_out"
    ADD_REMOVE = "add_remove"
    REPLACE_ONE = "replace_one"

    def continues(self, kept: Relation) -> bool:
        """Return whether a ledger kept under `kept` may be continued under this relation.

        An old ledger under add/remove is continued by zero-out, under its own name.
        """
        return self is kept or (self is Relation.ZERO_OUT and kept is Relation.ADD_REMOVE)


def require_supported_relation(relation: Relation | str) -> Relation:
    """Return the relation, or refuse to begin anything under add/remove."""
    if relation == Relation.ADD_REMOVE:
        raise PrivacyError(
            "relation 'add_remove' is not one that a run can keep: with one example more, the "
            "public N, the sampling rate, the batch size and delta would be others. Use "
            "'zero_out' (the default; same N, one example replaced by an empty record that "
            "contributes nothing), which costs the same. Ledgers and plans that say add_remove "
            "can still be read and continued: leave relation out for those"
        )
    return Relation(relation)


@dataclass(frozen=True, kw_only=True)
class PoissonSampling:
    """Every example enters a step's batch independently with probability `rate`.

    With `max_batch_size`, a larger draw is cut to a uniformly random subset of that size; the
    cut is accounted for as a truncated Poisson sample. `dataset_size` is public.
    """

    dataset_size: int
    rate: float
    max_batch_size: int | None = None

    @property
    def expected_batch_size(self) -> float:
        """The public constant b that every step divides by."""
        return self.rate * self.dataset_size


@dataclass(frozen=True, kw_only=True)
class FixedSizeSampling:
    """A uniformly random subset of exactly `batch_size` examples, drawn anew for every step.

    Accounted under replace-one, the relation for which its amplification is proved.
    """

    dataset_size: int
    batch_size: int

    @property
    def expected_batch_size(self) -> float:
        """The public constant b that every step divides by."""
        return float(self.batch_size)


@dataclass(frozen=True, kw_only=True)
class FullBatch:
    """Every step sees every example: no sampling, no amplification."""

    dataset_size: int

    @property
    def expected_batch_size(self) -> float:
        """The public constant b that every step divides by."""
        return float(self.dataset_size)


@dataclass(frozen=True, kw_only=True)
class FixedOrder:
    """Batches of `batch_size` examples in one public order, the same in every pass: no sampling.

    An example takes part once a pass, every `steps_per_pass` steps. No amplification is claimed,
    and a `Mechanism` with this sampling is a whole pass: it costs what a full batch does.

    The order does not depend on the examples: it is that in which the data are read, or, with
    `shuffle_seed`, a permutation that follows from this public number. With `drop_last` what is
    left over of a pass takes part in no step; without, it is the last batch, smaller than the
    others and divided by the same public b.
    """

    dataset_size: int
    batch_size: int
    drop_last: bool = False
    shuffle_seed: int | None = None

    @property
    def expected_batch_size(self) -> float:
        """The public constant b that every step divides by."""
        return float(self.batch_size)

    @property
    def steps_per_pass(self) -> int:
        """How many steps lie between two in which the same example takes part."""
        whole, rest = divmod(self.dataset_size, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)


@dataclass(frozen=True, kw_only=True)
class CyclicPoissonSampling:
    """Examples in `groups` groups; step t samples those of group `t mod groups`, and no others.

    Each example of the group enters independently with probability `rate * groups`, so that a batch
    has `rate * N` of them on average. In any `groups` steps in a row an example has one chance: a
    `Mechanism` with this sampling is such a round, and costs what Poisson sampling at
    `rate * groups` does, also with correlated noise of at most `groups` bands (Choquette-Choo et
    al. 2023). Groups follow from a permutation that `shuffle_seed`, a public number, gives.
    """

    dataset_size: int
    rate: float
    groups: int
    shuffle_seed: int = 0

    def __post_init__(self) -> None:
        """Refuse rates that no probability gives, and groups without examples."""
        if not 1 <= self.groups <= self.dataset_size:
            raise ValueError(f"groups must lie in [1, dataset_size] in {self}")
        if not 0.0 < self.rate * self.groups <= 1.0:
            raise ValueError(f"rate * groups must lie in (0, 1] in {self}")

    @property
    def expected_batch_size(self) -> float:
        """The public constant b that every step divides by."""
        return self.rate * self.dataset_size

    @property
    def round(self) -> PoissonSampling:
        """What the chance of an example in a round is accounted for as."""
        return PoissonSampling(dataset_size=self.dataset_size, rate=self.rate * self.groups)


Sampling = PoissonSampling | FixedSizeSampling | FullBatch | FixedOrder | CyclicPoissonSampling

_SAMPLING_KINDS: dict[str, type[Sampling]] = {
    "poisson": PoissonSampling,
    "fixed_size": FixedSizeSampling,
    "full_batch": FullBatch,
    "fixed_order": FixedOrder,
    "cyclic_poisson": CyclicPoissonSampling,
}
_KIND_OF_SAMPLING = {kind: name for name, kind in _SAMPLING_KINDS.items()}


def steps_paid_together(sampling: Sampling) -> int:
    """Return how many steps are one release for the accountant: a pass, or a round of groups."""
    match sampling:
        case FixedOrder():
            return sampling.steps_per_pass
        case CyclicPoissonSampling(groups=groups):
            return groups
    return 1


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """One Gaussian release: noise of standard deviation `noise_multiplier * D` on a sampled sum.

    `D` is the zero-out sensitivity of what is released: the largest norm that ONE example can
    contribute. Under `REPLACE_ONE` two sums may differ by `2 D`; the accountant, and nobody
    else, applies that factor. All parameter groups of a training step are one such release.

    `failure` bounds the probability that the release says more than its noise allows, such as a
    value that few records hold, shown because its noisy count came out above a threshold. It is
    added to the delta of everything that is accounted for together.
    """

    noise_multiplier: float
    sampling: Sampling
    relation: Relation = Relation.ZERO_OUT
    failure: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what has no meaning, so that no accountant ever has to guess."""
        sigma = self.noise_multiplier
        if not (isinstance(sigma, float | int) and 0 <= sigma <= sys.float_info.max):
            raise ValueError(f"noise_multiplier must be a finite number >= 0, got {sigma!r:.40}")
        if not (isinstance(self.failure, float | int) and 0 <= self.failure < 1):
            raise ValueError(f"failure must be a probability below 1, got {self.failure!r}")
        if type(self.sampling) not in _KIND_OF_SAMPLING:
            raise ValueError(f"unknown kind of sampling: {self.sampling!r}")
        if not isinstance(self.relation, Relation):
            raise ValueError(f"relation must be a Relation, got {self.relation!r}")
        if (
            isinstance(self.sampling, CyclicPoissonSampling)
            and self.relation is Relation.REPLACE_ONE
        ):
            raise ValueError("cyclic sampling is accounted for under zero-out, not replace-one")
        if not 1 <= self.sampling.dataset_size <= sys.maxsize:
            raise ValueError(f"dataset_size must be at least 1 in {self.sampling!s:.80}")
        match self.sampling:
            case PoissonSampling(rate=rate, max_batch_size=limit):
                if not 0.0 < rate <= 1.0:
                    raise ValueError(f"rate must lie in (0, 1] in {self.sampling}")
                if limit is not None and not limit >= 1:
                    raise ValueError(f"max_batch_size must be at least 1 in {self.sampling}")
            case FixedSizeSampling(dataset_size=size, batch_size=batch_size):
                if not 1 <= batch_size <= size:
                    raise ValueError(f"batch_size must lie in [1, dataset_size] in {self.sampling}")
            case FixedOrder(dataset_size=size, batch_size=batch_size):
                if not 1 <= batch_size <= size:
                    raise ValueError(f"batch_size must lie in [1, dataset_size] in {self.sampling}")

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that JSON holds without loss; `from_dict` restores an equal object."""
        sampling = {"kind": _KIND_OF_SAMPLING[type(self.sampling)], **asdict(self.sampling)}
        return {
            "noise_multiplier": float(self.noise_multiplier),
            "sampling": sampling,
            "relation": self.relation.value,
            **({"failure": float(self.failure)} if self.failure else {}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Mechanism:
        """Restore what `to_dict` wrote.

        Anything this version does not know raises `ValueError`: a field or a kind of sampling
        added by a later version may change what the release costs, so it is never skipped.
        """
        data = {"failure": 0.0, **data}
        _require_keys(data, {"noise_multiplier", "sampling", "relation", "failure"}, "mechanism")
        described = dict(data["sampling"])
        name = described.pop("kind", None)
        if name not in _SAMPLING_KINDS:
            raise ValueError(f"unknown kind of sampling {name!r}; {_NEWER}")
        kind = _SAMPLING_KINDS[name]
        _require_keys(described, {field.name for field in fields(kind)}, f"{name} sampling")
        if data["relation"] not in tuple(Relation):
            raise ValueError(f"unknown relation {data['relation']!r}; {_NEWER}")
        return cls(
            noise_multiplier=data["noise_multiplier"],
            sampling=kind(**described),
            relation=Relation(data["relation"]),
            failure=data["failure"],
        )


_NEWER = "it may have been written by a newer version of clipless, which can read it"


def _require_keys(data: Mapping[str, Any], expected: set[str], what: str) -> None:
    if missing := expected - set(data):
        raise ValueError(f"{what} lacks {sorted(missing)}")
    if unknown := set(data) - expected:
        raise ValueError(f"{what} has unknown fields {sorted(unknown)}; {_NEWER}")
