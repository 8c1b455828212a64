"""Data loaders that sample the way the accountant assumes."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from clipless.accounting import CyclicPoissonSampling, FixedOrder, PoissonSampling, Sampling
from clipless.common import empty_row, names_moved_arguments
from clipless.distributed import rank_and_size
from clipless.errors import PrivacyError
from clipless.privacy.sampling._batch_options import BatchOptions
from clipless.privacy.sampling._batches import (
    BatchSource,
    ColumnSource,
    StepSample,
    count_micro_batches,
    make_source,
    split_step,
    tag,
    without_record,
)
from clipless.privacy.sampling._padding import MOST_SIZES, Padding, padded_sampling, padding_of
from clipless.privacy.sampling._samplers import (
    IndexSampler,
    largest_sample,
    shard,
    steps_of_one_pass,
)
from clipless.privacy.sampling._streams import StreamSource, check_keeps_its_order, is_stream
from clipless.privacy.sampling._users import Users
from clipless.privacy.sampling._views import Views
from clipless.privacy.sampling._wrapping import check_distinct, check_wrappable, default_sampling
from clipless.privacy.step import _refusals as refusals

_claiming = threading.Lock()
_USUAL: Any = ()  # for a `DataLoader` with nothing but the usual settings


@names_moved_arguments(batches=BatchOptions, data=DataLoader)
class PrivateLoader:
    """Batches of a data set, one independent sample for every step.

    Guarantee: each step's batch is drawn as `sampling` (the attribute) says, independently of all
    other steps; no sample is handed out twice, whether an iteration ends, is abandoned or starts
    anew. An empty Poisson sample is handed out as a batch of no examples. The seeds and the
    timing of workers have no influence on which examples are drawn.

    An iteration, `for x, y in loader`, is an epoch of `steps_per_epoch` steps (by default as many
    as see each example once on average); the next one continues with fresh samples. `current`
    describes the batch handed out last.

    `data`: a tensor, a tuple of tensors or a `TensorDataset` (rows are gathered where the tensors
    are, at once); any map-style data set; or a `DataLoader`, whose data set is then read and
    collated as it does, by its workers. Only how examples are chosen changes: `shuffle` and
    `drop_last` no longer mean anything, as no sample is a remainder. Loaders that choose examples
    in a way of their own (weighted, distributed, with replacement) are refused with `PrivacyError`.
    Streams (an `IterableDataset`, a `DataLoader` over one, anything that yields batches) are read
    as they are, for which `sampling` must be a `FixedOrder`.
    `sampling`: how each step's sample is drawn. For a `DataLoader` it defaults to Poisson sampling
    with the loader's batch size as expected batch size.
    `unit`: whose the records are, if people are sampled and not single records (`Users`): a sample
    is then one of users, and what counts examples here and in `batches` counts users.
    `batches`: micro-batches, padding and augmentation. With padding every batch has the smallest
    number of rows of `padding` that its examples fit in, at most `rows`,
    and `sampling.max_batch_size`, chosen by `padded_sampling` unless given, says where samples are
    cut. The views of a step are a function of the sampler's key, like its sample.
    `insecure_seed`: for tests. Samples always come from the operating system's randomness
    otherwise; what is trained with these is not private, and no epsilon is printed for it.
    `rank`, `world_size`: hand out this process's part of each step's sample only; by default they
    are those of the process group, if there is one. All processes must load one `state_dict`, which
    the engine does for them.

    A loader belongs to one private training session at a time, and its samples to that one: each is
    released once.

    `collate_fn` and data sets must keep examples apart: one that mixes examples of a batch
    (mixup in the collate function, for instance) voids the guarantee and cannot be noticed here.

    Example:
        >>> data = (torch.randn(1000, 3), torch.zeros(1000))
        >>> sampling = PoissonSampling(dataset_size=1000, rate=0.1)
        >>> loader = PrivateLoader(data, sampling=sampling, batches=BatchOptions(pad=True))
        >>> sizes = {len(x) for x, y in loader}
        >>> len(loader), loader.padding.sizes, sizes <= set(loader.padding.sizes)
        (10, (104, 120, 168), True)
    """

    def __init__(
        self,
        data: Any,
        *,
        sampling: Sampling | None = None,
        unit: Users | None = None,
        batches: BatchOptions = BatchOptions(),
        steps_per_epoch: int | None = None,
        insecure_seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        here = rank_and_size()
        rank = here[0] if rank is None else rank
        world_size = here[1] if world_size is None else world_size
        if not 0 <= rank < world_size:
            raise PrivacyError(f"rank={rank} is not one of world_size={world_size} processes")
        micro_batch_size, pad, sizes = batches.micro_batch_size, bool(batches.pad), batches.sizes
        if sizes is not None and not 1 <= sizes <= MOST_SIZES:
            raise PrivacyError(f"sizes={sizes} must be from 1 to {MOST_SIZES}")
        if sizes is not None and batches.pad is False:
            raise PrivacyError("sizes are those of padded batches: leave sizes out, or pad=False")
        if micro_batch_size is not None and micro_batch_size < 1:
            raise PrivacyError(f"micro_batch_size={micro_batch_size} must be at least 1")
        reader = data if isinstance(data, DataLoader) else DataLoader(_USUAL)
        ordered = isinstance(sampling, FixedOrder)
        stream = is_stream(data) if ordered else False
        if data is reader and not stream:
            batch_size = check_wrappable(data)  # whatever the sampling: some loaders are refused
            if ordered:
                check_keeps_its_order(data)
            size = len(data.dataset) if unit is None else unit.number  # type: ignore[arg-type]
            sampling = sampling or default_sampling(size, batch_size)
            data = data.dataset
        if sampling is None:
            raise PrivacyError(
                f"without sampling=, expected a torch DataLoader, got {type(data).__name__}: its "
                "batch size says how many examples a sample has on average. Give sampling=."
            )
        self._sampler = IndexSampler(
            sampling=padded_sampling(sampling) if pad else sampling, insecure_seed=insecure_seed
        )
        self.unit = unit
        """Who is sampled, if not examples."""
        self._views = Views(augment=batches.augment, views=batches.views)
        self.buckets = batches.buckets
        self.input_shape = batches.input_shape
        """The shape of an example, if it was given."""
        self._rank, self._world_size = rank, world_size
        self._micro_batch_size = micro_batch_size
        self.padding: Padding | None = None
        """The sizes of padded batches, in examples or users; None if batches are not padded."""
        if pad:
            # As many batches as needed, and no more rows in each than that number needs.
            count = self._count_micro_batches(largest_sample(self.sampling))
            self.padding = padding_of(
                self.sampling, sizes=sizes, processes=world_size, batches=count
            )
            self._micro_batch_size = self.padding.largest
        self.dataset = data.dataset if stream and data is reader else data
        self.steps_per_epoch = (
            steps_of_one_pass(self.sampling) if steps_per_epoch is None else steps_per_epoch
        )
        if self.steps_per_epoch < 1:
            raise PrivacyError(f"steps_per_epoch={steps_per_epoch} must be at least 1")
        self.current: StepSample | None = None
        """The batch handed out last; None before the first."""
        self.origin = object()
        """Stands for this loader in the samples that it draws."""
        self._session: weakref.ref[object] | None = None
        self._over: str | None = None
        self._iteration = 0
        self._state_is_shared = world_size == 1 or insecure_seed is not None

        if isinstance(sampling, FixedOrder) and stream:
            if pad:
                raise PrivacyError("batches of a stream are not padded: give it drop_last=True")
            self._source: BatchSource = StreamSource(data, sampling)
            self._check_augmentation(batches)
            return
        read = partial(
            DataLoader,
            num_workers=reader.num_workers,
            worker_init_fn=reader.worker_init_fn,
            persistent_workers=reader.persistent_workers,
            prefetch_factor=reader.prefetch_factor,
            timeout=reader.timeout,
            multiprocessing_context=reader.multiprocessing_context,
            generator=reader.generator,
        )
        self._source = make_source(
            data,
            collate_fn=reader.collate_fn,
            sizes=self._room,
            pin_memory=reader.pin_memory,
            read=read,
        )
        self._check_size()
        check_distinct(data)
        self._check_augmentation(batches)

    def _check_augmentation(self, batches: BatchOptions) -> None:
        if batches.augment is not None:
            self._views.check(self._source.first())
        if self.buckets is not None:
            self.buckets.check(
                self._source, padded=self.padding is not None, users=self.unit is not None,
                processes=self._world_size,
            )  # fmt: skip

    @property
    def sampling(self) -> Sampling:
        """How examples are really drawn, any cut included: what the accountant must be told."""
        return self._sampler.sampling

    def first_batch(self) -> Any:
        """Return the batch of the first example, to see what batches look like."""
        return self._source.first()

    @property
    def insecure(self) -> bool:
        """Whether somebody chose the seed: then nothing is private."""
        return self._sampler.insecure

    @property
    def next_step(self) -> int:
        """The number that the next step will have."""
        return self._sampler.step

    def seed_for_model(self, sample: StepSample, number: int) -> int:
        """Return a secret seed for what a model draws in its pass of this number on a batch."""
        part = f"model/{self._rank}/{sample.micro_batch}/{number}"
        return self._sampler.seed_for(part, step=sample.step)

    @property
    def repeats_rows(self) -> bool:
        """Whether an example is the same row whenever it is handed out: tensors, not augmented."""
        own = self._views.augments or self.views > 1
        return isinstance(self._source, ColumnSource) and not own

    @property
    def rows(self) -> int | None:
        """The rows of the largest batch if batches are padded, else None."""
        return None if self._room is None else self._room[-1] * self.views

    @property
    def notes(self) -> tuple[str, ...]:
        """What a privacy report should say of the batches."""
        if self.padding is None:
            return ()
        note = f"Batches are {self.padding.describe(self.unit is None)}."
        if len(self.padding.sizes) > 1:
            note += (
                " Which size a batch has follows from how many examples were drawn, which is "
                "private: that it may be guessed by timing the steps is not covered. "
                "BatchOptions(sizes=1) makes them all alike."
            )
        return (note,)

    @property
    def _room(self) -> tuple[int, ...] | None:
        """How many examples there may be room for in a padded batch."""
        if self.padding is None:
            return None
        return self.padding.sizes if self.unit is None else self.unit.rooms(self.padding)

    @property
    def views(self) -> int:
        """How many rows every example has in its batch."""
        return self._views.count

    def __len__(self) -> int:
        """Return the number of batches in an iteration; `TypeError` if that depends on the draw."""
        if self.buckets is not None:
            raise TypeError("the number of batches depends on the draw: use steps_per_epoch")
        if self._micro_batch_size is None:
            return self.steps_per_epoch
        drawn = isinstance(self.sampling, PoissonSampling | CyclicPoissonSampling)
        if drawn and self.padding is None:
            raise TypeError(
                "Poisson samples vary in size, and so does the number of their micro-batches: "
                "use steps_per_epoch, or pad=True for a constant number"
            )
        return self.steps_per_epoch * self._count_micro_batches(largest_sample(self.sampling))

    def __iter__(self) -> Iterator[Any]:
        self._iteration += 1
        return self._iterate(self._iteration)

    def _iterate(self, iteration: int) -> Iterator[Any]:
        if not self._state_is_shared:
            raise PrivacyError(
                "each process would draw a sample of its own: load the state_dict of one into all "
                "(itself included) before iterating"
            )
        self._check_newest(iteration)
        end = self._sampler.step + self.steps_per_epoch
        while self._sampler.step < end:
            origin, steps = self.origin, range(self._sampler.step, end)
            for sample, batch in self._source.batches(self._draw(steps)):
                self._sampler.advance(sample.step + 1)
                self.current = sample
                if self.buckets is not None and sample.length is not None:
                    batch = self.buckets.cut(batch, sample.length)
                if self._views.augments:
                    part = f"augmentation/{self._rank}/{sample.micro_batch}"
                    seed = self._sampler.seed_for(part, step=sample.step)
                    batch = self._views.of(batch, seed=seed)
                tag(batch, sample)
                yield batch
                self._check_newest(iteration)
                if self.origin is not origin:  # what was read ahead is not to be used
                    break

    def _draw(self, steps: range) -> Iterator[StepSample]:
        for step in steps:
            self._check_size()
            drawn = self._sampler.draw(step=step)
            # With padding the number of batches is constant too; without, it is that of the
            # largest part, so that all processes run the same number of backward passes.
            largest = largest_sample(self.sampling) if self.padding else len(drawn)
            own = shard(drawn, rank=self._rank, world_size=self._world_size)
            frame = StepSample(
                step=step,
                indices=own,
                size=len(own),
                rows=0,
                weights=None,
                micro_batch=0,
                micro_batches=self._count_micro_batches(largest),
                views=self.views,
                origin=self.origin,
            )
            cut: dict[str, Any] = {
                "micro_batch_size": self._micro_batch_size,
                "padding": self.padding,
                "device": self._source.device,
            }
            if self.buckets is not None:
                samples = self.buckets.split(frame, micro_batch_size=self._micro_batch_size)
            elif self.unit is None:
                samples = split_step(frame, **cut)
            else:
                source = partial(self._sampler.words_for, step=step)
                samples = self.unit.samples(frame, source=source, **cut)
            empty = empty_row(self.sampling.dataset_size)
            yield from (without_record(each, empty, self._source.device) for each in samples)

    def _count_micro_batches(self, sample_size: int) -> int:
        largest_part = math.ceil(sample_size / self._world_size)
        return count_micro_batches(size=largest_part, micro_batch_size=self._micro_batch_size)

    def _check_newest(self, iteration: int) -> None:
        if self._over is not None:
            raise refusals.session_over("the loader", self._over)
        if iteration != self._iteration:
            raise PrivacyError(
                "this iteration was superseded by a newer one over the same loader, or by loading "
                "a state; going on would hand out samples twice. Use one iteration at a time."
            )

    def _check_size(self) -> None:
        size, unit = len(self._source), self.unit
        if unit is not None:
            if len(unit) != size:
                raise PrivacyError(
                    f"there are ids of users for {len(unit)} records, but the data set has {size}: "
                    "give one for each record, in the order of the data"
                )
            size = unit.number
        if size != self.sampling.dataset_size:
            raise PrivacyError(
                f"the data set has {size} {'examples' if unit is None else 'users'} but the "
                f"sampling describes {self.sampling.dataset_size}; the rate and the accounting "
                "rest on that number. Build the loader anew for a data set that changed."
            )

    # --- the session that the loader belongs to --------------------------------------------------

    def check_free(self) -> None:
        """Refuse to be given to a second session: a sample is released once."""
        if self._session is not None and self._session() is not None:
            raise refusals.loader_taken()

    def begin(
        self, session: object, *, key: int, repeated: Mapping[str, Any] | None, until: int
    ) -> None:
        """Belong to a session from here on, and draw its samples: see `IndexSampler.begin`."""
        with _claiming:
            self.check_free()
            self._session, self._over = weakref.ref(session), None
        self._sampler.begin(key=key, repeated=repeated, until=until)
        self.origin = object()  # what was drawn before belongs to nobody
        self._supersede(shared=True)

    def repeat_no_more(self) -> None:
        """Go on with fresh samples, in the middle of an iteration too."""
        self._sampler.repeat_no_more()
        self.origin, self.current = object(), None

    def end(self, reason: str) -> None:
        """End the loader with its session: it yields no further batch."""
        self._over = reason

    def let_go(self, session: object) -> None:
        """Detach the loader from its session."""
        if self._session is not None and self._session() is session:
            self._session = self._over = None

    @property
    def place(self) -> tuple[int, int]:
        """Which process's part of the samples this is, of how many."""
        return self._rank, self._world_size

    def state_dict(self) -> dict[str, Any]:
        """Return what continues the schedule after the step handed out last. Keep it secret."""
        return self._sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the schedule where `state` was saved; a running iteration is superseded.

        Refuses to go back to before steps that this loader has handed out itself. A session that
        is given this loader draws samples of its own.
        """
        if self._sampler.comes_after(state):
            raise PrivacyError(
                f"this state goes back to step {state['step']}, but step {self.next_step - 1} was "
                "handed out: the same samples under other noise are not what is accounted for."
            )
        self.check_free()
        self._sampler.load_state_dict(state)
        self._supersede(shared=True)

    def _supersede(self, *, shared: bool) -> None:
        self._iteration += 1
        self.current = None
        self._state_is_shared = shared
