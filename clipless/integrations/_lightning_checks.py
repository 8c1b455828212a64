"""What a Lightning trainer and its module may not do in private training, each with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader

from clipless.errors import PrivacyError
from clipless.integrations._lightning_processes import PrivateStrategy
from clipless.losses import Loss
from clipless.privacy import check_wrappable


def check_trainer(trainer: Any, module: Any, *, resumed: bool) -> None:
    """Refuse a trainer whose settings void the guarantee, or do something else than they say."""
    for reason in _objections(trainer, module, resumed):
        raise PrivacyError(reason)


def _objections(trainer: Any, module: Any, resumed: bool) -> Iterator[str]:
    if not module.automatic_optimization:
        yield (
            "the module has automatic_optimization=False and steps by itself. Private training "
            "takes one step for each sample: use automatic optimization, or write the loop with "
            "PrivacyEngine (or clipless.integrations.prepare_private and Fabric)."
        )
    if len(trainer.optimizers) != 1:
        yield (
            f"configure_optimizers returned {len(trainer.optimizers)} optimizers. All gradients "
            "of a step are one release, with one optimizer: put the parameters into groups of one."
        )
    if trainer.gradient_clip_val:
        yield (
            f"gradient_clip_val={trainer.gradient_clip_val} would clip the gradient of the whole "
            "batch before it has its noise, which bounds no example's part of it. Leave it out: "
            "each example's gradient is bounded already (clipless.nn.ClipGradient and "
            "clipless.clip_products lower the bounds)."
        )
    if trainer.precision not in ("32-true", "64-true"):
        yield (
            f"precision={trainer.precision!r} rounds in a way that the sensitivities do not cover. "
            "Leave it out, and give the callback options=PrivacyOptions(precision='bfloat16')."
        )
    if not isinstance(trainer.strategy, SingleDeviceStrategy | PrivateStrategy):
        yield (
            f"{type(trainer.strategy).__name__} averages gradients over processes before they "
            "have their noise. For several processes give "
            "strategy=clipless.integrations.PrivateStrategy()."
        )
    for other in trainer.callbacks:
        if isinstance(other, GradientAccumulationScheduler):
            yield (
                "GradientAccumulationScheduler changes the size of a step while training. Use "
                "accumulate_grad_batches, which is constant."
            )
    if trainer.overfit_batches or trainer.reload_dataloaders_every_n_epochs:
        yield (
            "overfit_batches and reload_dataloaders_every_n_epochs change the data that samples "
            "are drawn from. Train on one data set, whose size the accounting rests on."
        )
    if trainer.accumulate_grad_batches > 1 and trainer.limit_train_batches != 1.0:
        yield (
            "limit_train_batches may end an epoch in the middle of a step of several "
            "micro-batches. Use max_steps."
        )
    if trainer.ckpt_path is not None and not resumed:
        yield (
            f"{trainer.ckpt_path} holds no state of a private run: what its weights have cost is "
            "unknown. Resume with a checkpoint of this callback; to begin with public weights, "
            "load them into the module before fit."
        )


def training_loader(trainer: Any) -> DataLoader[Any]:
    """Return the one training data loader, or refuse what samples in a way of its own."""
    loader = trainer.fit_loop._data_source.dataloader()
    if not isinstance(loader, DataLoader):
        raise PrivacyError(
            f"the training data are a {type(loader).__name__}. Examples are sampled from one data "
            "set: give one torch DataLoader, which says what it is and how large batches are."
        )
    check_wrappable(loader)
    return loader


def check_started(trainer: Any, batches: Any) -> None:
    """Refuse to train on anything but the private loader's batches."""
    if trainer.train_dataloader is not batches:
        raise PrivacyError(
            "the trainer does not read the private loader but another one, whose batches are not "
            "what the accounting is told. Another callback or plugin has replaced it: leave it out."
        )


def private_parts(module: nn.Module, model: Any, criterion: Any) -> tuple[nn.Module, Loss]:
    """Return the part of a Lightning module that is trained privately, and its criterion."""
    if isinstance(criterion, str):
        criterion = module.get_submodule(criterion)
    if criterion is None:
        losses = [each for each in module.modules() if isinstance(each, Loss)]
        if len(losses) != 1:
            raise PrivacyError(
                f"{type(module).__name__} holds {len(losses)} losses of clipless.losses, and needs "
                "one, which its training_step calls with the model's output and the targets: "
                "self.criterion = clipless.losses.CrossEntropy(). Of several, name the one that "
                "is trained with: CliplessCallback(criterion='...')."
            )
        (criterion,) = losses
    if isinstance(model, str):
        model = module.get_submodule(model)
    return (_trained_part(module) if model is None else model), criterion


def _trained_part(module: nn.Module) -> nn.Module:
    """Return the one part that holds all trainable parameters, if it can be called by itself."""
    trained = {id(p) for p in module.parameters() if p.requires_grad}
    for part in module.children():
        own = {id(p) for p in part.parameters() if p.requires_grad}
        if own == trained and not isinstance(part, nn.ModuleList | nn.ModuleDict):
            return part
    return module
