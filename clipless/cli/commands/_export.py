"""`clipless export`: the model of a run, for places where this library is not."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clipless.cli._options import Debug, Json, RunArgument, require_run
from clipless.cli._output import emit, working
from clipless.runs import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn


class Format(StrEnum):
    """What can be written."""

    TORCH = "torch"
    WEIGHTS = "weights"
    ONNX = "onnx"


_ENDINGS = {Format.TORCH: ".pt2", Format.WEIGHTS: ".safetensors", Format.ONNX: ".onnx"}
_TOLERANCE = 1e-4


def export(
    run: RunArgument,
    form: Annotated[
        Format,
        typer.Option(
            "--format", help="torch: a program (torch.export); weights: safetensors; or onnx."
        ),
    ] = Format.TORCH,
    out: Annotated[
        Path | None, typer.Option(help="The file; by default export.pt2 etc. in the run folder.")
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a run's model as plain torch or ONNX, without layers of this library, and check it.

    - torch: a program that torch.export.load(file).module() runs, for any batch size.
    - weights: the state of clipless.to_torch(model), as safetensors.
    - onnx: if the packages onnx and onnxscript are installed.

    What is written is read again, where possible, and compared with the model. For runs on tables
    it is the network behind the encoding of rows.

        clipless export runs/mnist --format torch --out mnist.pt2
    """
    if form is Format.ONNX:
        for package in ("onnx", "onnxscript"):
            if importlib.util.find_spec(package) is None:
                raise ImportError(
                    f"--format onnx needs the package {package}: pip install 'clipless[onnx]'"
                )
    require_run(run)
    path = out or run / f"export{_ENDINGS[form]}"
    if path.suffix != _ENDINGS[form]:
        raise ConfigError(
            f"--out {path}: a file of the format {form.value} ends in {_ENDINGS[form]}"
        )
    from clipless.nn import to_torch
    from clipless.runs import open_run

    opened = open_run(run)
    plain = to_torch(opened.model).eval().requires_grad_(False)
    inputs = _inputs(opened.input_shape)
    with working("exporting"):
        error = _WRITERS[form](plain, inputs, path, opened.model(inputs).detach())
    if error is not None and not error <= _TOLERANCE:
        path.unlink()
        raise ConfigError(f"the exported model differs from the original by {error:.3g}")
    fields = {
        "file": path,
        "format": form.value,
        "bytes": path.stat().st_size,
        "largest_difference": error,
        "input_shape": list(opened.input_shape),
    }
    checked = "" if error is None else f", outputs within {error:.1e} of the original"
    emit(fields, f"{path}: {path.stat().st_size:,} bytes{checked}", json=json)


def _inputs(shape: tuple[int, ...]) -> Tensor:
    """Examples to export and to compare with, of several norms."""
    import torch

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, *shape, generator=generator)
    return x * torch.tensor([0.01, 0.1, 1.0, 3.0]).reshape(-1, *[1] * len(shape))


def _torch(model: nn.Module, inputs: Tensor, path: Path, expected: Tensor) -> float:
    import torch

    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(model, (inputs,), dynamic_shapes=({0: batch},))
    with warnings.catch_warnings():  # of buffers that share memory, which are written whole
        warnings.filterwarnings("ignore", message="No complete tensor found")
        _write(path, lambda: torch.export.save(program, path))
    again: Any = torch.export.load(path).module()
    return max(
        float((again(inputs) - expected).abs().max()),
        float((again(inputs[:1]) - expected[:1]).abs().max()),
    )


def _weights(model: nn.Module, inputs: Tensor, path: Path, expected: Tensor) -> float:
    import safetensors.torch

    state = {key: value.contiguous() for key, value in model.state_dict().items()}
    _write(path, lambda: safetensors.torch.save_file(state, path))
    model.load_state_dict(safetensors.torch.load_file(path))
    return float((model(inputs) - expected).abs().max())


def _onnx(model: nn.Module, inputs: Tensor, path: Path, expected: Tensor) -> float | None:
    import torch

    batch = torch.export.Dim("batch", min=1)
    program: Any = torch.onnx.export(
        model, (inputs,), dynamo=True, dynamic_shapes=({0: batch},), verbose=False
    )
    _write(path, lambda: program.save(str(path)))
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    runtime: Any = importlib.import_module("onnxruntime")
    session = runtime.InferenceSession(str(path))
    (found,) = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
    return float((torch.from_numpy(found) - expected).abs().max())


def _write(path: Path, write: Any) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error


_WRITERS = {Format.TORCH: _torch, Format.WEIGHTS: _weights, Format.ONNX: _onnx}
