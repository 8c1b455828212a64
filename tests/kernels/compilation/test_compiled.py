"""Compiled functions: what torch's compiler is asked for."""

import pytest
import torch

from clipless.errors import PrivacyError
from clipless.kernels import CompiledFunction, LimitKind, bounded_linear_layer
from clipless.kernels.compilation import _compiled


@pytest.fixture
def asked_for(monkeypatch):
    """The options of every graph, which runs as it is."""
    pytest.importorskip("torch._inductor.config")
    found = []

    def backend(module, examples, *, config_patches):
        found.append(config_patches)
        return module.forward

    torch._dynamo.reset()
    monkeypatch.setattr("torch._dynamo.lookup_backend", lambda name: backend)
    yield found
    torch._dynamo.reset()


def function_of(run, **options):
    return CompiledFunction(
        run, name="a function", attempt=lambda compiled, *given: compiled(*given),
        backend="inductor", fixed=False, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "rounds", "expected"),
    [(torch.float32, False, None), (torch.float32, True, True), (torch.bfloat16, False, True),
     (torch.float16, False, True)],
)  # fmt: skip
def test_roundings_are_kept_where_there_are_any(asked_for, dtype, rounds, expected):
    call = function_of(lambda x: (x * 2 + 1).float(), rounds=rounds)
    assert torch.equal(call(torch.ones(3, dtype=dtype)), torch.full((3,), 3.0))
    assert [each.get(_compiled._ROUNDS) for each in asked_for] == [expected]
    assert call.works


def test_without_the_option_rounded_passes_are_not_compiled(asked_for, monkeypatch):
    monkeypatch.setattr(_compiled, "_ROUNDS", "no_such_option")
    with pytest.raises(PrivacyError, match="train uncompiled"):
        function_of(lambda x: x * 2, rounds=True)(torch.ones(3))
    call = function_of(lambda x: x * 2)
    with pytest.warns(UserWarning, match="runs uncompiled"):
        found = call(torch.ones(3, dtype=torch.bfloat16))
    assert found.dtype == torch.bfloat16
    assert not call.works
    assert not asked_for


def test_a_bounded_layer_adds_what_it_measured():
    """1.0039 is rounded to 1: to measure the one and to add the other is 0.2% above the limit."""

    def run(x, weight):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = bounded_linear_layer(
                x.to(torch.bfloat16), {"weight": weight, "bias": None},
                limits={"weight": 0.01}, clip=LimitKind(),
            )  # fmt: skip
            return (y * 1.0039).float()

    torch._dynamo.reset()
    weight = torch.zeros(3, 64, dtype=torch.float64, requires_grad=True)
    x = torch.ones(4, 64).masked_fill(torch.arange(4)[:, None] > 0, 0.0).requires_grad_()
    y = function_of(run)(x, weight)
    cotangent = torch.zeros_like(y)
    cotangent[0] = 1.0
    found, _ = torch.autograd.grad(y, [weight, x], cotangent)
    assert 0.0099 < float(found.norm()) <= 0.01 * (1 + 1e-4)
