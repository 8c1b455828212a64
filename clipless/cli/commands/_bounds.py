"""`clipless bounds`: the sensitivity table of a model."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clipless.cli._config_layers import set_layer
from clipless.cli._options import Debug, Json, Settings, is_run
from clipless.cli._output import emit, working
from clipless.runs import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from clipless.losses import Loss


def bounds(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A run folder, a model by name, or module:callable that returns one.",
        ),
    ],
    input_shape: Annotated[
        str | None, typer.Option(help="Shape of one example, such as 1,28,28.")
    ] = None,
    classes: Annotated[int | None, typer.Option(help="Outputs of a model by name.")] = None,
    settings: Settings = None,
    loss: Annotated[
        str | None, typer.Option(help="A loss by name, or the Lipschitz constant of another.")
    ] = None,
    input_norm: Annotated[
        float | None, typer.Option(help="A bound of the inputs' norm that holds elsewhere.")
    ] = None,
    enforced: Annotated[
        bool,
        typer.Option(help="Say what bounds='enforced' could train, and what stands in the way."),
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Prove how large one example's gradient can be, for every parameter of a model.

    clipless bounds runs/mnist
    clipless bounds lenet --input-shape 1,28,28 --classes 10 --set hidden=128
    clipless bounds my_models:network --input-shape 3,32,32
    clipless bounds my_models:any_network --input-shape 3,32,32 --enforced
    """
    if is_run(model):
        if any(value is not None for value in (input_shape, classes, settings, loss, input_norm)):
            raise ConfigError("a run folder has its own model and loss: leave the options out")
        network, criterion, shape = _of_run(Path(model))
    else:
        if input_shape is None:
            raise ConfigError("say the --input-shape of one example, such as 1,28,28")
        shape = _shape(input_shape)
        criterion = _loss(loss, settings)
        by_name = ":" not in model
        network = _named(model, shape, classes, settings) if by_name else imported_model(model)
    if enforced:
        import torch

        from clipless.privacy import validate

        with working("following the batch axis"):
            answer = validate(network, torch.zeros(1, *shape))
        emit(answer.to_dict(), answer, json=json)
        return
    from clipless.bounds import sensitivity

    with working("tracing the model"):
        report = sensitivity(network, loss=criterion, input_shape=shape, input_norm=input_norm)
    emit(report.to_dict(), report, json=json)


def imported_model(target: str) -> nn.Module:
    """Return the model that `module:callable` names; modules of the present folder are found."""
    from torch import nn

    module_name, _, name = target.partition(":")
    sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{target} cannot be imported: {error}") from error
    finally:
        sys.path.remove("")
    made = found() if callable(found) and not isinstance(found, nn.Module) else found
    if not isinstance(made, nn.Module):
        raise ConfigError(f"{target} gives a {type(made).__name__}, not a torch.nn.Module")
    return made


def _of_run(folder: Path) -> tuple[nn.Module, Loss | float, tuple[int, ...]]:
    from clipless.runs import open_run

    run = open_run(folder)
    return run.model, run.criterion, run.input_shape


def _named(
    name: str, shape: tuple[int, ...], classes: int | None, settings: list[str] | None
) -> nn.Module:
    from clipless import models

    given = {"name": name, "classes": classes, **set_layer(settings).get("model", {})}
    if name == "head":
        given.setdefault("features", shape[0])
    else:
        given.setdefault("input_shape", list(shape))
    if given["classes"] is None:
        raise ConfigError("say how many --classes the model has")
    try:
        return models.build(models.from_dict(given))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _loss(name: str | None, settings: list[str] | None) -> Loss | float:
    from clipless.runs import Choice, build_loss, resolved_loss

    if name is not None:
        try:
            return float(name)
        except ValueError:
            pass
    given = {"name": name, **set_layer(settings).get("loss", {})}
    return build_loss(resolved_loss(Choice.from_dict(given, where="loss")))


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise ConfigError(f"--input-shape must be sizes such as 1,28,28, got {text!r}")
    return shape
