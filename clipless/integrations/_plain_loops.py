"""`prepare_private`: private training in loops with `lightning.Fabric` or `accelerate`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from clipless.errors import PrivacyError
from clipless.losses import Loss
from clipless.privacy import PrivacyEngine, PrivateLoader


def prepare_private(
    helper: Any,
    *,
    engine: PrivacyEngine,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    data_loader: DataLoader[Any],
    criterion: Loss,
    **arguments: Any,
) -> tuple[Any, Any, PlacedLoader]:
    """Return model, optimizer and batches, prepared by Fabric or an Accelerator, and private.

    It takes the place of `fabric.setup` and `fabric.setup_dataloaders`, or of
    `accelerator.prepare`. The loop stays as it is: `fabric.backward(loss)`,
    `accelerator.backward(loss)` and the steps are those of ordinary training. Where a step's
    sample is handed out in micro-batches, step when `loader.current.is_last`.

    Args:
        helper: a `lightning.Fabric` or an `accelerate.Accelerator`, in full precision, with one
            process.
        engine: counts the run and adds the noise.
        module, optimizer, data_loader, criterion: as for `PrivacyEngine.make_private`.
        arguments: those of `make_private`, or of `make_private_with_epsilon` (without
            `noise_multiplier`).

    Example:
        >>> fabric = lightning.Fabric()  # doctest: +SKIP
        >>> model, optimizer, loader = prepare_private(  # doctest: +SKIP
        ...     fabric, engine=engine, module=model, optimizer=optimizer, data_loader=loader,
        ...     criterion=criterion, target_epsilon=3.0, epochs=5)
    """
    fabric = hasattr(helper, "setup_dataloaders")
    for reason in _objections_to_fabric(helper) if fabric else _objections_to_accelerator(helper):
        raise PrivacyError(reason)
    prepared = helper.setup if fabric else helper.prepare
    wrapped, stepper = prepared(module, optimizer)
    given = {
        "module": module, "optimizer": optimizer, "data_loader": data_loader,
        "criterion": criterion, **arguments,
    }  # fmt: skip
    make = engine.make_private if "noise_multiplier" in given else engine.make_private_with_epsilon
    return wrapped, stepper, PlacedLoader(make(**given)[2], helper.device)


def _objections_to_fabric(fabric: Any) -> Iterator[str]:
    precision = str(getattr(fabric._precision, "precision", "32-true"))
    if precision not in ("32-true", "64-true"):
        yield _PRECISION.format(f"Fabric(precision={precision!r})")
    if fabric.world_size > 1:
        yield _PROCESSES.format("Fabric")


def _objections_to_accelerator(accelerator: Any) -> Iterator[str]:
    if not hasattr(accelerator, "gradient_accumulation_steps"):
        yield (
            f"expected a lightning.Fabric or an accelerate.Accelerator, got a "
            f"{type(accelerator).__name__}"
        )
    elif accelerator.gradient_accumulation_steps != 1:
        yield (
            f"gradient_accumulation_steps={accelerator.gradient_accumulation_steps} would divide "
            "the loss and leave steps out. A step is one sample, in as many micro-batches as it "
            "takes: give the loader the batch size of a whole step and "
            "options=PrivacyOptions(batches=BatchOptions(micro_batch_size=...)), and step when "
            "loader.current.is_last."
        )
    elif str(accelerator.mixed_precision) != "no":
        yield _PRECISION.format(f"Accelerator(mixed_precision={accelerator.mixed_precision!r})")
    elif accelerator.num_processes > 1:
        yield _PROCESSES.format("Accelerator")


_PRECISION = (
    "{} rounds in a way that the sensitivities do not cover. Leave it out, and give "
    "options=PrivacyOptions(precision='bfloat16')."
)
_PROCESSES = (
    "{} has several processes and would average gradients that have no noise yet. Write the loop "
    "with PrivacyEngine and torchrun, which brings the processes together itself."
)


class PlacedLoader:
    """The batches of a private loader, on a device. `current` describes the one handed out last."""

    def __init__(self, loader: PrivateLoader, device: torch.device) -> None:
        self.loader, self.device = loader, device

    def __iter__(self) -> Iterator[Any]:
        return (_placed(batch, self.device) for batch in self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def current(self) -> Any:
        """What is known of the batch handed out last: see `PrivateLoader.current`."""
        return self.loader.current


def _placed(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: _placed(each, device) for name, each in batch.items()}
    if isinstance(batch, list | tuple):
        parts = [_placed(each, device) for each in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch
