"""Errors for models without a proof. Each names the place and says what to do."""

from __future__ import annotations

import operator
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.nn.modules import module as torch_module

from clipless.bounds._rule import registered_types
from clipless.errors import UnsupportedOperationError

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))

_REASONS: dict[type[nn.Module], str] = {
    nn.modules.instancenorm._InstanceNorm: (
        "dividing by a standard deviation has no Lipschitz constant. Use "
        "clipless.nn.LayerCentering or clipless.nn.BallProjection, or keep the network as it is "
        "with bounds='enforced'."
    ),
    nn.modules.batchnorm._NormBase: (
        "normalisation over the batch mixes examples: removing one changes the gradients of all "
        "others, so no per-example bound exists. Use clipless.nn.LayerCentering."
    ),
    nn.LayerNorm: (
        "dividing by a standard deviation has no Lipschitz constant. Use "
        "clipless.nn.LayerCentering or clipless.nn.BallProjection, or keep the network as it is "
        "with bounds='enforced'."
    ),
    nn.GroupNorm: (
        "dividing by a standard deviation has no Lipschitz constant. Use "
        "clipless.nn.LayerCentering or clipless.nn.BallProjection, or keep the network as it is "
        "with bounds='enforced'."
    ),
    nn.Linear: "its weight is not constrained. Use clipless.nn.SpectralLinear.",
    nn.Conv1d: "its kernel is not constrained. Use clipless.nn.SpectralConv1d.",
    nn.Conv2d: "its kernel is not constrained. Use clipless.nn.SpectralConv2d.",
    nn.Embedding: "its rows are not constrained. Use clipless.nn.Embedding.",
}


def place_of(node: fx.Node) -> str:
    """Name a node for a reader: the module's path, or the function and the line that calls it."""
    if node.op == "call_module":
        return str(node.target)
    name = function_name(node.target)
    stack = node.meta.get("nn_module_stack")
    owner = next(reversed(stack)) if stack else ""
    line = node.meta.get("line", "")
    return f"{name}() in the forward of {owner or 'the model'}" + (f" ({line})" if line else "")


def function_name(target: Any) -> str:
    """The name of a torch function or tensor method."""
    return target if isinstance(target, str) else getattr(target, "__name__", None) or repr(target)


def innermost_own_line(frame: FrameType | None) -> str:
    """The innermost calling line that lies neither in torch nor in this library."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*_LIBRARIES, "<")):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def refuse_checkpointing(frame: FrameType | None) -> None:
    """Refuse layers that are called through `torch.utils.checkpoint`."""
    place = innermost_own_line(frame)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            raise UnsupportedOperationError(
                f"the model's forward uses gradient checkpointing ({place}), which runs layers a "
                "second time in the backward pass. Gradients are bounded in each use of a layer, "
                "and a second one was not planned. Switch checkpointing off; for less memory, use "
                "micro-batches (BatchOptions(micro_batch_size=...))."
            )
        frame = frame.f_back


def _last_own_place(frames: list[tuple[str, str]]) -> str:
    """The innermost of (file, line) that lies neither in torch nor in this library."""
    own = [f for f in frames if not f[0].startswith((*_LIBRARIES, "<"))]
    if not own:
        return ""
    file, number = own[-1]
    return f"{Path(file).name}:{number}"


def refuse_target(node: fx.Node, module: nn.Module | None) -> NoReturn:
    """Refuse an operation for which there is no rule."""
    place = place_of(node)
    if module is None:
        reason = _function_reason(node)
        what, name = str(node.target), "that_operation"
        if node.op == "call_function":
            what = function_name(node.target)
        elif node.op == "call_method":
            what = f"torch.Tensor.{node.target}"
    else:
        place = f"{place} ({type(module).__name__})"
        reason = _module_reason(module)
        what, name = type(module).__name__, "my_rule"
    raise UnsupportedOperationError(
        f"{place}: {reason}\nIf you can prove its bounds, register a rule:\n\n"
        f"    @clipless.bounds.register({what})\n"
        f"    def {name}(site, x):\n"
        f"        return clipless.bounds.Bound(\n"
        f"            lipschitz=..., output=..., roundings=..., rows_apart=...)\n"
    )


def _module_reason(module: nn.Module) -> str:
    for kind, reason in _REASONS.items():
        if isinstance(module, kind):
            return reason
    parents = [base for base in registered_types() if isinstance(module, base)]
    if parents:
        return (
            f"it is a subclass of {parents[0].__name__}. A rule holds for the exact type only, "
            "since a subclass may compute anything."
        )
    return "there is no rule for this module, so nothing is known about its sensitivity."


def _function_reason(node: fx.Node) -> str:
    name = function_name(node.target)
    if name.endswith("_") and not name.endswith("__"):
        return "it works in place, which the trace cannot follow. Use the version without `_`."
    if node.target in (operator.iadd, operator.isub, operator.imul, operator.itruediv):
        return "it works in place, which the trace cannot follow. Write `x = x + y`, not `x += y`."
    if name == "detach":
        return "it cuts the gradient, which is not covered."
    return "there is no rule for this operation, so nothing is known about its sensitivity."


def refuse_parameter(node: fx.Node, path: str) -> NoReturn:
    """Refuse the direct use of a parameter outside a layer that constrains it."""
    raise UnsupportedOperationError(
        f"{place_of(node)}: it uses the parameter {path!r} directly. Nothing constrains that "
        "parameter, so its effect has no bound. Put it into a module of its own with a "
        "project() and a registered rule, or use a layer of clipless.nn."
    )


def refuse_batch_axis(node: fx.Node) -> NoReturn:
    """Refuse an operation whose result does not have the batch as its first, whole axis."""
    raise UnsupportedOperationError(
        f"{place_of(node)}: its result does not keep the batch as its first axis. Examples must "
        "stay apart: reshape, reduce and combine only the axes of the example itself."
    )


def refuse_mixed_rows(node: fx.Node) -> NoReturn:
    """Refuse an operation in which one example has a part in what is computed for another."""
    raise UnsupportedOperationError(
        f"{place_of(node)}: it mixes rows along the batch axis. Without the last example of a "
        "batch the others have other results, whatever its rule says: compute each row from that "
        "row alone."
    )


def hooks_of(module: nn.Module) -> Iterator[Any]:
    """Yield the hooks of a module that can change what it computes, except this library's own."""
    for table in (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    ):
        for hook in table.values():
            if not str(getattr(hook, "__module__", "")).startswith("clipless."):
                yield hook


def refuse_altered_module(path: str, module: nn.Module) -> None:
    """Refuse modules whose type no longer says what they compute."""
    place = f"{path or 'the model'} ({type(module).__name__})"
    if "forward" in vars(module):
        raise UnsupportedOperationError(
            f"{place}: its forward was replaced on the instance, so its type no longer says what "
            "it computes. Write a module of its own instead."
        )
    hooked = [name for name, p in module.named_parameters(recurse=False) if p._backward_hooks]
    if hooked:
        raise UnsupportedOperationError(
            f"{place}: the parameter {hooked[0]!r} carries a hook that could change its gradient "
            "unseen. Remove it."
        )
    hook = next(hooks_of(module), None)
    if hook is not None:
        raise UnsupportedOperationError(
            f"{place}: it carries a hook ({getattr(hook, '__qualname__', hook)!s}) that could "
            "change activations or gradients unseen. Remove it, or make it part of a forward."
        )


GLOBAL_HOOKS: tuple[dict[int, Any], ...] = (
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)
"""Torch's tables of the hooks on all modules at once."""


def refuse_global_hooks() -> None:
    """Refuse hooks on all modules at once, which could change anything anywhere."""
    if any(GLOBAL_HOOKS):
        raise UnsupportedOperationError(
            "a hook on all modules is registered (register_module_..._hook), which could "
            "change activations or gradients unseen. Remove it."
        )


def refuse_augmented_assignment(node: fx.Node) -> NoReturn:
    """Refuse `x += y` and its kind."""
    raise UnsupportedOperationError(
        f"the result of {place_of(node)} is changed in place, by `x += y` or by item assignment. "
        "Every other name of the same tensor changes as well, which the trace cannot follow. "
        "Write `x = x + y` instead."
    )


def refuse_self_changing() -> NoReturn:
    """Refuse a model that a forward pass changes."""
    raise UnsupportedOperationError(
        "a forward pass changes the model itself (an attribute or a buffer), so the next one may "
        "compute something else. Keep state that changes out of the model."
    )


def refuse_randomness(generators: list[str]) -> None:
    """Refuse a forward that draws numbers of its own, named by the generators it drew from."""
    if generators:
        raise UnsupportedOperationError(
            f"the model's forward draws random numbers itself (from {', '.join(generators)}), so "
            "each pass may compute something else than the one that was traced: its bounds would "
            "be those of one draw. Use torch.nn.Dropout, whose masks have a rule, or draw the "
            "numbers outside of the model and pass them as an input."
        )


def refuse_unlike_trace() -> NoReturn:
    """Refuse a model whose trace computes something else than the model."""
    raise UnsupportedOperationError(
        "running the model gives something else than its trace: its forward depends on what "
        "tracing cannot see, such as the type of its argument, an in-place change of a tensor that "
        "has another name, or state that changes from call to call. Write the forward without it."
    )


def explain_trace_failure(error: Exception) -> UnsupportedOperationError:
    """Turn an error of symbolic tracing into one that says what it means here."""
    if isinstance(error, UnsupportedOperationError):
        return error
    frames = traceback.extract_tb(error.__traceback__)
    place = _last_own_place([(frame.filename, str(frame.lineno)) for frame in frames])
    where = f" ({place})" if place else ""
    if isinstance(error, fx.proxy.TraceError) or "Proxy" in str(error):
        return UnsupportedOperationError(
            "the model's forward takes decisions that depend on the data or on the batch "
            "(an `if`, a loop or a conversion to a Python number). A bound must hold for every "
            f"path: write the forward without it{where}. The tracer said: {error}"
        )
    return UnsupportedOperationError(f"the model's forward could not be traced{where}: {error!r}")


def explain_shapes(
    node: fx.Node, error: Exception, results: dict[fx.Node, Any]
) -> UnsupportedOperationError:
    """Turn an error of the trial run into one that names the operation and the shapes."""
    shapes = [
        tuple(value.shape[1:])
        for value in (results[source] for source in node.all_input_nodes)
        if isinstance(value, Tensor)
    ]
    return UnsupportedOperationError(
        f"{place_of(node)}: it does not run on examples of shape "
        f"{', '.join(map(str, shapes)) or '?'}: {error}"
    )
