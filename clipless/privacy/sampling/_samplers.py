"""Which examples take part in which step, drawn exactly as a `Sampling` describes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import numpy as np
import torch

from clipless.accounting import (
    CyclicPoissonSampling,
    FixedOrder,
    FixedSizeSampling,
    FullBatch,
    PoissonSampling,
    Sampling,
)
from clipless.common import fresh_bits
from clipless.errors import PrivacyError
from clipless.kernels import (
    KEY_BYTES,
    KeyStream,
    WordSource,
    next_key,
    random_subset,
    standard_exponential,
)
from clipless.privacy.sampling._order import batch_in_order, group_of_step

_SMALLEST_RATE = 1e-10
"""Below it the spacing of float64 numbers would show in the inclusion probabilities."""

_INCLUDED, _KEPT, _SEEDS, _RECORDS = 0, 1, 2, 3
"""The streams of a step's key: who is drawn, who stays of too many, what else is random, and which
of a user's records are taken."""

_LONGEST_CHAIN = 1_000_000
"""Over how many steps two states of one sampler are recognised as such."""

_MOST_STEPS_AT_ONCE, _MOST_INDICES_AT_ONCE = 16, 1 << 16
"""How far ahead of the training samples are drawn."""


class IndexSampler:
    """The examples of every step: a 1-D int64 tensor of increasing, distinct indices per step.

    Guarantee: the sample of a step is distributed as `sampling` says and is independent of the
    samples of all other steps. Poisson samples may be empty; they are never dropped or redrawn.
    Inclusion probabilities are exact to a relative error of 1e-5, and 1e-8 for rates from 1e-7.

    The sample of step t is a pure function of that step's ChaCha20 key, so a prefetching loader may
    draw ahead, several processes that share the key draw the same sample, and the saved state is
    a key and a number. Every key leads to the next step's and to none before it. The first comes
    from the operating system. Amplification by sampling holds against those who do not know it:
    keep any checkpoint with the state in it from whom the guarantee is meant for; of the steps
    before it, it tells nothing. `insecure_seed` is for tests: what it samples for is not private.

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
        if insecure_seed is None:
            self._keys = _StepKeys(fresh_bits(8 * KEY_BYTES).to_bytes(KEY_BYTES))
        else:
            text = f"clipless/insecure sampling/{insecure_seed}"
            self._keys = _StepKeys(hashlib.sha256(text.encode()).digest())
        self._repeated: _StepKeys | None = None
        self._repeated_until = 0
        self._ahead: dict[tuple[bytes, int], torch.Tensor] = {}
        self._steps_at_once = _steps_at_once(sampling)

    def draw(self, *, step: int) -> torch.Tensor:
        """Return the sample of one step, the same one whenever it is asked for."""
        # Drawn one after the other, samples cost a fraction of what they cost between the steps
        # of a training, when all that drawing needs has left the processor's caches.
        if (self._key_of(step), step) not in self._ahead:
            steps = range(step, step + self._steps_at_once)
            self._ahead = {(self._key_of(each), each): self._drawn(each) for each in steps}
        return self._ahead.pop((self._key_of(step), step))

    def _key_of(self, step: int) -> bytes:
        repeats = self._repeated is not None and step < self._repeated_until
        return (self._repeated if repeats and self._repeated else self._keys).of(step)

    def _drawn(self, step: int) -> torch.Tensor:
        stream = KeyStream(self._key_of(step))
        source = WordSource(stream, purpose=_INCLUDED)
        sampling = self.sampling
        size = sampling.dataset_size
        match sampling:
            case PoissonSampling():
                drawn = _poisson_subset(size, sampling.rate, source)
                limit = sampling.max_batch_size
                if limit is not None and len(drawn) > limit:
                    drawn = drawn[
                        random_subset(WordSource(stream, purpose=_KEPT), len(drawn), limit)
                    ]
            case FixedSizeSampling():
                drawn = random_subset(source, size, sampling.batch_size)
            case FullBatch():
                drawn = np.arange(size)
            case FixedOrder():
                drawn = batch_in_order(sampling, step)
            case CyclicPoissonSampling():
                members = group_of_step(sampling, step)
                drawn = members[_poisson_subset(len(members), sampling.round.rate, source)]
        return torch.from_numpy(drawn)

    def take(self, *, steps: int) -> Iterator[torch.Tensor]:
        """Yield the samples of the next `steps` steps; a step counts as used when it is yielded."""
        for _ in range(steps):
            indices = self.draw(step=self.step)
            self.advance(self.step + 1)
            yield indices

    def seed_for(self, purpose: str, *, step: int) -> int:
        """Return a seed for what else is random in a step, the same whenever it is asked for."""
        text = f"clipless/{purpose}/{self._key_of(step).hex()}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])

    def words_for(self, user: int, *, step: int) -> WordSource:
        """Return the words that choose among a user's records in a step."""
        return WordSource(KeyStream(self._key_of(step)), purpose=_RECORDS, index=user)

    def advance(self, step: int) -> None:
        """Let `step` come next, and keep no keys of those before the one that was handed out."""
        self.step = step
        for keys in (self._keys, self._repeated):
            if keys is not None:
                keys.forget_before(step - 1)

    def comes_after(self, state: Mapping[str, Any]) -> bool:
        """Whether this sampler has gone on from a saved state: their keys are of one chain."""
        key, step = bytes.fromhex(state["key"]), int(state["step"])
        if len(key) != KEY_BYTES or not step < self.step <= step + _LONGEST_CHAIN:
            return False
        return _StepKeys(key, first=step).of(self.step) == self._key_of(self.step)

    def begin(self, *, key: int, repeated: Mapping[str, Any] | None = None, until: int = 0) -> None:
        """Draw by `key` from here on; of a `repeated` state, repeat the steps before `until`.

        Samples of a run that is resumed may have been released already. Only those steps are
        repeated whose outcome is known, and compared with it; all later ones are drawn afresh.
        """
        if repeated is not None:
            own = self._keys
            self.load_state_dict(dict(repeated))
            self._repeated, self._keys = self._keys, own
            self._repeated_until = until
        if not self.insecure:
            self._keys = _StepKeys(key.to_bytes(KEY_BYTES), first=self.step)

    def repeat_no_more(self) -> None:
        """Draw all steps afresh that have not been drawn."""
        self._repeated_until = 0

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to draw the same samples from the next step on. Keep it secret."""
        return {
            "sampling": repr(self.sampling),
            "key": self._key_of(self.step).hex(),
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
        key = bytes.fromhex(state["key"])
        if len(key) != KEY_BYTES:
            # An earlier version's, which drew by other means: its samples cannot be repeated.
            key = hashlib.sha256(b"clipless/sampler of an earlier version/" + key).digest()
        self.step = int(state["step"])
        self._keys, self._repeated_until = _StepKeys(key, first=self.step), 0
        self.insecure = bool(state.get("insecure", state.get("seeded", False)))


class _StepKeys:
    """The keys of all steps from a first one on: each leads to the next, and not back."""

    def __init__(self, key: bytes, *, first: int = 0) -> None:
        self._first, self._keys = first, [key]

    def of(self, step: int) -> bytes:
        """Return the key of a step."""
        if step < self._first:
            raise PrivacyError(f"step {step} is over: the key of its sample is no longer known")
        while len(self._keys) <= step - self._first:
            self._keys.append(next_key(self._keys[-1]))
        return self._keys[step - self._first]

    def forget_before(self, step: int) -> None:
        """Keep no key of the steps before this one."""
        if step <= self._first:
            return
        _ = self.of(step)
        del self._keys[: step - self._first]
        self._first = step


def _steps_at_once(sampling: Sampling) -> int:
    """How many steps to draw at a time: as many as are small together."""
    match sampling:
        case PoissonSampling() | CyclicPoissonSampling():
            size = sampling.expected_batch_size
        case FixedSizeSampling():
            size = sampling.batch_size
        case FullBatch():
            size = sampling.dataset_size
        case FixedOrder():
            size = sampling.batch_size
    return max(1, min(_MOST_STEPS_AT_ONCE, int(_MOST_INDICES_AT_ONCE / max(size, 1.0))))


def shard(indices: torch.Tensor, *, rank: int, world_size: int) -> torch.Tensor:
    """Return the part of a step's sample that process `rank` of `world_size` works on.

    The parts are disjoint, together the whole sample, and differ in size by at most one.
    """
    return indices[rank::world_size]


def largest_sample(sampling: Sampling) -> int:
    """Return the size that no sample of a step exceeds."""
    match sampling:
        case PoissonSampling(dataset_size=size, max_batch_size=limit):
            return size if limit is None else min(size, limit)
        case FixedSizeSampling(batch_size=batch_size):
            return batch_size
        case FullBatch(dataset_size=size):
            return size
        case FixedOrder(batch_size=batch_size):
            return batch_size
        case CyclicPoissonSampling(dataset_size=size, groups=groups):
            return -(-size // groups)


def steps_of_one_pass(sampling: Sampling) -> int:
    """Return the number of steps that use every example once on average."""
    match sampling:
        case PoissonSampling(rate=rate) | CyclicPoissonSampling(rate=rate):
            return max(1, round(1.0 / rate))
        case FixedSizeSampling(dataset_size=size, batch_size=batch_size):
            return max(1, round(size / batch_size))
        case FullBatch():
            return 1
        case FixedOrder():
            return sampling.steps_per_pass


def validate_sampling(sampling: Sampling) -> None:
    """Raise `PrivacyError` unless `sampling` describes something that can be drawn exactly."""
    if not isinstance(sampling, Sampling) or type(sampling) not in get_args(Sampling):
        raise PrivacyError(
            f"{type(sampling).__name__} is not a sampling that can be drawn and accounted for; use "
            "PoissonSampling, CyclicPoissonSampling, FixedSizeSampling, FullBatch or FixedOrder"
        )
    size = sampling.dataset_size
    if size < 1:
        raise PrivacyError(f"dataset_size={size}: there is nothing to sample from")
    if isinstance(sampling, CyclicPoissonSampling):
        sampling = sampling.round
    if isinstance(sampling, PoissonSampling):
        if not _SMALLEST_RATE <= sampling.rate <= 1.0:
            raise PrivacyError(
                f"rate={sampling.rate}: the probability that an example is in a batch must lie "
                f"between {_SMALLEST_RATE} and 1; it is the expected batch size over dataset_size"
            )
        if sampling.max_batch_size is not None and sampling.max_batch_size < 1:
            raise PrivacyError(f"max_batch_size={sampling.max_batch_size} must be at least 1")
    if (
        isinstance(sampling, FixedSizeSampling | FixedOrder)
        and not 1 <= sampling.batch_size <= size
    ):
        raise PrivacyError(
            f"batch_size={sampling.batch_size} examples cannot be drawn without replacement "
            f"from a data set of {size}"
        )


def _poisson_subset(size: int, rate: float, source: WordSource) -> Any:
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
        skipped = standard_exponential(source, count) * mean_skip
        # Every skip past the end is the same skip; the minimum keeps the sum within int64.
        jumps = np.minimum(skipped, float(size)).astype(np.int64) + 1
        positions = position + np.cumsum(jumps)
        position = int(positions[-1])
        blocks.append(positions)
        count = int(2.0 * math.sqrt(size * rate)) + 8
    included = np.concatenate(blocks)
    return included[: np.searchsorted(included, size)]
