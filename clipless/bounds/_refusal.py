"""Why a model is refused, in words. Every refusal names the place and says what to do."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor, fx, nn

from clipless.bounds._rule import registered_types
from clipless.errors import UnsupportedOperationError

_REASONS: dict[type[nn.Module], str] = {
    nn.modules.batchnorm._NormBase: (
        "normalisation over the batch mixes examples: removing one changes the gradients of all "
        "others, so no per-example bound exists. Use clipless.nn.LayerCentering."
    ),
    nn.LayerNorm: (
        "dividing by a standard deviation has no Lipschitz constant. Use "
        "clipless.nn.LayerCentering or clipless.nn.BallProjection."
    ),
    nn.GroupNorm: (
        "dividing by a standard deviation has no Lipschitz constant. Use "
        "clipless.nn.LayerCentering or clipless.nn.BallProjection."
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
    name = node.target if isinstance(node.target, str) else _function_name(node.target)
    stack = node.meta.get("nn_module_stack")
    owner = next(reversed(stack)) if stack else ""
    line = _user_line(node.stack_trace)
    return f"{name}() in the forward of {owner or 'the model'}" + (f" ({line})" if line else "")


def _function_name(target: Any) -> str:
    return getattr(target, "__name__", None) or repr(target)


def _user_line(stack_trace: str | None) -> str:
    """The last line of a stack trace that points into somebody's source, shortened."""
    lines = [line.strip() for line in (stack_trace or "").splitlines()]
    places = [line for line in lines if line.startswith("File ")]
    if not places:
        return ""
    file, number = places[-1].split(",")[:2]
    name = file.split("/")[-1].strip('"')
    return f"{name}:{number.strip().removeprefix('line ')}"


def refuse_target(node: fx.Node, module: nn.Module | None) -> NoReturn:
    """Refuse an operation for which there is no rule."""
    place = place_of(node)
    if module is None:
        reason = _function_reason(node)
        what, name = str(node.target), "that_operation"
        if node.op == "call_function":
            what = _function_name(node.target)
        elif node.op == "call_method":
            what = repr(str(node.target))
    else:
        place = f"{place} ({type(module).__name__})"
        reason = _module_reason(module)
        what, name = type(module).__name__, "my_rule"
    raise UnsupportedOperationError(
        f"{place}: {reason}\nIf you can prove its bounds, register a rule:\n\n"
        f"    @clipless.bounds.register({what})\n"
        f"    def {name}(site, x):\n"
        f"        return clipless.bounds.Bound(lipschitz=..., output=...)\n"
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
    name = node.target if isinstance(node.target, str) else _function_name(node.target)
    if name.endswith("_") and not name.endswith("__"):
        return "it works in place, which the trace cannot follow. Use the version without `_`."
    if name in ("iadd", "isub", "imul", "itruediv"):
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


def refuse_altered_module(path: str, module: nn.Module) -> None:
    """Refuse modules whose type no longer says what they compute."""
    from clipless.bounds._trace import hooks_of

    place = f"{path or 'the model'} ({type(module).__name__})"
    if "forward" in vars(module):
        raise UnsupportedOperationError(
            f"{place}: its forward was replaced on the instance, so its type no longer says what "
            "it computes. Write a module of its own instead."
        )
    hook = next(hooks_of(module), None)
    if hook is not None:
        raise UnsupportedOperationError(
            f"{place}: it carries a hook ({getattr(hook, '__qualname__', hook)!s}) that could "
            "change activations or gradients unseen. Remove it, or make it part of a forward."
        )


def explain_trace_failure(error: Exception) -> UnsupportedOperationError:
    """Turn an error of symbolic tracing into one that says what it means here."""
    if isinstance(error, UnsupportedOperationError):
        return error
    if isinstance(error, fx.proxy.TraceError) or "Proxy" in str(error):
        return UnsupportedOperationError(
            "the model's forward takes decisions that depend on the data or on the batch "
            "(an `if`, a loop or a conversion to a Python number). A bound must hold for every "
            f"path: write the forward without it. The tracer said: {error}"
        )
    return UnsupportedOperationError(f"the model's forward could not be traced: {error!r}")


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
