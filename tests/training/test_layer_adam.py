"""Adam with one second moment for each tensor: the formula, its symmetries, and its manners."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

import clipless
from clipless.training import LayerAdam
from tests.privacy.runs import Run, cnn, examples, mlp

SHAPES = [(3, 4), (5,), (), (2, 3, 2, 2)]


def parameters(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for shape in SHAPES
    ]


def set_gradients(params, seed, scale=1.0):
    generator = torch.Generator().manual_seed(1000 + seed)
    for p in params:
        p.grad = (scale * torch.randn(p.shape, generator=generator, dtype=torch.float64)).to(p)


def train(optimizer, params, steps, first=0):
    for step in range(first, first + steps):
        set_gradients(params, step)
        optimizer.step()


def clones(params):
    return [p.detach().clone() for p in params]


def reference(weight, gradients, lr=0.005, betas=(0.9, 0.99), eps=1e-8, decay=0.0, sign=1.0):
    """The formula of the docstring, one line for each line of it, in double precision."""
    weight, m, v = weight.detach().double(), 0.0, 0.0
    for t, g in enumerate(gradients, start=1):
        m = betas[0] * m + (1 - betas[0]) * g.double()
        v = betas[1] * v + (1 - betas[1]) * g.double().square().mean()
        root = (v / (1 - betas[1] ** t)).sqrt() + eps
        weight = (1 - lr * decay) * weight - sign * lr * m / (1 - betas[0] ** t) / root
    return weight


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.3, "betas": (0.0, 0.5), "eps": 0.1},
        {"betas": (0.5, 0.0), "weight_decay": 0.1},
        {"lr": 0.1, "weight_decay": 0.3, "maximize": True},
        {"lr": torch.tensor(0.02, dtype=torch.float64), "weight_decay": 0.2},
    ],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 3e-6)])
def test_matches_the_formula(options, dtype, tolerance):
    params = parameters(dtype=dtype)
    start = clones(params)
    optimizer = LayerAdam(params, **options)
    history = []
    for step in range(8):
        set_gradients(params, step)
        history.append([p.grad.clone() for p in params])
        optimizer.step()
    expected = {k: v for k, v in options.items() if k not in ("weight_decay", "maximize")}
    expected["decay"] = options.get("weight_decay", 0.0)
    expected["sign"] = -1.0 if options.get("maximize") else 1.0
    expected["lr"] = float(options.get("lr", 0.005))
    for index, p in enumerate(params):
        wanted = reference(start[index], [g[index] for g in history], **expected)
        torch.testing.assert_close(p.detach().double(), wanted, rtol=tolerance, atol=tolerance)


def test_is_adam_on_tensors_of_one_element():
    ours = [nn.Parameter(torch.randn(shape)) for shape in [(), (1,), (1, 1)]]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    options = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1}
    train(LayerAdam(ours, **options), ours, 20)
    train(torch.optim.AdamW(theirs, **options), theirs, 20)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [1e-3, 17.0, 1e6])
def test_scale_of_a_layers_gradients_does_not_matter(scale):
    plain, scaled = parameters(), parameters()
    optimizers = [LayerAdam(plain, eps=1e-12), LayerAdam(scaled, eps=1e-12)]
    for step in range(5):
        set_gradients(plain, step)
        set_gradients(scaled, step)
        scaled[0].grad.mul_(scale)  # one layer only; the others must not notice
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(scaled[0], plain[0], rtol=1e-5, atol=1e-7)
    assert all(one.equal(other) for one, other in zip(scaled[1:], plain[1:], strict=True))


@pytest.mark.parametrize(("kind", "turns"), [(LayerAdam, True), (torch.optim.Adam, False)])
def test_update_turns_with_the_gradient(kind, turns):
    rotation = torch.linalg.qr(torch.randn(12, 12, dtype=torch.float64)).Q
    plain, turned = (nn.Parameter(torch.zeros(3, 4, dtype=torch.float64)) for _ in range(2))
    optimizers = [kind([plain], lr=0.1), kind([turned], lr=0.1)]
    for _ in range(6):
        plain.grad = torch.randn(3, 4, dtype=torch.float64)
        turned.grad = (rotation @ plain.grad.flatten()).reshape(3, 4)
        for optimizer in optimizers:
            optimizer.step()
    wanted = (rotation @ plain.detach().flatten()).reshape(3, 4)
    assert torch.allclose(turned, wanted, rtol=1e-9, atol=1e-12) == turns


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_state_goes_on_identically(dtype, tmp_path):
    params = parameters(dtype=dtype)
    optimizer = LayerAdam(params, lr=0.1)
    train(optimizer, params, 4)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    others = [nn.Parameter(value) for value in clones(params)]
    resumed = LayerAdam(others, lr=9.0)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    train(optimizer, params, 4, first=4)
    train(resumed, others, 4, first=4)
    assert all(one.equal(other) for one, other in zip(params, others, strict=True))
    assert resumed.state[others[0]]["second_moment"].dtype == torch.float32


def test_a_loaded_state_is_a_copy():
    params, others = parameters(), parameters()
    optimizer, other = LayerAdam(params), LayerAdam(others)
    train(optimizer, params, 2)
    other.load_state_dict(optimizer.state_dict())
    before = copy.deepcopy(optimizer.state_dict()["state"])
    train(other, others, 2)
    after = optimizer.state_dict()["state"]
    assert all(before[n][key].equal(after[n][key]) for n in before for key in before[n])


def test_state_of_another_optimizer_is_refused():
    params = parameters()
    adam = torch.optim.Adam(params)
    train(adam, params, 1)
    with pytest.raises(ValueError, match="another optimizer"):
        LayerAdam(params).load_state_dict(adam.state_dict())


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_go_on_identically(copier):
    params = parameters()
    optimizer = LayerAdam(params, lr=0.1)
    train(optimizer, params, 3)
    twin = copier(optimizer)
    others = twin.param_groups[0]["params"]
    train(optimizer, params, 3, first=3)
    train(twin, others, 3, first=3)
    assert all(one.equal(other) for one, other in zip(params, others, strict=True))


def test_groups_have_their_own_options():
    together, apart = parameters(), parameters()
    optimizer = LayerAdam([{"params": together[:2], "lr": 0.5}, {"params": together[2:]}], lr=0.1)
    first, second = LayerAdam(apart[:2], lr=0.5), LayerAdam(apart[2:3], lr=0.1)
    second.add_param_group({"params": apart[3:]})
    for step in range(3):
        for params in (together, apart):
            set_gradients(params, step)
        for each in (optimizer, first, second):
            each.step()
    assert all(one.equal(other) for one, other in zip(together, apart, strict=True))


def test_parameters_without_gradient_are_left_out():
    params = parameters()
    optimizer = LayerAdam(params)
    before = params[1].detach().clone()
    for step in range(3):
        set_gradients(params, step)
        params[1].grad = None
        optimizer.step()
    assert params[1].equal(before)
    assert params[1] not in optimizer.state
    train(optimizer, params, 1)  # its own first step is corrected as a first step
    norm = torch.linalg.vector_norm((params[1] - before).detach()) / math.sqrt(params[1].numel())
    assert norm.item() == pytest.approx(0.005, rel=1e-5)


def test_mixed_precisions_in_one_group():
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    params = [nn.Parameter(torch.zeros(64, 64, dtype=dtype)) for dtype in dtypes]
    for p in params:
        p.grad = torch.full_like(p, 3e3)  # the norm, 192000, is beyond half precision
    LayerAdam(params, lr=0.5).step()
    for p in params:
        torch.testing.assert_close(p.detach(), torch.full_like(p, -0.5), rtol=1e-2, atol=0)


def test_nothing_is_read_back_from_the_device():
    """Tensors without values cannot be read: a step that works on them never waits for a device."""
    params = [nn.Parameter(torch.zeros(3, 4, device="meta")) for _ in range(2)]
    optimizer = LayerAdam(params, weight_decay=0.1)
    for _ in range(2):
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    state = optimizer.state[params[0]]
    assert {k: tuple(v.shape) for k, v in state.items()} == {
        "step": (), "first_moment": (3, 4), "second_moment": ()
    }  # fmt: skip


def test_schedulers_and_closures():
    weight = nn.Parameter(torch.tensor([2.0]))
    optimizer = LayerAdam([weight], lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)

    def closure():
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4.0
    assert weight.item() == pytest.approx(1.9, rel=1e-5)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * (1 + math.cos(math.pi / 4)))
    weight.grad = None
    assert optimizer.step() is None


def test_compiled_steps_are_the_same_steps():
    params, others = parameters(), parameters()
    plain, compiled = LayerAdam(params, lr=0.1), LayerAdam(others, lr=0.1)
    step = torch.compile(compiled.step, backend="eager")
    for number in range(4):
        for optimizer in (plain, compiled):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
        set_gradients(params, number)
        set_gradients(others, number)
        plain.step()
        step()
    for one, other in zip(params, others, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.1}, "lr"),
        ({"lr": math.nan}, "lr"),
        ({"lr": torch.ones(2)}, "one element"),
        ({"eps": -1e-8}, "eps"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"betas": (1.0, 0.99)}, "betas"),
        ({"betas": (0.9, -0.1)}, "betas"),
        ({"betas": (0.9,)}, "betas"),
    ],
)
def test_bad_options_are_refused(options, message):
    params = parameters()
    with pytest.raises(ValueError, match=message):
        LayerAdam(params, **options)
    optimizer = LayerAdam(params[:1])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": params[1:], **options})
    assert len(optimizer.param_groups) == 1


def test_complex_parameters_and_sparse_gradients_are_refused():
    with pytest.raises(ValueError, match="complex"):
        LayerAdam([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    table = nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        LayerAdam(table.parameters()).step()


@pytest.mark.parametrize(("build", "shape"), [(mlp, (6,)), (cnn, (1, 4, 4))])
def test_private_training(build, shape):
    model = build()
    before = clones(model.parameters())
    run = Run(model, examples(100, shape), optimizer=LayerAdam(model.parameters(), lr=0.05))
    run.steps(3)
    assert run.engine.ledger.releases == 3
    assert all(not p.equal(b) for p, b in zip(model.parameters(), before, strict=True))
    assert all(run.optimizer.state[p]["step"] == 3 for p in model.parameters())
    clipless.certify(model)
