"""Lower precision: what rounding can add to one example's gradient is covered, and needed."""

import contextlib
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

import clipless
from clipless import losses
from clipless import nn as lip
from clipless.errors import ConstraintError, PrivacyError
from clipless.kernels import bounded_linear, sum_slack, to_bfloat16
from clipless.privacy import Plan, arithmetic_slack
from clipless.privacy._precision import UNITS, WEIGHT_ROOM, SumRounding, sum_rounding
from clipless.privacy.step._checks import check_precision, check_sums
from clipless.privacy.step._rounded_weights import RoundedWeights, _norm_bound
from tests.models import small
from tests.privacy.misuse_helpers import bounded_or_refused, gradients_of, refused
from tests.privacy.runs import SHAPES, Run, cnn, examples, mlp, residual


def slack_of(model, precision, shape=(6,)):
    report = clipless.sensitivity(model, loss=losses.CrossEntropy(), input_shape=shape)
    return arithmetic_slack(torch.float32, precision=precision, report=report)


# --- the slack -----------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [mlp, cnn, residual], ids=lambda b: b.__name__)
def test_lower_precision_means_more_slack(build):
    model = build()
    found = [slack_of(model, p, SHAPES[build]) for p in ("float32", "tf32", "bfloat16")]
    assert found[0] == 1e-3
    assert found[0] < found[1] < found[2] < 0.1
    for precision, slack in zip(("float32", "tf32", "bfloat16"), found, strict=True):
        plan = Run(build(), examples(100, SHAPES[build]), precision=precision).engine.plan
        assert plan.arithmetic_slack == slack
        assert plan.precision == precision
        assert Plan.from_dict(plan.to_dict()) == plan
        assert precision in str(plan)


def test_slack_in_closed_form():
    """Two products and a pooling, by hand."""
    model = nn.Sequential(
        lip.BoundedInput(1.0), lip.SpectralConv2d(1, 4, 2), lip.GroupSort(2),
        lip.ScaledL2NormPool2d(3), nn.Flatten(), lip.SpectralLinear(4, 3),
    )  # fmt: skip
    u = UNITS["bfloat16"]
    products = ((1 + WEIGHT_ROOM) / (1 - u)) ** 2
    expected = 1.001 * (1 + u) ** 2 * products * (1 - u) ** -2 - 1
    assert slack_of(model, "bfloat16", (1, 4, 4)) == pytest.approx(expected, rel=1e-12)
    u = UNITS["tf32"]
    products = (1 + u * math.sqrt(4)) * (1 + u * math.sqrt(3)) / (1 - u) ** 2
    expected = 1.001 * (1 + u) ** 2 * products - 1
    assert slack_of(model, "tf32", (1, 4, 4)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("size", [4, 16, 64, 100])
def test_the_slack_of_sums_follows_from_positions_and_rows(size, monkeypatch):
    """The formula of docs/arithmetic.md; a part has as many rows as its rounding allows."""
    model = nn.Sequential(
        lip.BoundedInput(1.0), lip.SpectralConv2d(1, 2, 3, padding="same"), nn.Flatten(),
        lip.SpectralLinear(2 * size**2, 2),
    )  # fmt: skip
    report = clipless.sensitivity(model, loss=1.0, input_shape=(1, size, size))

    def rounding(rows, device="cpu", dtype=torch.float32):
        return sum_rounding(report, rows=rows, dtype=dtype, device=device)

    positions = size**2
    alone = positions > 1024
    at_once = 1 if alone else math.isqrt(4096 // positions)
    own = positions if alone else 2 * at_once**2 * positions
    own = min(own, 8192) * 2.0**-24  # what is longer is summed in float64 altogether
    found = rounding(1000)
    assert own < found.slack < 1.01 * own + 1e-8 or found.slack == sum_slack(
        positions=1, rows=1000
    )  # fmt: skip
    assert found.slack >= own
    assert found.uncovered == 0
    assert rounding(10**6).slack > found.slack
    ways = {"cpu": None, "cuda": None}
    monkeypatch.setattr("clipless.kernels.exact._weights._KINDS", ways)
    assert rounding(1000, "cuda").uncovered == 2 * 1000**2 * positions * 2.0**-24
    ways["cuda"] = "float16"  # integers
    assert rounding(1000, "cuda") == SumRounding(1000 * 1002 * 2.0**-52)
    assert arithmetic_slack(torch.float32, sums=rounding(65_536, "cuda")) == 1e-3
    assert rounding(1000, "cuda", dtype=torch.float64).uncovered == 0
    several = sum_rounding(report, rows=1000, dtype=torch.float32, device="cuda", processes=8)
    assert several.uncovered == 0
    assert several.slack == pytest.approx(16_000 * 2.0**-24, rel=0.01)
    assert rounding(1000, dtype=torch.float64).slack < 1e-4 * size
    plain = arithmetic_slack(torch.float32, report=report, sums=found)
    assert max(1e-3, found.slack) <= plain <= max(1e-3, 1.0001 * found.slack + 5.1e-4)


def test_operations_that_nobody_has_counted_are_refused():
    model = nn.Sequential(lip.BoundedInput(1.0), lip.GroupNormalize(2, floor=1.0), nn.Flatten(),
                          lip.SpectralLinear(4, 3))  # fmt: skip
    assert slack_of(model, "tf32", (4,)) > 1e-3
    with refused("GroupNormalize", "float32"):
        slack_of(model, "bfloat16", (4,))

    class Odd(nn.Module):
        def forward(self, x):
            return x @ torch.eye(6)

    @clipless.bounds.register(Odd)
    def odd(site, x):
        return clipless.bounds.Bound(lipschitz=1.0, output=x.norm, rows_apart=True)

    try:
        for precision in ("tf32", "bfloat16"):
            with refused("Odd", precision):
                Run(nn.Sequential(lip.BoundedInput(1.0), Odd(), lip.SpectralLinear(6, 3)),
                    precision=precision)  # fmt: skip
    finally:
        clipless.bounds.unregister(Odd)


SLACKS = {
    "mlp": (0.0066991344097866445, 0.024722516815056217),
    "lenet": (0.01418010245419321, 0.05728313476134517),
    "vgg": (0.019963512435092312, 0.07393300681048953),
    "resnet": (0.019697139726060797, 0.07393300681048953),
    "mixer": (0.02574674774634733, 0.05725086928684764),
}
"""What the models of `clipless.models` had, in TF32 and bfloat16, before rules stated roundings."""


@pytest.mark.parametrize("name", SLACKS)
def test_the_slack_of_the_models_is_what_it_was(name):
    config = small.config(name, small.DEFAULT, classes=10)
    model = clipless.models.build(config)
    found = [slack_of(model, p, config.input_shape) for p in ("float32", "tf32", "bfloat16")]
    assert found == pytest.approx([1e-3, *SLACKS[name]], rel=0, abs=1e-12)


class Halve(nn.Module):
    def forward(self, x):
        return x / 2


class Turn(nn.Module):
    """A product with a fixed orthogonal matrix."""

    def __init__(self):
        super().__init__()
        self.register_buffer("matrix", torch.linalg.qr(torch.randn(8, 8))[0])

    def forward(self, x):
        return F.linear(x, self.matrix)


@contextlib.contextmanager
def stated(kind, lipschitz, roundings):
    @clipless.bounds.register(kind)
    def own(site, x):
        return clipless.bounds.Bound(
            lipschitz, lipschitz * x.norm, roundings=roundings, rows_apart=True
        )

    try:
        yield
    finally:
        clipless.bounds.unregister(kind)


@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "lipschitz", "roundings"),
    [(Halve, 0.5, 3), (Turn, 1.0 + 1e-5, clipless.bounds.Product(rank=8, terms=8))],
)
def test_a_layer_of_ones_own_trains_if_its_rule_states_roundings(
    kind, lipschitz, roundings, precision
):
    u = UNITS[precision]
    layers = (lip.BoundedInput(1.0), lip.SpectralLinear(6, 8), lip.SpectralLinear(8, 3))
    with stated(kind, lipschitz, roundings):
        run = Run(nn.Sequential(layers[0], layers[1], kind(), layers[2]), precision=precision)
        own = (1 + u * math.sqrt(8)) / (1 - u)
        if kind is Halve:
            own = 1.0 if precision == "tf32" else (1 - u) ** -3
        without = slack_of(nn.Sequential(*layers), precision)
        expected = (1 + without) * own - 1
        assert run.engine.plan.arithmetic_slack == pytest.approx(expected, rel=1e-12)
        before = layers[1].weight.detach().clone()
        run.steps(2)
        assert not layers[1].weight.equal(before)
    with stated(kind, lipschitz, None), refused(kind.__name__, precision):
        Run(nn.Sequential(layers[0], layers[1], kind(), layers[2]), precision=precision)


def test_a_name_inherits_nothing():
    """A function called `relu` that takes products, with a rule that says nothing of rounding."""

    def relu(x):
        return x @ torch.eye(6)

    model = nn.Sequential(lip.BoundedInput(1.0), Calls(relu), lip.SpectralLinear(6, 3))
    with stated(relu, 1.0, None):
        report = clipless.sensitivity(model, loss=1.0, input_shape=(6,))
        assert report.nodes[1].operation == "relu"
        for precision in ("tf32", "bfloat16"):
            with refused("relu", precision):
                slack_of(model, precision)


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return leaf(self.function, x)


def leaf(function, x):
    """Call a function as one operation of the graph, where there is one."""
    if isinstance(x, fx.Proxy):
        return x.tracer.create_proxy("call_function", function, (x,), {})
    return function(x)


def test_a_fixed_matrix_rounds_like_a_weight():
    layers = (lip.SpectralLinear(6, 8), lip.ChannelMix(torch.eye(8)), lip.SpectralLinear(8, 3))
    plain = nn.Sequential(lip.BoundedInput(1.0), layers[0], layers[2])
    mixed = nn.Sequential(lip.BoundedInput(1.0), *layers)
    for precision in ("tf32", "bfloat16"):
        u = UNITS[precision]
        growth = (1 + slack_of(mixed, precision)) / (1 + slack_of(plain, precision))
        assert growth == pytest.approx((1 + u * math.sqrt(8)) / (1 - u), rel=1e-12)
    first = nn.Sequential(lip.ChannelMix(torch.eye(6)), *plain)  # before the guard it is free
    assert slack_of(first, "bfloat16") == slack_of(plain, "bfloat16")


def test_arguments():
    with pytest.raises(ValueError, match="precision must be one of"):
        Run(precision="float16")
    with pytest.raises(ValueError, match="parameters in float32"):
        Run(mlp().double(), tuple(t.double() if t.is_floating_point() else t for t in examples(50)),
            precision="bfloat16")  # fmt: skip
    with pytest.raises(ValueError, match="not supported"):
        arithmetic_slack(torch.bfloat16)


def test_a_model_that_changes_gets_its_new_slack():
    run = Run(precision="bfloat16").steps(1)
    before = run.engine.plan.arithmetic_slack
    run.model[2] = nn.Tanh()
    run.steps(1)
    assert run.engine.plan.arithmetic_slack > before


# --- what may be on ------------------------------------------------------------------------------


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU, for checks that read nothing else of it."""

    device = torch.device("cuda")


@contextlib.contextmanager
def flag(place, name, value):
    """A setting of torch for a while. (They are no attributes that monkeypatch could restore.)"""
    before = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, before)


def test_tf32_needs_its_precision():
    inputs = (torch.zeros(2, 3).as_subclass(OnGpu),)
    reduction = "allow_bf16_reduced_precision_reduction"
    with flag(torch.backends.cudnn, "allow_tf32", True):
        with flag(torch.backends.cuda.matmul, reduction, False):
            with refused("precision='tf32'"):
                check_precision(inputs, "float32")
            check_precision(inputs, "tf32")
            check_precision(inputs, "bfloat16")
        with flag(torch.backends.cuda.matmul, reduction, True):
            check_precision(inputs, "tf32")
            with refused(f"{reduction} = False"):
                check_precision(inputs, "bfloat16")


@pytest.mark.parametrize("kind", [None, "float16"])
def test_a_model_that_is_moved_keeps_what_its_plan_says_of_sums(monkeypatch, kind):
    """From a CPU to a GPU where convolutions would be summed in float32."""
    monkeypatch.setattr("clipless.kernels.exact._weights._KINDS", {"cuda": kind})
    session = Run(cnn(), examples(30, SHAPES[cnn])).engine.session
    plan, report = session.plan, session.report
    there = [torch.zeros(shape).as_subclass(OnGpu) for shape in ((2, 3), (2, 3, 3, 3))]
    check_sums(there[:1], plan, report)
    check_sums([each.double() for each in there], plan, report)
    with contextlib.nullcontext() if kind else refused("moved to cuda"):
        check_sums(there, plan, report)
    uncovered = dataclasses.replace(plan, sums=SumRounding(0.0, 3.0))
    check_sums(there, uncovered, report)


def test_autocast_needs_its_precision():
    inputs = (torch.zeros(2, 3),)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for precision in ("float32", "tf32"):
            with refused("autocast is on"):
                check_precision(inputs, precision)
        check_precision(inputs, "bfloat16")
    with torch.autocast("cpu", dtype=torch.float16), refused("autocast is on"):
        check_precision(inputs, "bfloat16")


@pytest.mark.skipif(not hasattr(torch.backends.mkldnn, "matmul"), reason="since torch 2.7 or later")
def test_float32_products_in_bfloat16_on_the_cpu():
    with flag(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"):
        with refused("'highest'"):
            check_precision((torch.zeros(2, 3),), "tf32")
        check_precision((torch.zeros(2, 3),), "bfloat16")


def test_losses_and_gradients_are_not_rounded_to_bfloat16():
    run = Run(precision="bfloat16", noise_multiplier=0.0)
    x, y = run.batch()
    output = run.model(x)
    assert output.dtype == torch.float32
    assert output.equal(output.bfloat16().float())
    with torch.autocast("cpu", dtype=torch.bfloat16):  # as people are used to write it
        loss = run.criterion(output, y)
        assert loss.dtype == torch.float32
        loss.backward()
    assert not torch.is_autocast_enabled("cpu")
    assert {g.dtype for g in run.gradients().values()} == {torch.float64}  # sums, before noise
    run.optimizer.step()
    assert {p.grad.dtype for p in run.model.parameters()} == {torch.float32}
    run.model.eval()
    assert run.model(x).dtype == torch.float32


def test_autocast_ends_with_the_forward_pass():
    run = Run(precision="bfloat16")
    x, _ = run.batch()
    run.model[2].forward = None  # fails in the middle
    with pytest.raises((TypeError, clipless.errors.CliplessError)):
        run.model(x)
    assert not torch.is_autocast_enabled("cpu")


# --- bfloat16: gradients of weights --------------------------------------------------------------


@pytest.mark.parametrize("positions", [(), (5,)])
def test_weight_gradients_are_sums_in_float32(positions):
    x, weight = torch.randn(4096, *positions, 32), torch.randn(8, 32, requires_grad=True)
    bias = torch.randn(8, requires_grad=True)
    cotangent = torch.randn(4096, *positions, 8).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = bounded_linear(to_bfloat16(x), weight, bias, {})
        assert output.dtype == torch.bfloat16
        output.backward(cotangent)
    rows, columns = cotangent.double().flatten(0, -2), x.bfloat16().double().flatten(0, -2)
    assert (weight.grad - rows.T @ columns).norm() < 1e-5 * (rows.T @ columns).norm()
    assert (bias.grad - rows.sum(0)).norm() < 1e-5 * rows.sum(0).norm()


def test_autocast_of_torch_would_round_everybody():
    """Why: there, an example moves the sum by much more than its own gradient."""
    x, cotangent = torch.ones(5000, 1), torch.ones(5000, 1).bfloat16()
    sums = {}
    for rows in (4999, 5000):
        for name in ("torch", "here"):
            weight = torch.zeros(1, 1, requires_grad=True)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                if name == "torch":
                    output = F.linear(x[:rows], weight)
                else:
                    output = bounded_linear(to_bfloat16(x[:rows]), weight, None, {})
            output.backward(cotangent[:rows])
            sums[name, rows] = weight.grad.item()
    assert sums["here", 5000] - sums["here", 4999] == 1
    jumps = set()
    for rows in range(4900, 5000):
        weight = torch.zeros(1, 1, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = F.linear(x[:rows], weight)
        output.backward(cotangent[:rows])
        jumps.add(weight.grad.item())
    assert max(jumps) - min(jumps) >= 32
    assert len(jumps) < 20


@pytest.mark.parametrize("product_clip", [False, True])
def test_convolutions_agree_with_float64_up_to_rounding(product_clip):
    layer = lip.SpectralConv2d(3, 6, 3, padding="same", stride=2, bias=True)
    if product_clip:
        layer.weight_clip = 0.5
    reference = lip.SpectralConv2d(3, 6, 3, padding="same", stride=2, bias=True).double()
    reference.load_state_dict(layer.double().state_dict())
    reference.weight_clip = layer.weight_clip
    layer.float()
    x, cotangent = torch.randn(8, 3, 8, 8).bfloat16(), torch.randn(8, 6, 4, 4).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(x)
    output.backward(cotangent)
    reference(x.double()).backward(cotangent.double())
    for name, parameter in layer.named_parameters():
        expected = reference.get_parameter(name).grad
        # Operands are exact here, so that only sums in float32 are left.
        assert (parameter.grad - expected).norm() < 1e-5 * expected.norm(), name


# --- one example against its bound ---------------------------------------------------------------


def rounded_up(precision):
    """A network whose example rounds up in all its entries, and reaches its bound."""
    x = torch.full((1, 256), 0.06276)
    model = nn.Sequential(
        lip.BoundedInput(x.norm().item()), lip.SpectralLinear(256, 2, norm=500.0, constraint="ball")
    )
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[1.0], [-1.0]]).expand(2, 256))
    run = Run(
        model, (x, torch.tensor([1])), batch_size=1, sampling="full_batch", noise_multiplier=0.0,
        precision=precision,
    )  # fmt: skip
    run.step()
    return gradients_of(model)["1.weight"].norm().item(), run.engine.plan


def test_the_slack_is_needed_and_enough():
    norm, plan = rounded_up("bfloat16")
    bound = plan.parameters[0].gradient_bound
    assert 1.001 * bound < norm <= plan.sensitivities["1.weight"]
    norm, plan = rounded_up("float32")
    assert norm <= plan.sensitivities["1.weight"]


@pytest.mark.parametrize("build", [mlp, cnn, residual], ids=lambda b: b.__name__)
def test_neighbours_stay_within_their_sensitivity(build, monkeypatch):
    monkeypatch.setattr(
        "tests.privacy.misuse_helpers.Run",
        lambda *a, **k: Run(*a, **{**k, "precision": "bfloat16"}),
    )
    assert not bounded_or_refused(lambda run: run.step(), build=build, shape=SHAPES[build])


class Tf32(TorchDispatchMode):
    """Products whose operands are cut or rounded to 11 bits, forward and backward."""

    products = (
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.convolution.default,
        torch.ops.aten.convolution_backward.default,
    )

    def __init__(self, cut):
        super().__init__()
        self.cut, self.count = cut, 0

    def round(self, value):
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
            return value
        bits = value.contiguous().view(torch.int32)
        bits = bits if self.cut else bits + 0x0FFF + ((bits >> 13) & 1)
        return (bits & ~0x1FFF).view(torch.float32)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in self.products:
            self.count += 1
            args = tuple(map(self.round, args))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("build", [mlp, cnn], ids=lambda b: b.__name__)
def test_tf32_within_its_sensitivity(build, cut):
    """Single examples of many kinds, on weights that were trained for a while."""
    x, y = examples(24, SHAPES[build])
    x[0], x[1] = 0.06276, x[1] * 100
    run = Run(
        build(), (x, y), losses.CrossEntropy(tau=50.0), batch_size=24, sampling="full_batch",
        noise_multiplier=0.5, precision="tf32",
    )  # fmt: skip
    sensitivities = run.engine.plan.sensitivities
    largest = dict.fromkeys(sensitivities, 0.0)
    for row in range(8):
        mode = Tf32(cut)
        batch, labels = run.batch()
        weights = torch.zeros(24)
        weights[row] = 1.0
        object.__setattr__(run.loader.current, "weights", weights)
        with mode:
            run.backward(batch, labels)
        assert mode.count >= 4
        for name, gradient in run.gradients().items():
            largest[name] = max(largest[name], gradient.norm().item() / sensitivities[name])
        run.optimizer.step()
    assert all(0 < ratio <= 1 for ratio in largest.values()), largest


# --- weights that round ------------------------------------------------------------------------


def growing(size=256):
    """A matrix of norm one whose rounding to bfloat16 has norm 1 + 3u, nearly."""
    unit = UNITS["bfloat16"]
    matrix = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))[0]
    b = F.normalize(torch.randn(size, dtype=torch.float64), dim=0)
    target = (matrix @ (torch.eye(size) + 3.5 * unit * torch.outer(b, b))).bfloat16().double()
    direction = torch.outer(matrix @ b, b).sign()
    spacing = torch.ldexp(torch.ones_like(target), torch.frexp(target.abs()).exponent - 8)
    moved = (target - 0.49 * spacing * direction).float()
    moved = torch.where(moved.bfloat16().double() == target, moved, target.float())
    assert moved.bfloat16().double().equal(target)
    return moved


def test_rounded_weights_are_certified():
    weight = growing()
    norm = torch.linalg.matrix_norm(weight.double(), 2).item() * (1 + 1e-6)
    rounded = torch.linalg.matrix_norm(weight.bfloat16().double(), 2).item()
    assert rounded > norm * (1 + 1.5 * WEIGHT_ROOM)
    layer = lip.SpectralLinear(256, 256, norm=norm, constraint="ball")
    with torch.no_grad():
        layer.weight.copy_(weight)
    assert layer.certificate().holds
    model = nn.Sequential(lip.BoundedInput(1.0), layer)
    weights = RoundedWeights(model)
    with pytest.raises(ConstraintError, match=r"1\.weight: rounded to bfloat16"):
        weights.check()
    weights.restore()
    weights.check()
    rounded = torch.linalg.matrix_norm(layer.weight.bfloat16().double(), 2).item()
    assert rounded <= norm * (1 + WEIGHT_ROOM)
    before = layer.weight.detach().clone()
    weights.restore()
    assert layer.weight.equal(before)


def test_a_run_keeps_rounded_weights_in_their_sets():
    model = nn.Sequential(
        lip.BoundedInput(1.0), lip.SpectralConv2d(1, 4, 3, padding="same", groups=1),
        lip.GroupSort(2), nn.Flatten(), lip.SpectralLinear(64, 8, constraint="ball"),
        lip.GroupSort(2), lip.FrobeniusLinear(8, 3),
    )  # fmt: skip
    run = Run(model, examples(60, (1, 4, 4)), precision="bfloat16", lr=1.0).steps(3)
    for layer in (model[1], model[4]):
        scale = getattr(layer, "scale", 1.0)
        rounded = (layer.weight.detach() * scale).bfloat16().double() / scale
        norm = torch.linalg.matrix_norm(rounded.flatten(1), 2)
        assert norm <= 1 + WEIGHT_ROOM
    with torch.no_grad():
        model[4].weight.mul_(0.5)
    run.step()  # certified again, rounded and not


def test_edited_weights_must_round_well_too():
    weight = growing()
    norm = torch.linalg.matrix_norm(weight.double(), 2).item() * (1 + 1e-6)
    model = nn.Sequential(
        lip.BoundedInput(1.0), lip.SpectralLinear(256, 256, norm=norm, constraint="ball"),
        lip.GroupSort(2), lip.SpectralLinear(256, 3),
    )  # fmt: skip
    run = Run(model, examples(40, (256,)), precision="bfloat16").steps(1)
    with torch.no_grad():
        model[1].weight.copy_(weight)
    with refused("rounded to bfloat16", error=ConstraintError):
        run.step()


@given(
    rows=st.integers(1, 12),
    columns=st.integers(1, 12),
    rank=st.integers(1, 12),
    scale=st.sampled_from([1e-8, 1.0, 1e6]),
    seed=st.integers(0, 2**16),
)
def test_the_bound_of_rounded_weights_is_one(rows, columns, rank, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(2, rows, rank, generator=generator, dtype=torch.float64)
    right = torch.randn(2, rank, columns, generator=generator, dtype=torch.float64)
    matrices = scale * left @ right
    norms = torch.linalg.matrix_norm(matrices, 2)
    bounds = _norm_bound(matrices)
    assert (bounds >= norms * (1 - 1e-12)).all()
    assert (bounds <= 2 * norms + 1e-12 * scale).all()


def test_the_bound_is_tight_near_orthogonal_matrices():
    matrix = torch.linalg.qr(torch.randn(64, 64, dtype=torch.float64))[0].bfloat16().double()
    norm = torch.linalg.matrix_norm(matrix, 2)
    assert norm <= _norm_bound(matrix[None])[0] <= norm * 1.001


def test_refusals_are_those_of_float32():
    run = Run(precision="bfloat16")
    x, y = run.batch()
    run.backward(x, y)
    with pytest.raises(PrivacyError, match="once"):
        run.backward(x, y)


@pytest.mark.parametrize(
    ("name", "value", "precisions"),
    [
        ("ONEDNN_DEFAULT_FPMATH_MODE", "BF16", ("float32", "tf32", "bfloat16")),
        ("DNNL_DEFAULT_FPMATH_MODE", "any", ("float32", "tf32", "bfloat16")),
        ("NVIDIA_TF32_OVERRIDE", "1", ("float32",)),
        ("CUBLAS_EMULATE_SINGLE_PRECISION", "1", ("float32", "tf32", "bfloat16")),
        ("CUBLAS_EMULATE_DOUBLE_PRECISION", "1", ("float32", "tf32", "bfloat16")),
        ("CUBLAS_EMULATION_STRATEGY", "eager", ("float32", "tf32", "bfloat16")),
    ],
)
def test_the_environment_does_not_round_behind_our_back(monkeypatch, name, value, precisions):
    inputs = (torch.zeros(2, 2),)
    monkeypatch.setenv(name, value)
    for precision in ("float32", "tf32", "bfloat16"):
        context = contextlib.nullcontext()
        if precision in precisions:
            context = pytest.raises(PrivacyError, match=name)
        with context:
            check_precision(inputs, precision)
    monkeypatch.setenv(name, "STRICT" if "FPMATH" in name else "0")
    check_precision(inputs, "float32")
