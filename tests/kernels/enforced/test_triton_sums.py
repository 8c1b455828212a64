"""The GPU's sum of scaled products, run by Triton's interpreter, and on a GPU if there is one."""

import subprocess
import sys

import pytest
import torch

SCRIPT = """
import torch
from clipless.kernels.enforced._triton_sums import AT_ONCE, scaled_products
torch.manual_seed(0)
for rows, positions, wide, deep in ((3, 5, 7, 9), (AT_ONCE + 3, 40, 70, 130), (0, 4, 3, 2)):
    g, x = torch.randn(rows, positions, wide), torch.randn(rows, positions, deep)
    factors = torch.rand(rows)
    if rows:
        factors[1], g[1, 0, 0] = 0.0, float("nan")  # an example that is left out
    found = scaled_products(g, x, factors)
    assert found.dtype == torch.float64 and found.shape == (wide, deep)
    if rows:
        g[1] = 0.0
    expected = torch.einsum("b,bto,bti->oi", factors.double(), g.double(), x.double())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    if rows > 2:  # emptied, a record leaves its own part alone: exactly, the others stay
        without = factors.clone()
        without[2] = 0.0
        own = torch.einsum("to,ti->oi", g[2].double(), x[2].double()) * factors[2].double()
        moved = found - scaled_products(g, x, without)
        torch.testing.assert_close(moved, own, rtol=1e-4, atol=1e-4)
print("as it should")
"""


def test_scaled_products_are_those_of_float64():
    pytest.importorskip("triton")
    import os

    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert run.stdout.strip() == "as it should", run.stderr[-2000:]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_computes_the_same(dtype, monkeypatch):
    from clipless.kernels.enforced._norms import to_ten_digits
    from clipless.kernels.enforced._triton_sums import scaled_products

    g, x = (torch.randn(50, 128, size, device="cuda") for size in (384, 200))
    g, x = (to_ten_digits(each) if dtype == torch.float32 else each.to(dtype) for each in (g, x))
    factors = torch.rand(50, device="cuda")
    expected = torch.einsum("b,bto,bti->oi", factors.double(), g.double(), x.double())
    torch.testing.assert_close(scaled_products(g, x, factors), expected, rtol=1e-4, atol=1e-3)


def test_numbers_are_rounded_to_ten_digits():
    from clipless.kernels.enforced._norms import to_ten_digits

    x = torch.tensor([1.0, 1.0 + 2.0**-11, 1.0 + 2.0**-10, -3.3, 1e-30, float("inf"), 0.0])
    rounded = to_ten_digits(x)
    assert (rounded - x).abs().nan_to_num(0.0).le(x.abs() * 2.0**-11).all()
    assert (rounded.view(torch.int32) & 0x1FFF == 0).all()
    assert rounded[-2] == float("inf")
