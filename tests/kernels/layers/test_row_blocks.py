"""Guards of large batches on a CPU, which are applied to blocks of rows."""

import pytest
import torch

from clipless.kernels import make_finite_and_bounded
from clipless.kernels.layers import _row_scaling


@pytest.mark.parametrize("sphere", [False, True])
@pytest.mark.parametrize("shape", [(900, 7), (5, 70), (33, 2, 3, 4), (1, 1000)])
def test_blocks_change_nothing(monkeypatch, shape, sphere):
    """Whatever a block holds: rows inside and outside the ball, zeros, nothing finite, overflow."""
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    flat = rows.view(shape[0], -1)
    for place, value in ((0, float("nan")), (1, float("inf")), (2, 3e38), (3, 0.0), (4, 1e-30)):
        if place < shape[0]:
            flat[place, ::2] = value
    whole = make_finite_and_bounded(rows, 2.0, sphere=sphere)
    monkeypatch.setattr(_row_scaling, "_WORTH_BLOCKS", -1)
    monkeypatch.setattr(_row_scaling, "_BLOCK", 50)
    found = make_finite_and_bounded(rows, 2.0, sphere=sphere)
    assert torch.equal(found, whole)
    assert found.isfinite().all()
    assert (found.flatten(1).double().norm(dim=1) <= 2.0 * (1 + 1e-6)).all()


def test_large_batches_are_guarded_in_blocks(monkeypatch):
    sizes = []
    scaled = _row_scaling._scaled
    monkeypatch.setattr(
        _row_scaling,
        "_scaled",
        lambda rows, *given: sizes.append(len(rows)) or scaled(rows, *given),
    )
    make_finite_and_bounded(torch.ones(3000, 400), 1.0)
    assert sizes == [327] * 9 + [57]
