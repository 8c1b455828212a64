"""Compiled functions: what torch's compiler is asked for."""

import pytest
import torch

from clipless.errors import PrivacyError
from clipless.kernels import CompiledFunction
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
