"""Features from a frozen backbone: computed once, one example at a time in effect."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from clipless.errors import PrivacyError

# The same example at the same place of a batch of the same size: the same kernels, up to rounding.
_SAME_BATCH_TOLERANCE = 1e-5
# Another batch size: torch may choose other kernels, and TF32 or half precision may round coarsely.
_OTHER_BATCH_TOLERANCE = 1e-2


def extract_features(backbone: nn.Module, inputs: Tensor, *, batch_size: int = 256) -> Tensor:
    """Return the features of all examples, (N, *shape) -> (N, F), to train a private head on.

    The backbone may be any module in evaluation mode that returns one tensor with one row an
    example; it is not trained, and nothing flows back to it. **It must not have been trained, or
    chosen, with the private data:** its weights are released along with the head, and no guarantee
    of this library covers them.

    The guarantee for the head holds if an example's features depend on that example alone. That is
    checked on the first batch: neither the other examples nor the size of the batch may change
    them, and the backbone must keep no state. Batch normalisation in evaluation mode passes, in
    training mode it is refused. The check is an experiment, not a proof.

    Args:
        backbone: on its device; examples are moved there and features back.
        inputs: (N, *shape), with N >= 1.
        batch_size: how many examples are computed at a time.

    Raises:
        PrivacyError: the features of one example depend on others, or could.

    Example:
        >>> from clipless import models
        >>> backbone = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU()).eval()
        >>> features = models.extract_features(backbone, torch.rand(100, 8))
        >>> head = models.build("head", features=features.shape[1], classes=3)
        >>> head(features).shape
        torch.Size([100, 3])
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if inputs.ndim < 1 or len(inputs) == 0:
        raise ValueError(f"inputs must be (N, ...) with N >= 1, got {tuple(inputs.shape)}")
    _refuse_training_mode(backbone)
    state = _state(backbone)
    _check_examples_stay_apart(backbone, inputs[: max(2, min(batch_size, 8))])
    parts = [_features(backbone, batch) for batch in inputs.split(batch_size)]
    if not _unchanged(state, _state(backbone)):
        raise PrivacyError(
            "the backbone changed its parameters or buffers while it computed features: what it "
            "keeps of one example can reach the features of the next. Use one without such state."
        )
    return torch.cat(parts)


@torch.no_grad()
def _features(backbone: nn.Module, batch: Tensor) -> Tensor:
    """(batch, ...) -> (batch, F)."""
    output = backbone(batch.to(_device(backbone, batch.device)))
    if not isinstance(output, Tensor) or output.ndim < 1 or len(output) != len(batch):
        found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(
            f"the backbone must return one tensor with a row for each of {len(batch)} "
            f"examples, got {found}. Wrap it in a module that returns the features."
        )
    return output.reshape(len(batch), -1).to(batch.device)


def _refuse_training_mode(backbone: nn.Module) -> None:
    for path, module in backbone.named_modules():
        if module.training:
            place = f"{path!r} " if path else ""
            raise PrivacyError(
                f"{place}({type(module).__name__}) of the backbone is in training mode, in which "
                "examples can depend on their batch (BatchNorm) or on chance (dropout). Call "
                "backbone.eval() first."
            )


def _check_examples_stay_apart(backbone: nn.Module, examples: Tensor) -> None:
    """Compare the features of half of a batch with those beside others, and with those alone.

    With one example to begin with, a changed copy of it stands for the others.
    """
    others = _changed(examples)
    if len(examples) == 1:
        examples = torch.cat([examples, others])
        others = torch.cat([others, examples[:1]])
    kept = (len(examples) + 1) // 2
    together = _features(backbone, examples)[:kept]
    if not _close(together, _features(backbone, examples)[:kept], _SAME_BATCH_TOLERANCE):
        raise PrivacyError(
            "the backbone gives the same examples other features when they are computed again: it "
            "draws at random or keeps state. Use one that does not."
        )
    mixed = _features(backbone, torch.cat([examples[:kept], others[kept:]]))[:kept]
    if not _close(together, mixed, _SAME_BATCH_TOLERANCE):
        raise _coupled("with the other examples of its batch")
    alone = torch.cat([_features(backbone, each[None]) for each in examples[:kept]])
    if not _close(together, alone, _OTHER_BATCH_TOLERANCE):
        raise _coupled("with the size of its batch")


def _coupled(what: str) -> PrivacyError:
    return PrivacyError(
        f"the features of an example change {what}: removing one record would change the features "
        "of others, and the guarantee would be void. Use a backbone without operations over the "
        "batch, or with batch normalisation in evaluation mode."
    )


def _changed(examples: Tensor) -> Tensor:
    """Other examples of the same kind: every entry differs, and integers stay small indices."""
    if examples.is_floating_point() or examples.is_complex():
        return 1.0 - 2.0 * torch.nan_to_num(examples)
    return (examples == 0).to(examples.dtype)


def _close(first: Tensor, second: Tensor, tolerance: float) -> bool:
    """Whether features agree up to a fraction of their own size over the examples.

    What is not finite must be so in both; features that are small beside the others may err as if
    they were a hundredth of the largest.
    """
    if not torch.equal(first.isfinite(), second.isfinite()):
        return False
    first, second = (torch.nan_to_num(each.double(), 0.0, 0.0, 0.0) for each in (first, second))
    sizes = torch.maximum(first.abs(), second.abs()).amax(dim=0)
    scale = torch.maximum(sizes, 0.01 * sizes.amax())
    return bool(((first - second).abs() <= tolerance * scale).all())


def _state(backbone: nn.Module) -> list[tuple[Tensor, int]]:
    """Parameters and buffers, and how often each was written to."""
    tensors = itertools.chain(backbone.parameters(), backbone.buffers())
    return [(tensor, tensor._version) for tensor in tensors]


def _unchanged(before: list[tuple[Tensor, int]], after: list[tuple[Tensor, int]]) -> bool:
    return len(before) == len(after) and all(
        old is new and writes == more
        for (old, writes), (new, more) in zip(before, after, strict=True)
    )


def _device(backbone: nn.Module, otherwise: torch.device) -> Any:
    tensors = itertools.chain(backbone.parameters(), backbone.buffers())
    return next((tensor.device for tensor in tensors), otherwise)
