"""What a Hugging Face trainer may not do in private training, each with the reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from clipless.errors import PrivacyError


def check_arguments(args: Any, further: Mapping[str, Any]) -> None:
    """Refuse arguments that void the guarantee, or do something else than they say."""
    for reason in _objections(args, further):
        raise PrivacyError(reason)


def _objections(args: Any, further: Mapping[str, Any]) -> Iterator[str]:
    if args.max_grad_norm:
        yield (
            f"max_grad_norm={args.max_grad_norm:g} (1 by default) would clip the gradient of the "
            "whole batch before it has its noise, which bounds no example's part of it. Set "
            "max_grad_norm=0: each example's gradient is bounded already."
        )
    if args.fp16 or args.bf16:
        yield (
            "fp16 and bf16 round in a way that the sensitivities do not cover. Leave them out, and "
            "give privacy={'options': PrivacyOptions(precision='bfloat16'), ...}."
        )
    if getattr(args, "gradient_checkpointing", False) or getattr(
        args, "activation_checkpointing", False
    ):
        yield (
            "gradient checkpointing runs layers a second time in the backward pass, where no use "
            "of them was planned. For less memory, use gradient_accumulation_steps."
        )
    if args.world_size > 1 or args.n_gpu > 1 or args.deepspeed or args.fsdp:
        yield (
            "the trainer would average or shard gradients that have no noise yet. Train in one "
            "process on one device, or use clipless.training.Trainer with torchrun."
        )
    if args.neftune_noise_alpha is not None:
        yield "neftune_noise_alpha changes the model's inputs by hooks, which have no bound"
    if args.torch_compile or getattr(args, "use_liger_kernel", False):
        yield (
            "torch_compile and use_liger_kernel replace the layers that bounds are enforced in. "
            "Leave them out, and give privacy={'options': PrivacyOptions(compile=True), ...}."
        )
    if args.auto_find_batch_size:
        yield (
            "auto_find_batch_size begins anew with other batches when memory is short. Use "
            "gradient_accumulation_steps, with which batches are cut into parts of constant size."
        )
    if args.label_smoothing_factor or further.get("compute_loss_func") is not None:
        yield (
            "label_smoothing_factor and compute_loss_func replace the loss, whose gradient is "
            "bounded for each example: put what you need into criterion= (a loss of "
            "clipless.losses, or PerExample)."
        )
    strategy = str(getattr(args, "train_sampling_strategy", "random"))
    if getattr(args, "group_by_length", False) or "random" not in strategy:
        yield (
            "examples would be sampled by their length or in order. Amplification holds for "
            "samples that are drawn by chance alone: leave the sampling strategy as it is."
        )
    hub = str(getattr(args.hub_strategy, "value", args.hub_strategy))
    if args.push_to_hub and "checkpoint" in hub:
        yield (
            f"hub_strategy={hub!r} would publish checkpoints, which hold the "
            "state of the noise. Use 'end' or 'every_save'."
        )


def check_collator(collator: Any) -> None:
    """Refuse collators that bring the examples of a batch to the length of its longest one."""
    padding = getattr(collator, "padding", None)
    if padding not in (None, False, "max_length"):
        raise PrivacyError(
            f"{type(collator).__name__} pads examples to the longest of their batch, which tells "
            "each of them how long the others are. Pad all to one length when they are tokenized, "
            "and give data_collator=transformers.default_data_collator (or padding='max_length')."
        )


def check_model(model: nn.Module, *, enforced: bool) -> None:
    """Refuse models of which no bound can be proved, or that recompute layers going backward."""
    if not enforced and any(isinstance(part, PreTrainedModel) for part in model.modules()):
        raise PrivacyError(
            f"no bound can be proved for {type(model).__name__}, which is no Lipschitz network: "
            "give privacy={'bounds': 'enforced', ...}, which bounds every layer's gradient for "
            "each example in the backward pass."
        )
    if getattr(model, "is_gradient_checkpointing", False):
        raise PrivacyError(
            "the model has gradient checkpointing on, which runs layers a second time in the "
            "backward pass: call model.gradient_checkpointing_disable()"
        )
