import math

import pytest
import torch
from torch.nn import functional as F

from clipless.errors import LabelError
from clipless.losses import TokenCrossEntropy


def test_it_is_the_mean_over_a_records_own_tokens():
    output, target = torch.randn(4, 6, 5), torch.randint(5, (4, 6))
    target[1, 2:] = -100
    target[2] = -100
    found = TokenCrossEntropy(shift=False, reduction="none")(output, target)
    for row in (0, 1, 3):
        expected = F.cross_entropy(output[row], target[row], ignore_index=-100)
        torch.testing.assert_close(found[row], expected)
    assert found[2] == 0
    shifted = TokenCrossEntropy(reduction="none")(output, target)
    torch.testing.assert_close(
        shifted[0], F.cross_entropy(output[0, :-1], target[0, 1:], ignore_index=-100)
    )


def test_gradients_keep_the_constant_and_come_close_to_it():
    output = (torch.randn(50, 6, 5, dtype=torch.float64) * 10).requires_grad_()
    target = torch.randint(5, (50, 6))
    target[:, 1:] = torch.where(torch.rand(50, 5) < 0.7, -100, target[:, 1:])
    loss = TokenCrossEntropy(shift=False)
    (gradient,) = torch.autograd.grad(loss.per_example(output, target).sum(), output)
    norms = gradient.flatten(1).norm(dim=1)
    assert norms.max() <= math.sqrt(2)
    assert norms.max() > 1.2


def test_tokens_out_of_range_are_refused():
    with pytest.raises(LabelError, match="outside of 0 to 4"):
        TokenCrossEntropy()(torch.zeros(2, 3, 5), torch.full((2, 3), 5))
    with pytest.raises(LabelError, match="of shape"):
        TokenCrossEntropy()(torch.zeros(2, 3, 5), torch.zeros(2, 4).long())
    with pytest.raises(ValueError, match=r"\(batch, T, K\)"):
        TokenCrossEntropy()(torch.zeros(2, 3), torch.zeros(2, 3).long())
