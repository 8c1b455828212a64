"""Checks that a private run makes of the user's objects, before and while it runs."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from clipless.bounds import SensitivityReport, hooks_of
from clipless.errors import PrivacyError
from clipless.kernels import prepare_integer_sums
from clipless.losses import Loss
from clipless.privacy._plan import Plan
from clipless.privacy._precision import Precision, sums_examples
from clipless.privacy.sampling._batches import StepSample, row_weights


def check_criterion(criterion: Any) -> None:
    """Refuse anything but a per-example loss of this library, untouched."""
    if not isinstance(criterion, Loss):
        raise PrivacyError(
            f"{type(criterion).__name__} is not a per-example loss with a known constant. Use "
            "one of clipless.losses (CrossEntropy, BinaryCrossEntropy, ...), or wrap a "
            "function of one example in clipless.losses.PerExample."
        )
    if not type(criterion).__module__.startswith("clipless.losses."):
        raise PrivacyError(
            f"{type(criterion).__name__} is a loss class of its own, and nothing shows that it "
            "keeps examples apart. Write it as a function of one example and wrap it in "
            "clipless.losses.PerExample."
        )
    replaced = {"forward", "per_example", "lipschitz", "lipschitz_for"} & set(vars(criterion))
    if replaced or next(hooks_of(criterion), None) is not None:
        raise PrivacyError(
            "the criterion carries a hook or a replaced method, which could mix examples unseen. "
            "Use it as it is, or write a clipless.losses.PerExample."
        )


def check_criterion_call(criterion: Any, arguments: tuple[Any, ...]) -> None:
    """The criterion is called as it must be, and reduces nothing by itself."""
    if len(arguments) != 2:
        raise PrivacyError("call the private criterion as criterion(output, target)")
    if criterion.reduction != "none":
        raise PrivacyError(
            "the criterion's reduction was changed. In private training it sums over examples "
            "and divides by the public batch size: leave it alone."
        )


@functools.cache  # what is refused is asked again
def refuse_closures(optimizer: type[torch.optim.Optimizer]) -> None:
    """Refuse optimizers that depend on a closure."""
    taken = inspect.signature(optimizer.step).parameters.get("closure")
    if taken is not None and taken.default is inspect.Parameter.empty:
        raise PrivacyError(
            f"{optimizer.__name__} needs a closure, which it may evaluate any number of "
            "times in one step, and decides by losses that have no noise. Use an optimizer that "
            "steps on the gradients it finds."
        )


def check_optimizer(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> None:
    """The optimizer holds the model's trainable parameters, all of them and no others."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if held - {id(p) for p in parameters.values()}:
        raise PrivacyError(
            "the optimizer holds parameters that are not the model's. Their gradients have no "
            "bound: give them an optimizer of their own. (If layers were replaced, make the "
            "optimizer anew.)"
        )
    lacking = [name for name, p in parameters.items() if p.requires_grad and id(p) not in held]
    if lacking:
        raise PrivacyError(
            f"the optimizer lacks trainable parameters of the model: {', '.join(lacking)}. "
            "Add them, or freeze them with requires_grad_(False) before make_private."
        )


def weights_on(sample: StepSample, device: torch.device) -> Tensor | None:
    """The weights of a padded batch's rows, made where they are needed: a copy would wait."""
    if sample.weights is None or sample.weights.device == device:
        return sample.weights
    return row_weights(
        rows=sample.rows, real=sample.views * len(sample.indices), device=device
    )  # fmt: skip


def check_scaler(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Refuse optimizers that would divide noise by the scale of the loss."""
    if scaler is None or not scaler.is_enabled():
        return
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        raise PrivacyError(
            "a fused optimizer undoes the scale of a gradient scaler itself, and would divide the "
            "noise by it. Use the optimizer with fused=False, or no scaler (bfloat16 needs none)."
        )


def check_inputs(inputs: tuple[Any, ...], shapes: tuple[tuple[int, ...], ...]) -> None:
    """Examples must have the shape that the bounds were proved for, and nothing behind them."""
    found = tuple(tuple(x.shape[1:]) for x in inputs if isinstance(x, Tensor))
    if not found:
        raise PrivacyError("call the private model with its inputs by position: model(x)")
    if found != shapes:
        raise PrivacyError(
            f"the model was called on examples of shape {_words(found)}, but its bounds were "
            f"proved for {_words(shapes)}. Bring all examples to one shape, and pass it as "
            "BatchOptions(input_shape=...) if it is not that of the data set's examples."
        )
    if any(isinstance(x, Tensor) and x.grad_fn is not None for x in inputs):
        raise PrivacyError(
            "the model's input was computed by something that can be trained. Gradients end at "
            "the model: make what comes before it a part of the model, or compute the input under "
            "torch.no_grad()."
        )


def _words(shapes: tuple[tuple[int, ...], ...]) -> str:
    return ", ".join(map(str, shapes))


_EMULATION = (
    "CUBLAS_EMULATE_SINGLE_PRECISION",
    "CUBLAS_EMULATE_DOUBLE_PRECISION",
    "CUBLAS_EMULATION_STRATEGY",
)
"""By which cuBLAS computes in bfloat16 or int8 what was asked for in floats, since release 12.9."""


def check_precision(inputs: Sequence[Any], precision: Precision = "float32") -> None:
    """Refuse roundings that are coarser than those the plan's slack covers."""
    device = next((x.device.type for x in inputs if isinstance(x, Tensor)), "cpu")
    if torch.is_autocast_enabled(device) and not (
        precision == "bfloat16" and torch.get_autocast_dtype(device) == torch.bfloat16
    ):
        raise PrivacyError(
            "autocast is on. Rounding in reduced precision can add more to a gradient than the "
            "slack in the sensitivities covers: train in float32, or pass precision='bfloat16' to "
            "make_private, which casts by itself and has a slack for it."
        )
    if precision == "float32" and uses_tf32(device):
        raise PrivacyError(
            "TF32 is on, torch's default for convolutions on a GPU. Its rounding can add more to a "
            "gradient than the slack in the sensitivities covers: pass precision='tf32' to "
            "make_private, which has a slack for it, or set "
            "torch.backends.cudnn.allow_tf32 = False and "
            "torch.backends.cuda.matmul.allow_tf32 = False."
        )
    if precision != "bfloat16" and device == "cpu" and "bf16" in _cpu_formats():
        raise PrivacyError(
            "products of float32 numbers may be computed in bfloat16 here "
            "(torch.set_float32_matmul_precision('medium'), or torch.backends.mkldnn). Set it to "
            "'highest', or pass precision='bfloat16' to make_private."
        )
    check_environment(precision)
    matmul = torch.backends.cuda.matmul
    if (
        precision == "bfloat16"
        and device == "cuda"
        and matmul.allow_bf16_reduced_precision_reduction
    ):
        raise PrivacyError(
            "sums of bfloat16 products may be rounded on the way, torch's default. Set "
            "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False."
        )


def check_sums(trainable: Sequence[Tensor], plan: Plan, report: SensitivityReport) -> None:
    """Refuse a model that was moved to a device where its sums round by more than planned."""
    device = trainable[0].device.type
    if device == "cpu" or plan.sums.uncovered > 0 or trainable[0].dtype == torch.float64:
        return
    if not report.nodes and sums_examples(report):  # of which each is formed, on every device
        return
    if any(each.ndim > 2 for each in trainable) and prepare_integer_sums(device) is None:
        raise PrivacyError(
            f"the model was moved to {device} after its plan was made. Convolutions are summed in "
            "float32 there, since Triton is missing or does not work, and the plan does not say "
            "what that leaves uncovered: move the model first, then call make_private."
        )


def check_environment(precision: Precision) -> None:
    """Refuse environment variables that change arithmetic behind torch's back."""
    for name in ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"):
        mode = os.environ.get(name, "").upper()
        if mode not in ("", "STRICT"):
            raise PrivacyError(
                f"the environment has {name}={mode}, which lets the CPU round products, those of "
                "weight gradients too, whatever torch's settings say: no slack covers it. "
                "Unset it, or set it to STRICT, before Python starts."
            )
    for name in _EMULATION:
        if os.environ.get(name, "0").upper() not in ("0", "", "DEFAULT"):
            raise PrivacyError(
                f"the environment has {name} set, which lets cuBLAS compute products of floats "
                "from shorter numbers, whatever torch's settings say: no slack covers it. Unset it "
                "before Python starts."
            )
    if precision == "float32" and os.environ.get("NVIDIA_TF32_OVERRIDE", "0") != "0":
        raise PrivacyError(
            "the environment has NVIDIA_TF32_OVERRIDE set, which turns TF32 on whatever torch's "
            "own settings say. Unset it before Python starts, or pass precision='tf32' in "
            "PrivacyOptions, which has a slack for it."
        )


def uses_tf32(device: str = "cuda") -> bool:
    """Whether convolutions or matrix products may round their inputs to TF32."""
    if device != "cuda":
        return device == "cpu" and "tf32" in _cpu_formats()
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    convolution = getattr(cudnn, "conv", None)  # since torch 2.9; the old name may then raise
    if convolution is not None:
        return "tf32" in (convolution.fp32_precision, matmul.fp32_precision)
    return bool(cudnn.allow_tf32 or matmul.allow_tf32)


def _cpu_formats() -> tuple[str, ...]:
    """The formats that products of float32 numbers may be computed in on the CPU."""
    parts = (getattr(torch.backends.mkldnn, name, None) for name in ("matmul", "conv"))
    return tuple(str(part.fp32_precision) for part in parts if part is not None)


def check_dtypes(trainable: Sequence[Tensor]) -> None:
    """Refuse parameters of a precision that the plan's slack does not cover."""
    dtypes = {p.dtype for p in trainable}
    if dtypes - {torch.float32, torch.float64} or len(dtypes) > 1:
        raise PrivacyError(
            f"parameters were converted to {', '.join(map(str, dtypes))}. The slack in "
            "the sensitivities covers float32: convert them back, and call make_private."
        )
