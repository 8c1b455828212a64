"""What cannot be proved is refused: by exact type, with the place, the reason and the remedy.

Every refusal names the path of the module (or the function, the module whose code calls it and the
line), and says what to do. Where a rule is missing, it shows the three lines that register one.
This file is about code; parameters, weights, guards and conditions of layers are next door.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from clipless import nn as lip
from tests.bounds.refused import Code, assert_shows_how_to_register, guarded, refusal, report_of

# Modules ---------------------------------------------------------------------------------------


class QuietBatchNorm(nn.BatchNorm1d):
    """The subclass that slips past checks by name."""


class MyReLU(nn.ReLU):
    def forward(self, x):
        return 100 * x


class MyLinear(lip.SpectralLinear):
    def forward(self, x):
        return 100 * super().forward(x)


class MyGuard(lip.BoundedInput):
    pass


@pytest.mark.parametrize(
    ("module", "shape", "reason"),
    [
        (nn.BatchNorm1d(4), (4,), "mixes examples"),
        (nn.BatchNorm1d(4, affine=False), (4,), "mixes examples"),
        (nn.BatchNorm1d(4, track_running_stats=False).eval(), (4,), "mixes examples"),
        (nn.BatchNorm2d(4), (4, 3, 3), "mixes examples"),
        (nn.BatchNorm3d(4), (4, 3, 3, 3), "mixes examples"),
        (nn.SyncBatchNorm(4), (4,), "mixes examples"),
        (QuietBatchNorm(4), (4,), "mixes examples"),
        (nn.LayerNorm(4), (4,), "standard deviation"),
        (nn.GroupNorm(2, 4), (4,), "standard deviation"),
        (nn.Linear(4, 4), (4,), "clipless.nn.SpectralLinear"),
        (nn.Conv1d(4, 4, 1), (4, 3), "clipless.nn.SpectralConv1d"),
        (nn.Conv2d(4, 4, 1), (4, 3, 3), "clipless.nn.SpectralConv2d"),
        (nn.Embedding(4, 4), (4,), "clipless.nn.Embedding"),
        (MyReLU(), (4,), "subclass of ReLU"),
        (MyLinear(4, 4), (4,), "subclass of SpectralLinear"),
        (MyGuard(1.0), (4,), "subclass of BoundedInput"),
        (nn.Softmax(dim=1), (4,), "no rule for this module"),
        (nn.Bilinear(4, 4, 4), (4,), "no rule for this module"),
        (nn.LSTM(4, 4), (3, 4), "no rule for this module"),
        (nn.MultiheadAttention(4, 2), (3, 4), "no rule for this module"),
        (nn.RMSNorm(4), (4,), "no rule for this module"),
        (nn.Conv3d(4, 4, 1), (4, 3, 3, 3), "no rule for this module"),
        (nn.MaxPool3d(1), (4, 3, 3, 3), "no rule for this module"),
        (nn.AlphaDropout(), (4,), "no rule for this module"),
        (nn.PReLU(), (4,), "no rule for this module"),
        (nn.ReflectionPad1d(1), (4, 3), "no rule for this module"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_modules_without_a_rule(module, shape, reason):
    line = (lambda m, x: m.layers[0](x, x)) if isinstance(module, nn.Bilinear) else None
    if isinstance(module, nn.MultiheadAttention):
        line = lambda m, x: m.layers[0](x, x, x)  # noqa: E731
    block = Code(line or (lambda m, x: m.layers[0](x)), module)
    message = refusal(guarded(nn.Sequential(nn.Identity(), block)), shape)
    assert message.startswith(f"1.1.layers.0 ({type(module).__name__}): ")
    assert reason in message
    assert_shows_how_to_register(message, type(module).__name__)


def test_layers_without_their_parameters_yet():
    message = refusal(guarded(nn.LazyBatchNorm1d()))
    assert "1 (LazyBatchNorm1d)" in message


def test_instance_norm_is_refused_for_its_own_reason():
    """It does not mix examples; it divides by a standard deviation, like layer normalisation."""
    message = refusal(guarded(nn.InstanceNorm1d(4)), (4, 5))
    assert "standard deviation" in message


def test_a_user_container_is_no_subclass_of_a_layer():
    class Tower(nn.Sequential):
        def forward(self, x):
            return super().forward(x) * 3.0

    assert report_of(guarded(Tower(lip.MaxMin()))).lipschitz == pytest.approx(3.0)


@pytest.mark.parametrize("module", [nn.BatchNorm1d(4), nn.LayerNorm(4), nn.Linear(4, 4)])
def test_a_lone_layer_is_refused_as_well(module):
    refusal(module, input_norm=1.0)


def test_a_layer_outside_the_registered_modules_is_refused():
    hidden = lip.SpectralLinear(4, 4)
    message = refusal(guarded(Code(lambda m, x: m.hidden[0](x), hidden=[hidden])))
    assert "submodule" in message


# Functions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "function"),
    [
        (lambda m, x: torch.softmax(x, 1), "softmax"),
        (lambda m, x: x.softmax(1), "softmax"),
        (lambda m, x: F.log_softmax(x, 1), "log_softmax"),
        (lambda m, x: torch.exp(x), "exp"),
        (lambda m, x: x**2, "pow"),
        (lambda m, x: x.cumsum(1), "cumsum"),
        (lambda m, x: x @ torch.ones(4, 4), "matmul"),
        (lambda m, x: F.linear(x, torch.ones(4, 4)), "linear"),
        (lambda m, x: F.normalize(x), "normalize"),
        (lambda m, x: F.layer_norm(x, (4,)), "layer_norm"),
        (lambda m, x: x.repeat(1, 2), "repeat"),
        (lambda m, x: x.expand(-1, 4), "expand"),
        (lambda m, x: x.max(dim=1)[0], "max"),
        (lambda m, x: x.clamp(-1, 1), "clamp"),
        (lambda m, x: torch.where(x > 0, x, -x), "gt"),
        (lambda m, x: F.pad(x, (1, 1)), "pad"),
        (lambda m, x: x.T, "getattr"),
        (lambda m, x: x.detach(), "detach"),
        (lambda m, x: x.data, "getattr"),
        (lambda m, x: x.register_hook(lambda g: 2 * g), "register_hook"),
        (lambda m, x: torch.ops.aten.relu(x), "relu"),
    ],
)
def test_functions_without_a_rule(line, function):
    message = refusal(guarded(Code(line)))
    if "could not be traced" in message:
        return
    place = "the model" if function == "getattr" else "1"
    assert message.startswith(f"{function}() in the forward of {place}")
    assert "no rule" in message or "cuts the gradient" in message
    assert_shows_how_to_register(message, "")


def test_the_place_of_a_function_is_the_users_line():
    """The file and line of the user's code, not of the tracer's."""
    for line in (lambda m, x: torch.exp(x), lambda m, x: x * x, lambda m, x: x.mean(0)):
        message = refusal(guarded(Code(line)))
        assert "test_refusals.py:" in message.split("\n")[0]


def test_a_tensor_made_on_the_spot_is_refused_for_what_it_is():
    message = refusal(guarded(Code(lambda m, x: x + torch.randn(x.shape))))
    assert message.startswith("randn() in the forward of 1")
    assert "removed" not in message
    assert "rule" in message


# The batch axis --------------------------------------------------------------------------------

BATCH_AXIS = {
    "mean over the batch": lambda x: x.mean(0),
    "mean, negative": lambda x: x.mean(-3),
    "mean keeps the axis": lambda x: x.mean(dim=0, keepdim=True),
    "mean with the batch in a tuple": lambda x: x.mean((1, 0)),
    "mean over everything": lambda x: x.mean(),
    "centering by hand": lambda x: x - x.mean(0, keepdim=True),
    "sum over the batch": lambda x: torch.sum(x, dim=0),
    "sum over everything": lambda x: x.sum(),
    "sum over no axes, which are all": lambda x: x.sum(dim=(), keepdim=True),
    "maximum over the batch": lambda x: x.amax(dim=0, keepdim=True),
    "maximum over everything": lambda x: x.amax(),
    "transposed with the batch": lambda x: x.transpose(0, 1),
    "transposed, negative": lambda x: x.transpose(-3, -1),
    "swapped": lambda x: torch.swapaxes(x, 1, 0),
    "permuted": lambda x: x.permute(1, 0, 2),
    "permuted, a list": lambda x: torch.permute(x, [2, 1, 0]),
    "permuted, negative": lambda x: x.permute(-1, -2, -3),
    "batch moved": lambda x: x.movedim(0, -1),
    "batch moved away by another": lambda x: x.movedim(2, 0),
    "moved, a tuple": lambda x: x.movedim((1, 2), (0, 1)),
    "flattened from the batch": lambda x: x.flatten(),
    "flattened, negative": lambda x: x.flatten(-3, -1),
    "torch.flatten": lambda x: torch.flatten(x),
    "reshaped across": lambda x: x.reshape(-1, 3),
    "reshaped to a row": lambda x: x.reshape(1, -1),
    "viewed across": lambda x: x.view(4, -1, 3),
    "unflattened": lambda x: x.unflatten(0, (-1, 1)),
    "first example": lambda x: x[0],
    "some examples": lambda x: x[1:],
    "every second": lambda x: x[::2],
    "last example": lambda x: x[-1],
    "new axis before the batch": lambda x: x[None],
    "dots reach the batch": lambda x: x[..., 0, 0, 0],
    "unsqueezed before": lambda x: x.unsqueeze(0),
    "unsqueezed, negative": lambda x: x.unsqueeze(-4),
    "squeezed": lambda x: x.squeeze(),
    "squeezed batch": lambda x: x.squeeze(0),
    "chunks of examples": lambda x: x.chunk(2)[0],
    "split of examples": lambda x: x.split(1, dim=0)[0],
    "split, negative": lambda x: torch.split(x, 1, -3)[0],
    "unbound": lambda x: x.unbind()[0],
    "stacked before": lambda x: torch.stack([x, x]),
    "stacked, negative": lambda x: torch.stack([x, x], dim=-4),
    "concatenated batches": lambda x: torch.cat([x, x]),
    "concatenated, negative": lambda x: torch.cat([x, x], dim=-3),
    "broadcast against itself": lambda x: x[:, :1] + x[:, 0],
}


@pytest.mark.parametrize("name", list(BATCH_AXIS))
def test_operations_on_the_batch_axis(name):
    operation = BATCH_AXIS[name]
    message = refusal(guarded(nn.Sequential(Code(lambda m, x: operation(x)))), (4, 3))
    assert "in the forward of 1.0" in message
    assert "batch" in message


@pytest.mark.parametrize(
    "module",
    [
        lip.GroupSort(2, dim=-3),
        lip.MaxMin(dim=-3),
        lip.FullSort(dim=-3),
        lip.Householder(2, dim=-3),
        lip.LayerCentering(-3),
        lip.LayerCentering((1, -3)),
        nn.Flatten(0),
        nn.Flatten(-3, -1),
        nn.Unflatten(0, (-1, 1)),
    ],
    ids=repr,
)
def test_layers_on_the_batch_axis(module):
    try:
        message = refusal(guarded(module), (4, 3))
    except RuntimeError:  # the trial run itself may reject two and three examples
        pytest.fail("the batch axis must be refused before the layer is run")
    assert message.startswith("1")


def test_a_batch_axis_set_after_construction_is_refused():
    layer = lip.FullSort()
    layer.dim = 0
    assert "batch axis" in refusal(guarded(layer))


# The size of the batch -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        lambda m, x: x / x.shape[0],
        lambda m, x: x / x.size(0),
        lambda m, x: x * x.shape[0],
        lambda m, x: x.sum(1) / x.shape[0],
        lambda m, x: torch.add(x, x, alpha=x.shape[0]),
        lambda m, x: x + x.shape[0],
        lambda m, x: F.dropout(x, p=1 / x.shape[0]),
        lambda m, x: F.softplus(x, beta=x.shape[0]),
        lambda m, x: F.leaky_relu(x, x.shape[0]),
        lambda m, x: x[:, x.shape[0] - 2],
        lambda m, x: x[:, : x.shape[0]],
        lambda m, x: x.chunk(4, 1)[x.shape[0] - 2],
    ],
)
def test_the_size_of_the_batch_may_not_enter(line):
    message = refusal(guarded(Code(line)))
    assert "in the forward of 1" in message
    assert "batch" in message


def test_sizes_of_the_example_may_enter():
    model = guarded(Code(lambda m, x: x.view(x.shape[0], x.size(1) // 2, 2) / x.shape[1]))
    assert report_of(model).lipschitz == pytest.approx(1 / 4)


# In place --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        lambda m, x: x.add_(1.0),
        lambda m, x: x.mul_(2.0),
        lambda m, x: x.relu_(),
        lambda m, x: torch.relu_(x),
        lambda m, x: x.zero_(),
        lambda m, x: x.copy_(x),
        lambda m, x: x.t_(),
        lambda m, x: x.requires_grad_(),
    ],
)
def test_in_place_methods(line):
    message = refusal(guarded(Code(line)))
    assert "in the forward of 1" in message
    assert "in place" in message
    assert "without `_`" in message


@pytest.mark.parametrize(
    "module",
    [nn.ReLU(inplace=True), nn.Dropout(0.1, inplace=True), nn.ELU(inplace=True), nn.ReLU6(True)],
    ids=repr,
)
def test_in_place_modules(module):
    message = refusal(guarded(module))
    assert message.startswith("1: ")
    assert "inplace=False" in message


def test_in_place_functions():
    for line in (lambda m, x: F.relu(x, True), lambda m, x: F.dropout(x, inplace=True)):
        assert "inplace=False" in refusal(guarded(Code(line)))


def test_assignment_to_entries():
    def assign(m, x):
        x[:, 0] = 5.0
        return x

    message = refusal(guarded(Code(assign)))
    assert "item assignment" in message


# Control flow ----------------------------------------------------------------------------------

CONTROL_FLOW = [
    lambda m, x: x if x.sum(1)[0] > 0 else -x,
    lambda m, x: x if (x > 0).all() else -x,
    lambda m, x: next(iter(x)),
    lambda m, x: x * int(x.sum(1)[0]),
    lambda m, x: x * float(x.amax(1)[0]),
    lambda m, x: x if x.shape[0] > 4 else 2 * x,
    lambda m, x: x * len(x),
]


@pytest.mark.parametrize("line", CONTROL_FLOW)
def test_control_flow_that_depends_on_the_data(line):
    message = refusal(guarded(Code(line)))
    assert any(part in message for part in ("depend", "in the forward of 1", "not be traced"))


@pytest.mark.parametrize("line", CONTROL_FLOW[:2] + CONTROL_FLOW[5:6])
def test_control_flow_names_its_place(line):
    message = refusal(guarded(nn.Sequential(nn.Identity(), Code(line))))
    assert "1.1" in message or "test_refusals.py" in message
