"""Averages of weights: the formula, the swap, the certificates, and private runs."""

import copy
import io
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import clipless
from clipless import nn as lip
from clipless.errors import ConstraintError
from clipless.training import LayerAdam, WeightAverage
from tests.privacy.runs import Run, cnn, examples, mlp, residual


def snapshot(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(model, weights):
    return all(p.equal(weights[name]) for name, p in model.named_parameters())


@torch.no_grad()
def wander(model, *, noise=0.3, project=True):
    """One step of a random walk."""
    for p in model.parameters():
        if p.requires_grad:
            p.add_(noise * torch.randn_like(p))
    if project:
        lip.project(model)


def walk(model, average, steps, **options):
    iterates = []
    for _ in range(steps):
        wander(model, **options)
        average.update()
        iterates.append(snapshot(model))
    return iterates


def assert_is_mean(found, iterates, weights, atol=1e-6):
    for name, value in found.items():
        stacked = torch.stack([w[name] for w in iterates]).double()
        weight = torch.tensor(weights, dtype=torch.float64)
        mean = torch.tensordot(weight / weight.sum(), stacked, dims=1)
        torch.testing.assert_close(value.double(), mean, rtol=0, atol=atol)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.98, 1.0])
@pytest.mark.parametrize(("start", "steps"), [(1, 1), (1, 12), (7, 12), (12, 12), (20, 12)])
def test_average_is_the_stated_mean(decay, start, steps):
    model = nn.Linear(4, 3)
    average = WeightAverage(model, decay=decay, start=start)
    iterates = walk(model, average, steps, project=False)
    counted = iterates[min(start, steps) - 1 :]
    weights = [decay ** (len(counted) - 1 - i) for i in range(len(counted))]
    assert_is_mean(average.averaged_parameters(), counted, weights)
    assert average.updates == steps


def test_initial_weights_have_no_part_in_the_average():
    model = mlp()
    average = WeightAverage(model, decay=0.999)
    assert same(model, average.averaged_parameters())
    with torch.no_grad():
        model[1].weight.zero_()
    average.update()
    assert not average.averaged_parameters()["1.weight"].any()


@pytest.mark.parametrize("raised", [None, KeyError, KeyboardInterrupt])
def test_training_weights_come_back_bit_for_bit(raised):
    model = cnn()
    average = WeightAverage(model)
    walk(model, average, 3)
    with torch.no_grad():  # values that comparisons and arithmetic would not preserve
        model[1].bias[:2] = torch.tensor([-0.0, torch.nan])
    before = {name: p.view(torch.int32) for name, p in snapshot(model).items()}
    identities = [id(p) for p in model.parameters()]
    with nullcontext() if raised is None else pytest.raises(raised), average.applied() as applied:
        assert applied is model
        assert same(model, average.averaged_parameters())
        assert not model[1].weight.view(torch.int32).equal(before["1.weight"])
        if raised:
            raise raised
    for name, p in model.named_parameters():
        assert p.detach().view(torch.int32).equal(before[name])
    assert [id(p) for p in model.parameters()] == identities
    average.update()  # the block is over


def test_blocks_do_not_nest_and_are_not_updated_in():
    model = mlp()
    average = WeightAverage(model)
    walk(model, average, 2)
    before = snapshot(model)
    with average.applied():
        with pytest.raises(RuntimeError, match="outside"):
            average.update()
        with pytest.raises(RuntimeError, match="nest"), average.applied():
            pass
        assert same(model, average.averaged_parameters())
    assert same(model, before)
    assert average.updates == 2


@pytest.mark.parametrize("inference", [torch.no_grad, torch.inference_mode])
def test_applied_without_gradients(inference):
    model = mlp()
    average = WeightAverage(model)
    walk(model, average, 2)
    before, x = snapshot(model), torch.randn(5, 6)
    with inference(), average.applied():
        inside = model(x)
    twin = copy.deepcopy(model)
    average.copy_to(twin)
    assert inside.equal(twin(x))
    assert same(model, before)
    model(x).sum().backward()
    walk(model, average, 1)


def test_mixed_precision_sees_the_swap():
    model = mlp()
    average = WeightAverage(model)
    walk(model, average, 4, noise=1.0)
    x = torch.randn(5, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = model(x)
        with average.applied():
            assert not model(x).equal(before)
        assert model(x).equal(before)


MODELS = {
    "mlp": mlp,
    "cnn": cnn,
    "residual": residual,
    "orthogonal": lambda: lip.SpectralLinear(48, 32),
    "ball": lambda: lip.SpectralLinear(32, 48, constraint="ball", norm=0.7, bias=True),
    "frobenius": lambda: lip.FrobeniusLinear(8, 8, norm=3.0),
    "embedding": lambda: lip.Embedding(40, 8, norm=2.0),
    "fourier": lambda: lip.SpectralConv2d(3, 4, 3, padding="same", certificate_size=6),
    "groups": lambda: lip.SpectralConv1d(4, 6, 3, groups=2, norm=1.5),
    "bfloat16": lambda: lip.SpectralLinear(24, 16, dtype=torch.bfloat16),
    "float64": lambda: lip.SpectralLinear(24, 16, dtype=torch.float64),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("noise", [1e-4, 0.02, 1.0])
def test_averages_are_certified(kind, noise):
    model = MODELS[kind]()
    tail, moving = WeightAverage(model, decay=1.0), WeightAverage(model, decay=0.9)
    iterates = []
    for _ in range(20):
        wander(model, noise=noise)
        tail.update()
        moving.update()
        iterates.append(snapshot(model))
    for average, decay in ((tail, 1.0), (moving, 0.9)):
        with average.applied():
            clipless.certify(model)
            found = snapshot(model)
        # Scaled, if at all, by what the certificate is loose: it is not projected.
        slack = 0.02 if kind == "bfloat16" else 0.005
        size = max(w.abs().max().item() for w in iterates[-1].values())
        assert_is_mean(found, iterates, [decay ** (19 - i) for i in range(20)], atol=slack * size)
        twin = copy.deepcopy(model)
        average.copy_to(twin)
        clipless.certify(twin)
        assert same(twin, average.averaged_parameters())
    clipless.certify(model)


def test_certified_averages_are_left_alone():
    model = mlp()
    average = WeightAverage(model)
    (only,) = walk(model, average, 1)
    assert same(model, only)
    assert all(v.equal(only[k]) for k, v in average.averaged_parameters().items())


def test_averages_of_orthogonal_weights_are_not_pulled_back():
    model = lip.SpectralLinear(16, 16)
    average = WeightAverage(model, decay=1.0)
    walk(model, average, 30, noise=1.0)
    with average.applied():
        assert torch.linalg.svdvals(model.weight.detach()).min() < 0.5


def test_models_trained_without_projection():
    model = mlp()
    average = WeightAverage(model, decay=1.0, projection=False)
    iterates = walk(model, average, 4, noise=3.0, project=False)
    found = average.averaged_parameters()
    assert_is_mean(found, iterates, [1.0] * 4, atol=1e-5)
    assert torch.linalg.matrix_norm(found["1.weight"], 2) > 2


def test_a_diverged_average_is_refused_and_nothing_is_touched():
    model = mlp()
    average = WeightAverage(model)
    with torch.no_grad():
        model[3].weight[0, 0] = torch.inf
    average.update()
    before = snapshot(model)
    with pytest.raises(ConstraintError, match=r"3\.weight is not finite"), average.applied():
        pass
    assert same(model, before)
    average.update()


def test_half_precision_is_averaged_in_single():
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    average = WeightAverage(model, decay=1.0)
    for value in [1.0] * 500 + [2.0] * 500:
        nn.init.constant_(model.weight, value)
        average.update()
    assert average.averaged_parameters()["weight"].item() == 1.5
    assert average.averaged_parameters()["weight"].dtype == torch.bfloat16


def test_shared_parameters_are_averaged_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = lip.SpectralLinear(6, 6), lip.SpectralLinear(6, 6)
            self.second.weight = self.first.weight

    model = Tied()
    lip.project(model)
    average = WeightAverage(model, decay=1.0)
    iterates = walk(model, average, 5)
    assert list(average.averaged_parameters()) == ["first.weight"]
    assert_is_mean(average.averaged_parameters(), iterates, [1.0] * 5, atol=5e-3)
    twin = copy.deepcopy(model)
    average.copy_to(twin)
    assert twin.second.weight is twin.first.weight
    with average.applied():
        clipless.certify(model)
        assert model.second.weight is model.first.weight


def test_frozen_parameters_and_buffers_are_copied():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    average = WeightAverage(model)
    model(torch.randn(8, 3))  # moves the buffers
    walk(model, average, 3)
    with torch.no_grad():
        model[0].weight.fill_(7.0)  # loaded later, say
    found = average.averaged_parameters()
    assert list(found) == [name for name, _ in model.named_parameters()]
    assert (found["0.weight"] == 7).all()
    assert set(average.state_dict()["parameters"]) == {"1.weight", "1.bias", "2.weight", "2.bias"}
    twin = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    average.copy_to(twin)
    assert same(twin, found)
    assert all(b.equal(twin.get_buffer(name)) for name, b in model.named_buffers())


def test_a_saved_average_goes_on_identically():
    model = mlp()
    average = WeightAverage(model, decay=0.9, start=2)
    walk(model, average, 4)
    file = io.BytesIO()
    torch.save(average.state_dict(), file)
    file.seek(0)
    resumed = WeightAverage(copy.deepcopy(model), decay=0.9, start=2)
    kept = average.state_dict()
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for _ in range(3):
        wander(model)
        average.update()
        resumed._model.load_state_dict(model.state_dict())
        resumed.update()
    assert resumed.updates == average.updates == 7
    found = resumed.averaged_parameters()
    assert all(v.equal(found[k]) for k, v in average.averaged_parameters().items())
    assert kept["updates"] == 4  # a snapshot: later updates do not change it
    assert not kept["parameters"]["1.weight"].equal(average.state_dict()["parameters"]["1.weight"])


@pytest.mark.parametrize(
    ("other", "options", "message"),
    [
        (mlp, {"decay": 0.9}, "decay=0.98, this one decay=0.9"),
        (mlp, {"start": 5}, "start=1, this one start=5"),
        (lambda: mlp(classes=4), {}, r"3\.weight is \(3, 8\)"),
        (cnn, {}, "does not match"),
        (lambda: mlp().double(), {}, "float64"),
    ],
)
def test_another_runs_average_is_refused(other, options, message):
    state = WeightAverage(mlp()).state_dict()
    average = WeightAverage(other(), **options)
    before = average.averaged_parameters()
    with pytest.raises(ValueError, match=message):
        average.load_state_dict(state)
    assert all(v.equal(before[k]) for k, v in average.averaged_parameters().items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.double(), r"1\.bias is \(8,\) of torch.float64, not .*float32"),
        (lambda model: model.bfloat16(), "bfloat16"),
        (lambda model: model.to("meta"), "moved from cpu to meta"),
        (lambda model: model[3].requires_grad_(False), r"3\.weight is absent"),
        (lambda model: model.append(nn.Linear(3, 3)), "4.bias is .*, not absent"),
    ],
)
def test_changed_models_are_refused(change, message):
    model = mlp()
    average = WeightAverage(model)
    average.update()
    change(model)
    with pytest.raises(ValueError, match=message):
        average.update()
    with pytest.raises(ValueError, match=message), average.applied():
        pass
    assert average.updates == 1


def test_copies_to_other_architectures_or_precisions_are_refused():
    average = WeightAverage(mlp())
    for other in (cnn(), mlp(classes=5), mlp().double()):
        before = snapshot(other)
        with pytest.raises(ValueError, match="the model to copy to"):
            average.copy_to(other)
        assert same(other, before)


@pytest.mark.parametrize(
    "options", [{"decay": -0.1}, {"decay": 1.1}, {"decay": float("nan")}, {"start": 0},
                {"start": 1.5}, {"start": True}]
)  # fmt: skip
def test_bad_arguments_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        WeightAverage(mlp(), **options)
    with pytest.raises(ValueError, match="no trainable"):
        WeightAverage(mlp().requires_grad_(False))


@pytest.mark.parametrize(("build", "shape"), [(mlp, (6,)), (cnn, (1, 4, 4))])
def test_evaluating_the_average_leaves_a_private_run_as_it_was(build, shape):
    """With evaluations and without, the same run: the same weights, the same ledger."""

    def private_run(evaluate):
        torch.manual_seed(3)
        model = build()
        optimizer = LayerAdam(model.parameters(), lr=0.05)
        run = Run(model, examples(100, shape), optimizer=optimizer)
        average = WeightAverage(model)
        for _ in range(6):
            run.step()
            average.update()
            if evaluate:
                releases = run.engine.ledger.releases
                x, y = examples(50, shape, seed=1)
                with average.applied(), torch.no_grad():
                    run.criterion(model.eval()(x), y)
                    clipless.certify(model)
                model.train()
                assert run.engine.ledger.releases == releases
        return run, average

    plain, plain_average = private_run(evaluate=False)
    evaluated, average = private_run(evaluate=True)
    assert same(evaluated.model, snapshot(plain.model))
    assert evaluated.engine.get_epsilon() == plain.engine.get_epsilon()
    assert evaluated.engine.ledger.releases == 6
    found = average.averaged_parameters()
    assert all(v.equal(found[k]) for k, v in plain_average.averaged_parameters().items())


def test_a_private_run_may_go_on_from_its_average():
    run = Run().steps(2)
    average = WeightAverage(run.model, decay=1.0)
    for _ in range(3):
        run.step()
        average.update()
    average.copy_to(run.model)
    run.steps(2)  # the weights were edited, and are certified again
    assert run.engine.ledger.releases == 7
