"""Which examples take part in which step, drawn exactly as a `Sampling` describes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from clipless.accounting import FixedSizeSampling, FullBatch, PoissonSampling, Sampling
from clipless.common import fresh_bits
from clipless.errors import PrivacyError

_SMALLEST_RATE = 1e-10
"""Below it the spacing of float64 numbers would show in the inclusion probabilities."""

_SEED_DOMAIN = 0x5A3C
"""Keeps a sampler's stream apart from any other stream made from the same seed."""

_CUT_PROBABILITY = 1e-9
"""How often, at most, the default padding cuts a step's sample."""

_MOST_STEPS_AT_ONCE, _MOST_INDICES_AT_ONCE = 16, 1 << 16
"""How far ahead of the training samples are drawn."""


class IndexSampler:
    """The examples of every step: a 1-D int64 tensor of increasing, distinct indices per step.

    Guarantee: the sample of a step is distributed as `sampling` says and is independent of the
    samples of all other steps. Poisson samples may be empty; they are never dropped or redrawn.
    Inclusion probabilities are exact to a relative error of 1e-5, and 1e-8 for rates from 1e-7.

    The sample of step t is a pure function of a 128-bit key and t, so a prefetching loader may
    draw ahead, several processes that share the key draw the same sample, and the saved state is
    the key and a number. The key comes from the operating system. Amplification by sampling holds
    against those who do not know it: keep any checkpoint with the state in it from whom the
    guarantee is meant for. `insecure_seed` is for tests: what it samples for is not private.

    Example:
        >>> sampling = PoissonSampling(dataset_size=60_000, rate=0.01)
        >>> sampler = IndexSampler(sampling=sampling)
        >>> for indices in sampler.take(steps=3):
        ...     print(indices.dtype, 400 < len(indices) < 800)
        torch.int64 True
        torch.int64 True
        torch.int64 True
    """

    def __init__(self, *, sampling: Sampling, insecure_seed: int | None = None) -> None:
        validate_sampling(sampling)
        self.sampling = sampling
        self.step = 0
        """The number of the step that comes next."""
        self.insecure = insecure_seed is not None
        """Whether the draws follow from a seed somebody chose, and protect nobody."""
        self._key = fresh_bits(128) if insecure_seed is None else _key_from_seed(insecure_seed)
        self._repeated_key, self._repeated_until = self._key, 0
        self._ahead: dict[tuple[int, int], torch.Tensor] = {}
        self._steps_at_once = _steps_at_once(sampling)

    def draw(self, *, step: int) -> torch.Tensor:
        """Return the sample of one step, the same one whenever it is asked for."""
        # Drawn one after the other, samples cost a fraction of what they cost between the steps
        # of a training, when all that drawing needs has left the processor's caches.
        if (self._key_of(step), step) not in self._ahead:
            steps = range(step, step + self._steps_at_once)
            self._ahead = {(self._key_of(each), each): self._drawn(each) for each in steps}
        return self._ahead.pop((self._key_of(step), step))

    def _key_of(self, step: int) -> int:
        return self._repeated_key if step < self._repeated_until else self._key

    def _drawn(self, step: int) -> torch.Tensor:
        # 2^128 blocks of the counter belong to each step: the streams of steps never overlap.
        generator = np.random.Generator(
            np.random.Philox(key=self._key_of(step), counter=step << 128)
        )
        sampling = self.sampling
        size = sampling.dataset_size
        match sampling:
            case PoissonSampling():
                drawn = _poisson_subset(size, sampling.rate, generator)
                limit = sampling.max_batch_size
                if limit is not None and len(drawn) > limit:
                    drawn = drawn[_uniform_subset(len(drawn), limit, generator)]
            case FixedSizeSampling():
                drawn = _uniform_subset(size, sampling.batch_size, generator)
            case FullBatch():
                drawn = np.arange(size)
        return torch.from_numpy(drawn)

    def take(self, *, steps: int) -> Iterator[torch.Tensor]:
        """Yield the samples of the next `steps` steps; a step counts as used when it is yielded."""
        for _ in range(steps):
            indices = self.draw(step=self.step)
            self.step += 1
            yield indices

    def seed_for(self, purpose: str, *, step: int) -> int:
        """Return a seed for what else is random in a step, the same whenever it is asked for."""
        text = f"clipless/{purpose}/{self._key_of(step):032x}/{step}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])

    def begin(self, *, key: int, repeated: Mapping[str, Any] | None = None, until: int = 0) -> None:
        """Draw by `key` from here on; of a `repeated` state, repeat the steps before `until`.

        Samples of a run that is resumed may have been released already. Only those steps are
        repeated whose outcome is known, and compared with it; all later ones are drawn afresh.
        """
        if repeated is not None:
            own = self._key
            self.load_state_dict(dict(repeated))
            self._repeated_key, self._key = self._key, own
            self._repeated_until = until
        if not self.insecure:
            self._key = key

    def repeat_no_more(self) -> None:
        """Draw all steps afresh that have not been drawn."""
        self._repeated_until = 0

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to draw the same samples from the next step on. Keep it secret."""
        return {
            "sampling": repr(self.sampling),
            "key": f"{self._key_of(self.step):032x}",
            "step": self.step,
            "insecure": self.insecure,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved; it must come from the same `sampling`."""
        if state["sampling"] != repr(self.sampling):
            raise PrivacyError(
                f"this sampler state was saved under {state['sampling']} and does not fit "
                f"{self.sampling!r}; resume with the sampling the run began with"
            )
        self._key, self._repeated_until = int(state["key"], 16), 0
        self.step = int(state["step"])
        self.insecure = bool(state.get("insecure", state.get("seeded", False)))


def _steps_at_once(sampling: Sampling) -> int:
    """How many steps to draw at a time: as many as are small together."""
    match sampling:
        case PoissonSampling():
            size = sampling.expected_batch_size
        case FixedSizeSampling():
            size = sampling.batch_size
        case FullBatch():
            size = sampling.dataset_size
    return max(1, min(_MOST_STEPS_AT_ONCE, int(_MOST_INDICES_AT_ONCE / max(size, 1.0))))


def shard(indices: torch.Tensor, *, rank: int, world_size: int) -> torch.Tensor:
    """Return the part of a step's sample that process `rank` of `world_size` works on.

    The parts are disjoint, together the whole sample, and differ in size by at most one.
    """
    return indices[rank::world_size]


def padded_sampling(sampling: Sampling) -> Sampling:
    """Return the description of `sampling` when every step is held in a fixed number of rows.

    Poisson samples without a `max_batch_size` get one that cuts at most one step in 10^9, from
    Bernstein's inequality: `P(size >= mean + t) <= exp(-t^2 / (2 (variance + t / 3)))`. It is
    rounded up to a multiple of 8, or of 64 from 512 on. It depends on nothing but the data set's
    size and the rate, which are public. The cut is part of the mechanism: account for what this
    function returns, not for what it was given.
    """
    validate_sampling(sampling)
    if not isinstance(sampling, PoissonSampling) or sampling.max_batch_size is not None:
        return sampling
    mean = sampling.expected_batch_size
    variance = mean * (1.0 - sampling.rate)
    tail = -math.log(_CUT_PROBABILITY)
    excess = tail / 3 + math.sqrt((tail / 3) ** 2 + 2 * tail * variance)
    multiple = 64 if mean + excess >= 512 else 8
    limit = multiple * math.ceil((mean + excess) / multiple)
    # No sample is larger than the data set, so a limit that high would cut nothing.
    return sampling if limit >= sampling.dataset_size else replace(sampling, max_batch_size=limit)


def largest_sample(sampling: Sampling) -> int:
    """Return the size that no sample of a step exceeds."""
    match sampling:
        case PoissonSampling(dataset_size=size, max_batch_size=limit):
            return size if limit is None else min(size, limit)
        case FixedSizeSampling(batch_size=batch_size):
            return batch_size
        case FullBatch(dataset_size=size):
            return size


def steps_of_one_pass(sampling: Sampling) -> int:
    """Return the number of steps that use every example once on average."""
    match sampling:
        case PoissonSampling(rate=rate):
            return max(1, round(1.0 / rate))
        case FixedSizeSampling(dataset_size=size, batch_size=batch_size):
            return max(1, round(size / batch_size))
        case FullBatch():
            return 1


def validate_sampling(sampling: Sampling) -> None:
    """Raise `PrivacyError` unless `sampling` describes something that can be drawn exactly."""
    if type(sampling) not in (PoissonSampling, FixedSizeSampling, FullBatch):
        raise PrivacyError(
            f"{type(sampling).__name__} is not a sampling that can be drawn and accounted for; "
            "use PoissonSampling, FixedSizeSampling or FullBatch"
        )
    size = sampling.dataset_size
    if size < 1:
        raise PrivacyError(f"dataset_size={size}: there is nothing to sample from")
    if isinstance(sampling, PoissonSampling):
        if not _SMALLEST_RATE <= sampling.rate <= 1.0:
            raise PrivacyError(
                f"rate={sampling.rate}: the probability that an example is in a batch must lie "
                f"between {_SMALLEST_RATE} and 1; it is the expected batch size over dataset_size"
            )
        if sampling.max_batch_size is not None and sampling.max_batch_size < 1:
            raise PrivacyError(f"max_batch_size={sampling.max_batch_size} must be at least 1")
    if isinstance(sampling, FixedSizeSampling) and not 1 <= sampling.batch_size <= size:
        raise PrivacyError(
            f"batch_size={sampling.batch_size} examples cannot be drawn without replacement "
            f"from a data set of {size}"
        )


def _key_from_seed(seed: int) -> int:
    words = np.random.SeedSequence(seed, spawn_key=(_SEED_DOMAIN,)).generate_state(2, np.uint64)
    return int(words[0]) << 64 | int(words[1])


def _poisson_subset(size: int, rate: float, generator: np.random.Generator) -> Any:
    """Include each of `size` indices independently with probability q = `rate`.

    Jumps from one included index to the next: the number k of indices skipped in between has
    `P(k) = (1 - q)^k q`, which is `floor(E / -log(1 - q))` for a standard exponential E. The work
    grows with the sample, not with the data set.
    """
    if rate == 1.0:
        return np.arange(size)
    mean_skip = -1.0 / math.log1p(-rate)
    count = int(size * rate) + 1  # what is expected, then a little at a time up to the end
    position, blocks = -1, []
    while position < size:
        skipped = generator.standard_exponential(count) * mean_skip
        # Every skip past the end is the same skip; the minimum keeps the sum within int64.
        jumps = np.minimum(skipped, float(size)).astype(np.int64) + 1
        positions = position + np.cumsum(jumps)
        position = int(positions[-1])
        blocks.append(positions)
        count = int(2.0 * math.sqrt(size * rate)) + 8
    included = np.concatenate(blocks)
    return included[: np.searchsorted(included, size)]


def _uniform_subset(size: int, count: int, generator: np.random.Generator) -> Any:
    """Choose `count` of `size` indices, every subset of that size being equally likely."""
    chosen = generator.choice(size, size=count, replace=False, shuffle=False)
    return np.sort(chosen.astype(np.int64, copy=False))
