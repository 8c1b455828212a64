"""Kernels that add up integers: by the interpreter, on a GPU, and compiled for one."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from clipless.kernels.exact import _weights
from clipless.kernels.exact._products import Windows
from tests.kernels.exact.rows import unusual_rows

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_interpreted_kernels_are_the_twin():
    pytest.importorskip("triton", reason="Triton is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.exact.interpreted"],
        env=dict(os.environ, TRITON_INTERPRET="1"), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.stdout.strip() == "all is exact", done.stderr[-2000:]


@pytest.fixture
def untried(monkeypatch):
    monkeypatch.setattr(_weights, "_KINDS", {"cpu": None})


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(("works", "chosen"), [("float16", "float16"), ("int8", "int8")])
def test_the_first_kind_of_products_that_is_exact_is_taken(monkeypatch, works, chosen):
    monkeypatch.setattr(_weights, "sums_are_exact", lambda device, kind: kind == works)
    assert _weights.prepare_integer_sums("cuda") == chosen
    assert _weights.prepare_integer_sums("cpu") is None


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("fails", [False, True])
def test_a_device_that_does_not_add_up_integers_is_named_once(monkeypatch, fails):
    def exact(device, kind):
        if fails:
            raise RuntimeError("an old GPU")
        return False

    monkeypatch.setattr(_weights, "sums_are_exact", exact)
    with pytest.warns(UserWarning, match="an old GPU" if fails else "were not exact"):
        assert _weights.prepare_integer_sums("cuda") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _weights.prepare_integer_sums("cuda") is None
    assert _weights.prepare_integer_sums("mps") is None


def test_kernels_that_compute_something_else_are_found_out_at_first_use(monkeypatch):
    """Off by one in one entry of the sum, of one row's product."""
    monkeypatch.setattr(_weights, "_KINDS", {"cpu": "int8"})
    monkeypatch.setattr(_weights, "_COMPARED", set())
    right = _weights._by_torch
    calls = []

    def wrong(cotangent, x, what, shares, kind):
        total, outside = right(cotangent, x, what, shares)
        calls.append(len(x))
        total[0, 0, 0, 0, 0] += wrong.by
        return total, outside

    monkeypatch.setattr(_weights, "_by_kernels", wrong)
    x, cotangent = torch.randn(20, 5), torch.randn(20, 3)
    wrong.by = 0
    for _ in range(2):
        _weights.integer_linear_weight(cotangent, x, limit=1.0, shares=None)
    assert calls == [4, 20, 20]  # compared once
    wrong.by = 1
    with pytest.raises(RuntimeError, match="compute something else"):
        _weights.integer_linear_weight(cotangent[:, :2], x, limit=1.0, shares=None)


@gpu
@pytest.mark.parametrize("kind", ["float16", "int8"])
def test_a_gpu_adds_up_the_largest_operands_without_error(kind):
    assert _weights.sums_are_exact("cuda", kind)


@gpu
@pytest.mark.parametrize("kind", ["float16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize(
    ("inputs", "outputs", "size", "windows", "groups"),
    [
        (3, 32, 32, Windows((3, 3), padding=(1, 1)), 1),
        (32, 64, 16, Windows((3, 3), padding=(1, 1)), 1),
        (64, 128, 8, Windows((3, 3), (2, 2), (1, 1)), 1),
        (12, 8, 9, Windows((5, 1), (1, 1), (2, 0), (1, 1)), 4),
        (130, 70, 1, Windows(), 1),
    ],
)
def test_kernels_on_a_gpu_are_the_twin(inputs, outputs, size, windows, groups, layout, dtype, kind):
    padded = [size + 2 * p for p in windows.padding]
    found = [(n - k) // s + 1 for n, k, s in zip(padded, windows.size, windows.stride, strict=True)]
    x = unusual_rows(torch.randn(40, inputs, size, size)).cuda().to(dtype)
    cotangent = unusual_rows(torch.randn(40, outputs, *found)).flip(0).cuda().to(dtype)
    x, cotangent = (each.to(memory_format=layout) for each in (x, cotangent))
    for limit in (1e-2, 1e3):
        what = _weights._described(cotangent, x, windows, groups, limit, multiple=16)
        mine = _weights._by_kernels(cotangent, x, what, None, kind)
        twin = _weights._by_torch(cotangent, x, what, None)
        assert torch.equal(mine[0], twin[0])
        assert torch.equal(mine[1], twin[1])


@gpu
@pytest.mark.parametrize("rows", [16_384, 65_536])
def test_on_a_gpu_no_order_moves_a_sum_by_more_than_the_bound(rows):
    from clipless.kernels import sum_slack
    from tests.kernels.test_sums import layers, moved

    with torch.device("cuda"):
        found = {kind: moved(layer, rows) for kind, layer in layers(rows).items()}
    assert max(found.values()) <= 1 + 1e-4 + sum_slack(positions=4, rows=rows), found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["float16", "int8"])
def test_kernels_compile_for_an_h200_without_spilling(kind, monkeypatch, tmp_path):
    """Compiled here, without a GPU: registers, and shared memory of which a block has 227 KB."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    from clipless.kernels.exact import _triton_exact as kernels
    from clipless.kernels.exact._grid import Layout, grid_of

    names = {
        torch.float32: "fp32", torch.int8: "i8", torch.float16: "fp16", torch.int64: "i64",
    }  # fmt: skip
    made = []

    def compiled(kernel, grid, tensors, numbers, constants, options):
        signature, fixed, attributes = {}, {}, {}
        for place, (name, value) in enumerate(
            zip(kernel.arg_names, [*tensors, *numbers, *constants], strict=True)
        ):
            if isinstance(value, torch.Tensor):
                signature[name] = "*" + names[value.dtype]
            elif place >= len(tensors) + len(numbers):
                signature[name], fixed[(place,)] = "constexpr", value
            else:
                whole = "i64" if isinstance(value, int) and value >> 31 else "i32"
                signature[name] = "fp32" if isinstance(value, float) else whole
            if isinstance(value, torch.Tensor):
                attributes[(place,)] = [["tt.divisibility", 16]]
        source = triton.compiler.ASTSource(kernel, signature, constexprs=fixed, attrs=attributes)
        target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
        made.append(triton.compile(source, target=target, options=dict(options)))

    monkeypatch.setattr(kernels, "_launch", compiled)
    x = torch.empty(512, 64, 8, 8, device="meta").to(memory_format=torch.channels_last)
    cotangent = torch.empty(512, 128, 8, 8, device="meta").to(memory_format=torch.channels_last)
    of_x, of_cotangent = Layout(1, 64, 16), Layout(1, 128, 16)
    dtype = getattr(torch, kind)
    columns, multipliers, squares = kernels.round_inputs(
        x, padding=(1, 1), layout=of_x, counts=None, kind=dtype
    )
    grid = grid_of(limit=1.0, inputs=64 * 64 * 9, outputs=128 * 64)
    limbs, _ = kernels.round_cotangents(
        cotangent, multipliers, squares, grid, None, layout=of_cotangent, kind=dtype
    )
    total = torch.empty(1, 2, 128, 3, 3, 64, dtype=torch.int64, device="meta")
    kernels.multiply(limbs, columns, Windows((3, 3), padding=(1, 1)), total)
    assert len(made) == 3
    assert all(each.metadata.shared <= 227 * 1024 for each in made)
    code = made[-1].asm["ptx"]
    assert "wgmma.mma_async.sync.aligned" in code
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    for each in made:
        (tmp_path / "kernel.cubin").write_bytes(each.asm["cubin"])
        usage = subprocess.run(
            [tool, "-res-usage", tmp_path / "kernel.cubin"], capture_output=True, text=True
        ).stdout
        assert "STACK:0 " in usage, usage
    assert ("s32.s8.s8" if kind == "int8" else "f32.f16.f16") in code
