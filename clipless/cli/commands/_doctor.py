"""`clipless doctor`: what is installed, what is missing, and whether training works here."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from clipless import __version__
from clipless.cli._exits import CheckFailedError
from clipless.cli._options import Debug, Json
from clipless.cli._output import emit, working

_CORE = (
    "torch", "numpy", "scipy", "dp-accounting", "rich", "filelock", "safetensors", "jinja2",
    "cryptography",
)  # fmt: skip
_EXTRAS = {
    "cli": ("typer", "yaml"),
    "sklearn": ("sklearn",),
    "data": ("pandas", "pyarrow"),
    "plots": ("matplotlib",),
    "sweeps": ("optuna",),
    "postgresql": ("optuna", "psycopg"),
    "tensorboard": ("tensorboard",),
    "onnx": ("onnx", "onnxscript"),
}
"""Extras of the package, and the modules that they bring."""


def doctor(json: Json = False, debug: Debug = False) -> None:
    """Say what is installed and what is missing, and train a small private model as a test.

    The test takes some seconds. If it fails, the exit code is 1.

        clipless doctor
    """
    fields: dict[str, Any] = {
        "clipless": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _CORE},
        "extras": {
            extra: [name for name in modules if importlib.util.find_spec(name) is None]
            for extra, modules in _EXTRAS.items()
        },
        "compiler": shutil.which("c++") or shutil.which("g++") or shutil.which("cl"),
    }
    import torch

    gpus = [torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())]
    fields |= {
        "gpus": gpus,
        "mps": torch.backends.mps.is_available(),
        "threads": torch.get_num_threads(),
    }
    with working("training a small model"):
        fields["self_test"] = _self_test()
    emit(fields, *_lines(fields), json=json)
    if fields["self_test"]["problem"] is not None:
        raise CheckFailedError(f"the self test failed: {fields['self_test']['problem']}")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _self_test() -> dict[str, Any]:
    """Train a linear model for a few steps, and check the budget that it kept."""
    import torch

    from clipless import losses
    from clipless.nn import BoundedInput, SpectralLinear
    from clipless.training import Trainer

    begun, problem, spent = time.perf_counter(), None, None
    x = torch.randn(600, 4, generator=torch.Generator().manual_seed(0))
    model = torch.nn.Sequential(BoundedInput(1.0), SpectralLinear(4, 2))
    try:
        trainer = Trainer(
            model, losses.CrossEntropy(tau=10.0), target_epsilon=3.0, batch_size=100, epochs=2
        )
        spent = trainer.fit((x, (x[:, 0] > 0).long())).epsilon
        if not spent <= 3.0:
            problem = f"epsilon is {spent}, above its target of 3"
    except Exception as error:  # whatever is wrong here is what was asked for
        problem = f"{type(error).__name__}: {error}"
    return {"problem": problem, "epsilon": spent, "seconds": time.perf_counter() - begun}


def _lines(fields: dict[str, Any]) -> list[str]:
    packages = ", ".join(
        f"{name} {found or 'missing'}" for name, found in fields["packages"].items()
    )
    gpus = ", ".join(fields["gpus"]) or "none; training runs on the CPU"
    mps = " (Apple's MPS is there, and not supported: use the CPU)" if fields["mps"] else ""
    lines = [
        f"clipless {fields['clipless']}, Python {fields['python']}, {fields['platform']}",
        f"Packages: {packages}",
        f"GPU: {gpus}{mps}",
        f"CPU threads: {fields['threads']} (OMP_NUM_THREADS=1 is faster for small models on a busy "
        "machine)",
        f"C++ compiler, for compiled training: {fields['compiler'] or 'none'}",
    ]
    for extra, absent in fields["extras"].items():
        hint = (
            f"lacks {', '.join(absent)}: pip install 'clipless[{extra}]'" if absent else "complete"
        )
        lines.append(f"Extra {extra}: {hint}")
    test = fields["self_test"]
    outcome = "passed" if test["problem"] is None else "FAILED"
    return [*lines, f"Self test: {outcome} in {test['seconds']:.1f} s"]
