"""The engine end to end: the guarantee it states, and that it stays out of the way."""

import copy
import functools
import json
import math
import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import clipless
from clipless import PrivacyEngine, losses
from clipless import nn as lip
from clipless.errors import BudgetExhaustedError, PrivacyError
from clipless.privacy import PoissonSampling, PrivateLoader
from clipless.privacy import epsilon as account
from tests.privacy.runs import Run, cnn, examples, filtered_engine, mlp, residual


def test_the_listing_of_the_readme_works(tmp_path):
    x = torch.rand(300, 1, 28, 28)
    y = torch.randint(10, (300,))
    loader = DataLoader(TensorDataset(x, y), batch_size=30, shuffle=True)
    model = torch.nn.Sequential(
        lip.BoundedInput(norm=20.0),
        lip.SpectralConv2d(1, 32, 3, padding="same"),
        lip.GroupSort(2),
        lip.ScaledL2NormPool2d(2),
        torch.nn.Flatten(),
        lip.SpectralLinear(32 * 14 * 14, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = losses.CrossEntropy(tau=18)
    engine = PrivacyEngine()
    keys = list(model.state_dict())
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=loader, criterion=criterion,
        target_epsilon=3.0, target_delta=1e-5, epochs=2,
    )  # fmt: skip
    for _ in range(2):
        for inputs, labels in loader:
            optimizer.zero_grad()
            criterion(model(inputs), labels).backward()
            optimizer.step()
    assert 2.9 < engine.get_epsilon(delta=1e-5) <= 3.0
    assert list(model.state_dict()) == keys
    assert "differential privacy" in str(engine.report())
    for inputs, labels in loader:
        with pytest.raises(BudgetExhaustedError, match="would exceed epsilon=3"):
            criterion(model(inputs), labels)
        break
    assert engine.get_epsilon(delta=1e-5) <= 3.0


@pytest.mark.parametrize("build", [mlp, cnn, residual], ids=lambda f: f.__name__)
def test_without_noise_and_projection_it_is_plain_training(build):
    """To within the rounding of plain training's own sums: private ones are summed in float64."""
    shape = (6,) if build is mlp else (1, 4, 4)
    data = examples(200, shape)
    torch.manual_seed(1)
    private_model = build()
    agree = functools.partial(torch.allclose, rtol=1e-3 if build is cnn else 1e-5, atol=1e-5)
    plain_model = copy.deepcopy(private_model)
    run = Run(
        private_model, data, losses.CrossEntropy(tau=3.0), batch_size=32, noise_multiplier=0.0,
        bounds="none",
        optimizer=torch.optim.SGD(private_model.parameters(), lr=0.5, momentum=0.9),
    )  # fmt: skip
    criterion = losses.CrossEntropy(tau=3.0, reduction="none")
    plain = torch.optim.SGD(plain_model.parameters(), lr=0.5, momentum=0.9)
    for _ in range(30):
        x, y = run.batch()
        run.optimizer.zero_grad()
        loss = run.backward(x, y)
        run.optimizer.step()
        plain.zero_grad()
        plain_loss = criterion(plain_model(x), y).sum() / 32.0
        plain_loss.backward()
        plain.step()
        assert agree(loss, plain_loss)
    for one, other in zip(run.model.parameters(), plain_model.parameters(), strict=True):
        assert agree(one, other)
    assert run.engine.get_epsilon() == math.inf


def test_noise_on_the_parameters_is_what_the_plan_says():
    """Gradients of an empty batch are zero: what the optimizer sees is noise and nothing else."""
    model = mlp()
    run = Run(model, noise_multiplier=1.3, batch_size=20)
    seen = {name: [] for name, _ in model.named_parameters()}
    run.optimizer.register_step_post_hook(
        lambda *_: [seen[n].append(p.grad.clone()) for n, p in model.named_parameters()]
    )
    for number in range(400):
        run.batch()
        run.loader.current = empty_sample(number)
        run.backward(torch.zeros(0, 6), torch.zeros(0, dtype=torch.long))
        run.optimizer.step()
    for name, deviation in run.engine.plan.noise_deviations.items():
        values = torch.stack(seen[name]).double() / deviation
        error = 1 / math.sqrt(2 * values.numel())
        assert abs(values.std().item() - 1) < 4 * error
        assert abs(values.mean().item()) < 4 / math.sqrt(values.numel())


def empty_sample(step):
    from clipless.privacy.sampling._batches import StepSample

    return StepSample(
        step=step, indices=torch.zeros(0, dtype=torch.long), rows=0, weights=None, micro_batch=0,
        micro_batches=1, size=0,
    )  # fmt: skip


def test_empty_batches_are_steps():
    run = Run(cnn(), examples(40, (1, 4, 4)), batch_size=1, noise_multiplier=1.0)
    sizes = []
    for _ in range(40):
        run.optimizer.zero_grad()
        x, y = run.batch()
        sizes.append(len(x))
        run.backward(x, y)
        run.optimizer.step()
    assert 0 in sizes
    assert run.engine.ledger.releases == 40
    assert all(p.isfinite().all() for p in run.model.parameters())


def test_weights_stay_in_their_sets():
    run = Run(residual(), examples(80, (1, 4, 4)), lr=5.0, noise_multiplier=3.0).steps(5)
    clipless.certify(run.model)


def test_epsilon_is_that_of_the_steps_taken():
    run = Run(engine=PrivacyEngine(), noise_multiplier=1.5, batch_size=10).steps(7)
    expected = account([(run.engine.plan.mechanism, 7)], 1e-4)
    assert run.engine.get_epsilon(1e-4) == expected
    assert run.engine.report().releases == 7


def test_scheduled_noise_is_accounted_level_by_level():
    run = Run(noise_multiplier=1.0, batch_size=10, engine=filtered_engine()).steps(3)
    first = run.engine.plan.mechanism
    run.engine.set_noise_multiplier(2.0)
    deviations = run.engine.plan.noise_deviations
    run.steps(4)
    second = run.engine.plan.mechanism
    assert dict(run.engine.ledger.history()) == {first: 3, second: 4}
    run.engine.set_noise_multiplier(1.0)
    for name, deviation in run.engine.plan.noise_deviations.items():
        assert deviations[name] == pytest.approx(2 * deviation)


def test_a_moving_clipping_threshold_moves_the_noise():
    model = nn.Sequential(*mlp(), lip.ClipGradient(0.5))
    run = Run(model).steps(2)
    before = run.engine.plan.noise_deviations
    model[-1].norm = 0.25
    run.steps(2)
    after = run.engine.plan.noise_deviations
    assert all(after[name] == pytest.approx(before[name] / 2) for name in before)


def test_clipping_thresholds_are_per_example():
    """A threshold above what arrives changes nothing: it is not compared with 1/b of it."""
    data = examples(100)
    found = []
    for layers in ([], [lip.ClipGradient(10.0)]):
        torch.manual_seed(0)
        model = nn.Sequential(*mlp(), *layers)
        run = Run(model, data, noise_multiplier=0.0)
        run.backward(*run.batch())
        found.append(run.gradients()["1.weight"])
    assert found[0].equal(found[1])


def test_ledger_on_disk_goes_on_in_the_next_run(tmp_path):
    path = tmp_path / "ledger.jsonl"
    run = Run(engine=PrivacyEngine(ledger=path), batch_size=10).steps(5)
    spent = run.engine.get_epsilon()
    run.engine.ledger.close()
    again = Run(engine=PrivacyEngine(ledger=path), batch_size=10)
    assert again.engine.get_epsilon() == spent
    again.steps(1)
    assert again.engine.get_epsilon() > spent
    again.engine.ledger.close()


def test_a_second_make_private_never_resets_epsilon():
    engine = PrivacyEngine()
    first = Run(engine=engine, batch_size=10).steps(5)
    spent = engine.get_epsilon()
    second = Run(engine=engine, batch_size=10)
    assert engine.get_epsilon() == spent
    second.steps(5)
    assert engine.get_epsilon() == account([(engine.plan.mechanism, 10)], engine.plan.delta)
    first.steps(2)  # still private, and counted in the same ledger
    assert engine.ledger.releases == 12


def test_budget_counts_what_was_spent_before():
    engine = PrivacyEngine()
    Run(engine=engine, batch_size=10, noise_multiplier=3.0).steps(5)
    run = Run(engine=engine, batch_size=10, target_epsilon=2.0, epochs=1)
    assert run.engine.plan.steps == 10
    run.steps(10)
    assert engine.get_epsilon() <= 2.0
    with pytest.raises(BudgetExhaustedError):
        run.step()


def test_frozen_parameters_get_no_noise_and_cost_nothing():
    model = mlp()
    whole = Run(copy.deepcopy(model)).engine.plan
    model[1].weight.requires_grad_(False)
    before = model[1].weight.clone()
    run = Run(model).steps(3)
    assert "1.weight" not in run.engine.plan.noise_deviations
    assert sum(run.engine.plan.noise_deviations.values()) < sum(whole.noise_deviations.values())
    torch.testing.assert_close(model[1].weight, before, rtol=0, atol=1e-6)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer(name):
    model = mlp()
    run = Run(model, optimizer=OPTIMIZERS[name](model.parameters())).steps(3)
    assert run.engine.ledger.releases == 3


def test_parameter_groups_and_schedulers():
    model = mlp()
    optimizer = torch.optim.SGD(
        [{"params": model[1].parameters(), "lr": 0.1}, {"params": model[3].parameters()}], lr=0.5
    )
    run = Run(model, optimizer=optimizer)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for _ in range(3):
        run.step()
        scheduler.step()
    assert optimizer.param_groups[1]["lr"] < 0.5


@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_models(when):
    model = mlp()
    if when == "before":
        model = torch.compile(model, backend="eager")
    run = Run(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    if when == "after":
        run.model = torch.compile(run.model, backend="eager")
    run.steps(3)
    assert run.engine.ledger.releases == 3


def test_gradient_scaler_changes_nothing():
    found = []
    for enabled in (False, True):
        torch.manual_seed(0)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=enabled)
        run = Run(noise_multiplier=0.0, grad_scaler=scaler, lr=1.0)
        for _ in range(3):
            run.optimizer.zero_grad()
            x, y = run.batch()
            scaler.scale(run.criterion(run.model(x), y)).backward()
            scaler.step(run.optimizer)
            scaler.update()
        found.append([p.detach().clone() for p in run.model.parameters()])
        assert run.engine.ledger.releases == 3
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_evaluation_is_ordinary_and_free():
    run = Run().steps(2)
    x, y = examples(50, seed=3)
    expected = losses.CrossEntropy()(run.model(x).detach(), y)
    with torch.no_grad():
        assert run.criterion(run.model(x), y).equal(expected)
    run.model.eval()
    assert run.criterion(run.model(x), y).equal(expected)
    run.model.train()
    assert run.engine.ledger.releases == 2
    run.steps(1)


def test_copies_of_a_model_in_training_are_ordinary():
    run = Run().steps(1)
    twin = copy.deepcopy(run.model)
    x, y = examples(10)
    losses.CrossEntropy()(twin(x), y).backward()
    average = torch.optim.swa_utils.AveragedModel(run.model)
    average.update_parameters(run.model)
    revived = pickle.loads(pickle.dumps(run.model))
    assert revived(x).equal(run.model(x))
    run.steps(1)
    assert run.engine.ledger.releases == 2


def test_detach_gives_everything_back():
    run = Run().steps(2)
    run.engine.detach()
    x, y = examples(10)
    loss = run.criterion(run.model(x), y)
    (3 * loss).backward()
    run.optimizer.step()
    assert run.engine.ledger.releases == 2


class Indexed(Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, index):
        return torch.full((6,), float(index)), index % 3


def test_map_style_datasets_with_workers():
    model = mlp()
    criterion = losses.CrossEntropy()
    engine = PrivacyEngine(insecure_seed=0)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(Indexed(), batch_size=10, num_workers=2),
        criterion=criterion,
        noise_multiplier=1.0,
    )
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    assert engine.ledger.releases == 6


def test_a_private_loader_can_be_given():
    model, criterion = mlp(), losses.CrossEntropy()
    loader = PrivateLoader(
        examples(100), sampling=PoissonSampling(dataset_size=100, rate=0.3), insecure_seed=1
    )
    engine = PrivacyEngine()
    _, _, same = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader,
        criterion=criterion, noise_multiplier=1.0,
    )  # fmt: skip
    assert same is loader
    assert engine.plan.expected_batch_size == pytest.approx(30)
    assert engine.report().insecure
    assert engine.get_epsilon() == math.inf


def test_validate():
    assert PrivacyEngine.validate(mlp()) == []
    assert PrivacyEngine.validate(mlp(), input_shape=(6,)) == []
    (problem,) = PrivacyEngine.validate(nn.Sequential(nn.BatchNorm1d(3)))
    assert "mixes examples" in str(problem)
    (problem,) = PrivacyEngine.validate(nn.Sequential(lip.SpectralLinear(3, 2)), input_shape=(3,))
    assert "BoundedInput" in str(problem)


def test_report_states_claim_and_caveats():
    report = Run(engine=PrivacyEngine(), batch_size=10).steps(3).engine.report()
    data = json.loads(json.dumps(report.to_dict()))
    assert data["epsilon"] == report.epsilon
    text = str(report)
    for words in ("replacing one example by an empty one", "in memory only", "public"):
        assert words in text
    assert "not private" not in text
    seeded = Run(batch_size=10).steps(1).engine.report()
    assert seeded.epsilon == math.inf
    assert seeded.to_dict()["epsilon"] is None
    assert "not private" in str(seeded)
    assert "differential privacy" not in str(seeded)


def test_questions_before_anything_is_private():
    with pytest.raises(PrivacyError, match="make_private"):
        PrivacyEngine().get_epsilon(1e-5)


def test_per_layer_coefficients_by_name():
    names = ["1.weight", "1.bias", "3.weight"]
    coefficients = {"1.weight": 1.0, "1.bias": 4.0, "3.weight": 2.0}
    plan = Run(noise=coefficients).engine.plan
    ratios = {n: plan.noise_deviations[n] / plan.sensitivities[n] for n in names}
    assert ratios["1.bias"] == pytest.approx(4 * ratios["1.weight"])
    with pytest.raises(ValueError, match="one number for each"):
        Run(noise={"1.weight": 1.0})


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU, for checks that read nothing else of it."""

    device = torch.device("cuda")


@pytest.mark.parametrize("convolutions", [False, True])
def test_tf32_is_refused_on_a_gpu(monkeypatch, convolutions):
    from clipless.privacy.step._checks import check_precision

    inputs = (torch.zeros(2, 3).as_subclass(OnGpu),)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", convolutions)
    if convolutions:
        with pytest.raises(PrivacyError, match="allow_tf32 = False"):
            check_precision(inputs)
    else:
        check_precision(inputs)


def test_a_report_says_what_amplification_takes_for_granted():
    def caveats(sampling):
        return " ".join(Run(sampling=sampling).engine.report().caveats)

    assert "Amplification by sampling takes for granted" in caveats("poisson")
    assert "Amplification" not in caveats("full_batch")
