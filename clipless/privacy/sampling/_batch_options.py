"""`BatchOptions`: padding, micro-batches and augmentation of a step's sample."""

from __future__ import annotations

from dataclasses import dataclass

from clipless.bounds import Shape
from clipless.privacy.sampling._buckets import Buckets
from clipless.privacy.sampling._views import Augment


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """Options of the batches that a step's sample is handed out as.

    Args:
        micro_batch_size: hand out each step's sample in batches of at most this many examples;
            `PrivateLoader.current` tells which step a batch belongs to and which is its last.
        pad: give every batch one of a few numbers of rows, the smallest that it fits in. Rows that
            are padding are made of zeros and have weight 0 in `current.weights`; samples that do
            not fit the largest are cut to a random subset, which the accounting knows of. By
            default if training is compiled.
        sizes: how many numbers of rows padded batches may have. By default up to three, as long as
            one more saves 1% of the rows. With 1 all batches have the same size, and how long a
            step takes does not depend on the size of its sample.
        augment: a random change of the inputs, row by row: `augment(batch, generator=...)`
            returns a tensor of the same shape (see `Augment`). One that is seen to mix examples is
            refused. The first part of every batch is augmented.
        views: how many augmented views of each example a step averages over, each a row of the
            batch; they follow each other, and the other parts of the batch are repeated.
            Sensitivity, noise and epsilon do not change; memory and time do. Sizes of samples and
            micro-batches count examples.
        buckets: sequences by their lengths, which are public to within a bucket (`Buckets`): the
            batches of a step are shorter for shorter ones. For `bounds="enforced"`.
        input_shape: shape of one example, for which bounds are proved; by default that of the first
            one in the data.

    Example:
        >>> BatchOptions(micro_batch_size=256, pad=True).micro_batch_size
        256
    """

    micro_batch_size: int | None = None
    pad: bool | None = None
    sizes: int | None = None
    augment: Augment | None = None
    views: int | None = None
    buckets: Buckets | None = None
    input_shape: Shape | None = None
