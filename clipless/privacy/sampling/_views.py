"""Augmentation with multiplicity: an example takes part in a step by several views of itself.

The contribution of an example is the average of the gradients of its K views. Each of them is
bounded as the gradient of the example itself is, and so is their average: sensitivity, noise and
accounting are those of a run without augmentation. In the batch an example has K rows, one after
the other, and each row's loss is divided by b K instead of b.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from clipless.common import not_set_error
from clipless.errors import PrivacyError


class Augment(Protocol):
    """A random change of the model's inputs, row by row: `augment(batch, generator=...)`.

    Receives `(rows, ...)` and returns a tensor of the same shape and dtype. All randomness comes
    from `generator`, which is on the batch's device. Every row is treated alike, by draws of its
    own: no row may depend on what is in another, nor on its place or the number of rows.

    An augmentation that has a fixed set of views (an image and its mirror image) returns all of
    them, `(rows * views, ...)`, those of one row next to each other, and says how many in an
    attribute `views`.
    """

    def __call__(self, batch: Tensor, /, *, generator: torch.Generator) -> Tensor: ...


class Views:
    """Makes the rows of a batch from its examples.

    `count`: how many rows an example has. Without `views` it is what one call of `augment` gives;
    with it, rows are repeated before the call as often as it takes.

    Example:
        >>> def jitter(batch, generator):
        ...     return batch + 0.1 * torch.randn(batch.shape, generator=generator)
        >>> views = Views(augment=jitter, views=3)
        >>> x, y = views.of((torch.zeros(2, 5), torch.tensor([7, 8])), seed=0)
        >>> x.shape, y
        (torch.Size([6, 5]), tensor([7, 7, 7, 8, 8, 8]))
    """

    def __init__(self, *, augment: Augment | None, views: int | None) -> None:
        fixed = operator.index(getattr(augment, "views", 1))
        self.count = fixed if views is None else operator.index(views)
        if self.count < 1:
            raise PrivacyError(f"views={views} must be at least 1")
        if augment is None and self.count > 1:
            raise PrivacyError(
                f"views={views} without an augmentation: the views would all be the example "
                "itself, at several times the cost. Give augment=, or leave views out."
            )
        if fixed < 1 or self.count % fixed:
            raise PrivacyError(
                f"the augmentation makes {fixed} views of every row, so that views={views} "
                "cannot be had. Give a multiple, or leave views out."
            )
        self._augment = augment
        self.augments = augment is not None
        """Whether anything is done to batches at all."""
        self._repeats = self.count // max(fixed, 1)
        self._generators: dict[torch.device, torch.Generator] = {}

    def of(self, batch: Any, *, seed: int) -> Any:
        """Return the batch with all views of its examples; the same seed gives the same views.

        The first part of the batch is the model's input and is augmented; what belongs to it,
        labels for instance, is repeated.
        """
        inputs = _inputs_of(batch)
        views = self._views_of(inputs, seed)
        if isinstance(batch, Tensor):
            return views
        rest = batch[1:]
        if self.count > 1:
            rest = [_repeat(part, inputs.shape[0], self.count) for part in rest]
        parts = [views, *rest]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)

    @torch.no_grad()
    def _views_of(self, inputs: Tensor, seed: int) -> Tensor:
        if self._augment is None:
            raise not_set_error("augment")
        if inputs.shape[0] == 0:
            return inputs  # an empty sample, which an augmentation need not know about
        if self._repeats > 1:
            inputs = inputs.repeat_interleave(self._repeats, dim=0)
        generator = self._generators.get(inputs.device)
        if generator is None:
            generator = self._generators[inputs.device] = torch.Generator(device=inputs.device)
        generator.manual_seed(seed)
        views = self._augment(inputs, generator=generator)
        rows = inputs.shape[0] // self._repeats * self.count
        expected = ((rows, *inputs.shape[1:]), inputs.dtype, inputs.device)
        if not isinstance(views, Tensor):
            raise PrivacyError(f"the augmentation returned a {type(views).__name__}, not a tensor")
        if (tuple(views.shape), views.dtype, views.device) != expected:
            raise PrivacyError(
                f"the augmentation made {tuple(views.shape)} of {views.dtype} on {views.device} "
                f"from {tuple(inputs.shape)} of {inputs.dtype} on {inputs.device}. It must keep "
                "shape, dtype and device (times `views` rows, if it has that attribute)."
            )
        return views

    # --- does it keep examples apart? ------------------------------------------------------------

    def check(self, batch: Any) -> None:
        """Refuse an augmentation that mixes examples, as far as trials can tell.

        It is tried on random examples like those in `batch`: changing one may change nothing but
        its own views. Mixing that depends on the number of rows, or on the place of a row in a
        random way, cannot be noticed.
        """
        if self._augment is None:
            return
        inputs = _inputs_of(batch)
        for seed in range(_TRIALS):
            rows, changed = _trial(inputs, seed)
            views = self._views_of(rows.clone(), seed)
            if not _same(views, self._views_of(rows.clone(), seed)):
                raise PrivacyError(
                    "the augmentation gave two results for the same batch and generator: it draws "
                    "from elsewhere, so that a resumed run could not repeat its steps. Pass "
                    "`generator` to everything that is random in it."
                )
            own = torch.arange(len(views), device=views.device) // self.count == changed
            for value in (0, 1):
                other = rows.clone()
                other[changed] = value
                others = self._views_of(other, seed)
                if not _same(views[~own], others[~own]):
                    raise PrivacyError(
                        "the augmentation lets examples touch each other: when one was changed, "
                        "views of another changed as well. That voids the proof, which is for one "
                        "example at a time (mixup and statistics of a batch belong here; so do "
                        "`views` that do not lie next to each other). Treat every row by itself."
                    )
            self._check_place(rows, views, seed)

    def _check_place(self, rows: Tensor, views: Tensor, seed: int) -> None:
        """An augmentation without randomness may not look at the place of a row either."""
        generator = self._generators[rows.device]
        afterwards = generator.get_state()
        if not torch.equal(afterwards, generator.manual_seed(seed).get_state()):
            return  # it drew something
        if not _same(self._views_of(rows[1:].clone(), seed), views[self.count :]):
            raise PrivacyError(
                "the augmentation depends on the place of an example in its batch: without the "
                "first example, the views of the others changed. Treat every row alike."
            )


_TRIALS, _TRIAL_ROWS = 16, 4


def _trial(like: Tensor, seed: int) -> tuple[Tensor, int]:
    """Random rows between the smallest and the largest value that they will be changed to."""
    generator = torch.Generator(device=like.device).manual_seed(seed)
    shape = (_TRIAL_ROWS, *like.shape[1:])
    if like.is_floating_point():
        rows = torch.rand(shape, generator=generator, device=like.device, dtype=torch.float32)
        rows = 0.25 + rows / 2
    else:
        rows = torch.randint(2, shape, generator=generator, device=like.device)
    return rows.to(like.dtype), seed % _TRIAL_ROWS


def _same(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _inputs_of(batch: Any) -> Tensor:
    first = batch[0] if isinstance(batch, list | tuple) and batch else batch
    if not isinstance(first, Tensor) or first.ndim == 0:
        raise PrivacyError(
            "an augmentation needs batches whose first part is the model's input, a tensor, but "
            f"found a {type(first).__name__}. Change collate_fn, or augment in the data set."
        )
    return first


def _repeat(part: Any, rows: int, count: int) -> Any:
    """Repeat what belongs to a row for each of its views."""
    if isinstance(part, Tensor) and part.ndim and part.shape[0] == rows:
        return part.repeat_interleave(count, dim=0)
    if isinstance(part, Mapping):
        return {key: _repeat(each, rows, count) for key, each in part.items()}
    if isinstance(part, list | tuple) and not hasattr(part, "_fields"):
        return type(part)(_repeat(each, rows, count) for each in part)
    raise PrivacyError(
        f"with several views of every example, all parts of a batch must be tensors with a row for "
        f"each example, to be repeated: got a {type(part).__name__}. Change collate_fn."
    )
