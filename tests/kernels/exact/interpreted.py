"""The kernels that add up integers, run by Triton's interpreter: the twin's bits, and exact sums.

A program of its own, since the interpreter has to be chosen before Triton is loaded:
`TRITON_INTERPRET=1 python -m tests.kernels.exact.interpreted`.
"""

import warnings

import torch

from clipless.kernels.exact import _triton_exact as kernels
from clipless.kernels.exact import _weights
from clipless.kernels.exact._products import Windows
from tests.kernels.exact.rows import unusual_rows

KINDS: tuple[_weights.IntegerSums, ...] = ("float16", "int8")
LAYERS = {
    "a window of 3": ((5, 6, 5), (7, 6, 5), Windows((3, 3), padding=(1, 1)), 1),
    "strides, gaps, groups": (
        (8, 6, 5), (12, 3, 2), Windows((3, 2), (2, 1), (1, 0), (1, 3)), 2,
    ),
    "a vector": ((30, 1, 1), (20, 1, 1), Windows(), 1),
    "positions": ((30, 1, 7), (20, 1, 7), Windows(), 1),
}  # fmt: skip


def check_layer(shape, found, windows, groups, kind, *, shared):
    """Whether kernels find what the twin finds, bit for bit, in rows of all sorts."""
    random = torch.Generator().manual_seed(0)
    x = unusual_rows(torch.randn(14, *shape, generator=random))
    cotangent = unusual_rows(torch.randn(14, *found, generator=random)).flip(0)
    shares = torch.rand(14, generator=random) if shared else None
    for limit in (1e-2, 1e3):
        what = _weights._described(cotangent, x, windows, groups, limit, multiple=16)
        total, outside = _weights._by_kernels(cotangent, x, what, shares, kind)
        expected, above = _weights._by_torch(cotangent, x, what, shares)
        if not (torch.equal(total, expected) and torch.equal(outside, above)):
            raise AssertionError(f"{shape}, {kind}, limit {limit}")
        if not total.any():
            raise AssertionError("nothing was added up")


def limbs_and_inputs(positions, *, seed, kind):
    random = torch.Generator().manual_seed(seed)
    limbs = torch.randint(-128, 128, (positions, 1, 1, 1, 2, 16), generator=random)
    x = torch.randint(-127, 128, (positions, 1, 1, 1, 16), generator=random)
    return limbs.to(getattr(torch, kind)), x.to(getattr(torch, kind))


def total_of(limbs, x, **options):
    total = torch.zeros(1, 2, 16, 1, 1, 16, dtype=torch.int64)
    kernels.multiply(limbs, x, Windows(), total, **options)
    return total.view(32, 16)


def check_orders(kind):
    """The sum is that of int64, in whatever order and whatever pieces it is taken."""
    limbs, x = limbs_and_inputs(3000, seed=1, kind=kind)
    expected = limbs.view(3000, 32).long().mT @ x.view(3000, 16).long()
    order = torch.randperm(3000, generator=torch.Generator().manual_seed(2))
    for span in (1024, 2048):
        if not torch.equal(total_of(limbs, x, span=span), expected):
            raise AssertionError(f"{kind}: pieces of {span}")
    if not torch.equal(total_of(limbs[order].contiguous(), x[order].contiguous()), expected):
        raise AssertionError(f"{kind}: another order")


def check_largest(kind, positions=131_072):
    """The largest sum that int32 holds: 131,072 products of 127 and 127, by one program."""
    limbs = torch.full((positions, 1, 1, 1, 2, 16), 127).to(getattr(torch, kind))
    limbs[..., 1, :] = -127
    x = torch.full((positions, 1, 1, 1, 16), 127).to(getattr(torch, kind))
    total = total_of(limbs, x, span=positions)
    if set(total.unique().tolist()) != {127 * 127 * positions, -127 * 127 * positions}:
        raise AssertionError(f"{kind}: {total.unique().tolist()}")
    if not 127 * 127 * positions < 2**31:
        raise AssertionError("this is beyond the edge")


def check_spans():
    """What the kernels choose themselves stays below the edge, with limbs of 128 too."""
    if not kernels._SPAN * 127 * 128 < 2**31 or not kernels._PRODUCTS * 127 * 128 < 2**24:
        raise AssertionError("sums may not be exact")


def main():
    warnings.simplefilter("ignore", RuntimeWarning)  # infinities, of rows that are left out
    check_spans()
    for kind in KINDS:
        for shape, found, windows, groups in list(LAYERS.values())[: 4 if kind == "float16" else 2]:
            check_layer(shape, found, windows, groups, kind, shared=groups > 1)
        check_orders(kind)
        check_largest(kind, 131_072 if kind == "int8" else 16_384)
        if not _weights.sums_are_exact("cpu", kind, positions=3000):
            raise AssertionError(f"{kind}: the trial fails")
    print("all is exact")


if __name__ == "__main__":
    main()
