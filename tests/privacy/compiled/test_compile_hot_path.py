"""A step waits for nothing: on a GPU no value is read back, and little is looked at twice."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from clipless import losses
from clipless import nn as lip
from clipless.bounds import ModelSnapshot, _shapes
from clipless.privacy import BatchOptions, PrivacyOptions, TrainingSession
from clipless.training import LayerAdam, Trainer
from tests.privacy.runs import SHAPES, Run, cnn, examples, mlp, residual

_READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.item.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.unique_dim.default,
}
BETWEEN_TRIALS = 5
"""Trials of the model, before steps 0, 1, 2, 4 and 8, do read values."""


class NoReading(TorchDispatchMode):
    """Fails where a value of a tensor leaves the device, or a shape would depend on one."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function not in _READS, f"{function} waits for the device"
        return function(*args, **(kwargs or {}))


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Let everything take the way it takes on a GPU, where values must not be looked at."""
    for place in (
        "clipless.bounds._structure.may_look_at",
        "clipless.privacy.step._output_guard.may_look_at",
        "clipless.privacy.step._book.may_look_at",
        "clipless.losses._base.readable",
        "clipless.spectral._projection.may_look_at",
        "clipless.kernels._weight_sums.may_look_at",
        "clipless.kernels._bounded_gradients.may_look_at",
    ):
        monkeypatch.setattr(place, lambda tensor: False)
    monkeypatch.setattr(TrainingSession, "on_accelerator", property(lambda session: True))
    torch._dynamo.reset()


def clipped():
    return nn.Sequential(
        lip.BoundedInput(1.0), lip.SpectralLinear(6, 8, constraint="ball"), lip.MaxMin(),
        lip.FrobeniusLinear(8, 3, bias=True), lip.ClipGradient(0.2),
    )  # fmt: skip


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("build", [mlp, cnn, residual, clipped], ids=lambda b: b.__name__)
def test_an_eager_step_reads_nothing_back(build, precision, on_a_gpu):
    run = Run(
        build(), examples(100, SHAPES.get(build, (6,))), pad=True, precision=precision,
        target_epsilon=5.0, steps=10,
    ).steps(BETWEEN_TRIALS)  # fmt: skip
    with NoReading():
        run.steps(3)
    assert run.engine.ledger.releases == BETWEEN_TRIALS + 3


def test_a_compiled_step_reads_nothing_back(on_a_gpu):
    run = Run(cnn(), examples(100, SHAPES[cnn]), compile="aot_eager").steps(BETWEEN_TRIALS)
    session = run.engine.session
    assert session.compiled
    assert session._compiled._losses.works
    with NoReading():
        run.steps(3)


def test_views_layer_adam_and_metrics_read_nothing_back(on_a_gpu):
    model = mlp()
    run = Run(
        model, pad=True, views=2, augment=lambda x, generator: -x,
        optimizer=LayerAdam(model.parameters(), weight_decay=0.1),
    ).steps(BETWEEN_TRIALS)  # fmt: skip
    with NoReading():
        run.steps(2)
    trainer = Trainer(
        mlp(),
        losses.CrossEntropy(),
        noise_multiplier=1.0,
        batch_size=20,
        steps=4,
        options=PrivacyOptions(batches=BatchOptions(pad=True)),
    )
    batches = []
    step = type(trainer._running).add_batch

    def watched(self, *arguments):
        with NoReading():
            step(self, *arguments)
        batches.append(arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(trainer._running), "add_batch", watched)
        trainer.fit(examples(100))
    assert len(batches) == 4


def test_the_check_would_notice():
    """Where values may be read, they are: the CPU is asked whether weights were edited."""
    run = Run(pad=True).steps(BETWEEN_TRIALS)
    with NoReading(), pytest.raises(AssertionError, match="waits for the device"):
        run.step()


# --- the watch over the model --------------------------------------------------------------------


class Branching(nn.Module):
    scale = 0.5

    def __init__(self):
        super().__init__()
        self.first = lip.SpectralLinear(6, 6)
        self.options = {"sizes": [1, 2]}
        self.register_buffer("shift", torch.zeros(6))

    def forward(self, x):
        return self.scale * self.first(x) + self.shift


def watched_model():
    return nn.Sequential(lip.BoundedInput(1.0), Branching(), lip.GroupSort(2), nn.Flatten())


def replace_parameter(model):
    model[1].first.weight = nn.Parameter(model[1].first.weight.detach().clone())


def cast(model):
    weight = model[1].first.weight
    weight.data = weight.data[:5]


CHANGES = {
    "a number": lambda m: setattr(m[0], "norm", 2.0),
    "an axis": lambda m: setattr(m[2], "dim", -1),
    "a new attribute": lambda m: setattr(m[1], "flag", True),
    "a forward method": lambda m: setattr(Branching, "forward", lambda self, x: x),
    "frozen": lambda m: m[1].first.weight.requires_grad_(False),
    "another parameter": replace_parameter,
    "another shape": cast,
    "training mode": lambda m: m[1].eval(),
    "a hook": lambda m: m[1].register_forward_hook(lambda *_: None),
    "one more layer": lambda m: m.append(nn.Identity()),
    "one layer less": lambda m: m.pop(3),
    "another layer": lambda m: m.__setitem__(2, lip.MaxMin()),
    "a lower layer": lambda m: setattr(m[1], "first", lip.SpectralLinear(6, 6)),
    "another class": lambda m: setattr(m[3], "__class__", nn.Identity),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_snapshot_sees_what_changes_about_a_model(change):
    model = watched_model()
    snapshot = ModelSnapshot(model)
    assert not snapshot.changed()
    class_before = dict(vars(Branching))
    try:
        CHANGES[change](model)
        assert snapshot.changed()
        assert snapshot.changed(numbers=False) == (change != "a number")
        assert not ModelSnapshot(model).changed()
    finally:
        for name in ("scale", "forward"):
            setattr(Branching, name, class_before[name])


def test_a_snapshot_is_not_disturbed_by_training():
    run = Run(watched_model(), examples(60, classes=6))
    guard = run.engine.session._guard
    first = guard.snapshot
    run.steps(3)
    assert guard.snapshot is first
    copy.deepcopy(run.model)
    run.model.state_dict()
    assert not guard.changed()


def test_a_training_step_does_not_trace_again(monkeypatch):
    """Nor does a threshold that moves: it is read by its rule."""
    traces, original = [], _shapes.trace
    monkeypatch.setattr(_shapes, "trace", lambda *a: (traces.append(1), original(*a))[1])
    run = Run(nn.Sequential(lip.BoundedInput(1.0), lip.SpectralLinear(6, 3), lip.ClipGradient(1.0)))
    run.steps(2)
    assert len(traces) == 1
    for step in range(3):
        run.model[2].norm = 1.0 / (step + 2)
        run.step()
        bound = run.engine.plan.parameters[0].gradient_bound
        assert bound == pytest.approx(1.0 / (step + 2))
    assert len(traces) == 2
