"""Runs with enforced bounds, from the first batch to the report."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from clipless import PrivacyEngine, losses
from clipless import nn as lip
from clipless.audit import replay, with_empty_record
from clipless.errors import BudgetExhaustedError, PrivacyError, UnsupportedOperationError
from clipless.privacy import BatchOptions, EnforcedBounds, PrivacyOptions
from clipless.training import Trainer, TrainingOptions
from tests.privacy.enforced.architectures import KINDS, architecture
from tests.privacy.enforced.runs import enforced_run


def data(count=60, features=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, features, generator=generator)
    return x, (x.sum(1) > 0).long()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))


def train(model, engine, optimizer, loader, criterion, steps):
    batches = iter(())
    for _ in range(steps):
        try:
            x, y = next(batches)
        except StopIteration:
            batches = iter(loader)
            x, y = next(batches)
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    return engine


@pytest.mark.parametrize("seed", range(len(KINDS)))
def test_every_kind_trains_and_stays_the_same_object(seed):
    model, draw = architecture(seed)
    torch.manual_seed(1)
    x = draw(40)
    keys, attributes = list(model.state_dict()), [set(vars(each)) for each in model.modules()]
    before = copy.deepcopy(model.state_dict())
    criterion = losses.CrossEntropy()
    engine, optimizer, loader = enforced_run(
        model, (x, torch.randint(3, (40,))), criterion=criterion, noise_multiplier=0.2,
        bounds=EnforcedBounds(follow=True, thresholds=1e-3),
    )  # fmt: skip
    train(model, engine, optimizer, loader, criterion, 6)
    engine.detach()
    assert list(model.state_dict()) == keys
    assert [set(vars(each)) for each in model.modules()] == attributes
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    moved = [name for name in trained if not torch.equal(before[name], model.state_dict()[name])]
    assert len(moved) >= 0.8 * len(trained)
    frozen = set(dict(model.named_parameters())) - set(trained)
    assert all(torch.equal(before[name], model.state_dict()[name]) for name in frozen)
    copy.deepcopy(model)(x).sum().backward()  # ordinary again


def test_without_noise_a_step_is_clipped_gradient_descent():
    model, (x, y) = network(), data(20)
    bounds = EnforcedBounds(thresholds=0.1)
    criterion = losses.CrossEntropy()
    engine, optimizer, loader = enforced_run(
        model, (x, y), bounds=bounds, batch_size=20, lr=1.0, criterion=criterion,
        sampling="full_batch",
    )  # fmt: skip
    start = copy.deepcopy(model)
    train(model, engine, optimizer, loader, criterion, 1)
    for name, parameter in start.named_parameters():
        total = torch.zeros_like(parameter)
        for row in range(20):
            loss = nn.functional.cross_entropy(start(x[row : row + 1]), y[row : row + 1])
            (own,) = torch.autograd.grad(loss, parameter)
            total += own * min(1.0, 0.1 / float(own.norm()))
        after = model.get_parameter(name)
        torch.testing.assert_close(after, parameter - total / 20, rtol=2e-3, atol=1e-5)


def test_the_budget_is_found_and_kept():
    model, criterion, engine = network(), losses.CrossEntropy(), PrivacyEngine(insecure_seed=0)
    _, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.Adam(model.parameters()), criterion=criterion,
        data_loader=DataLoader(TensorDataset(*data()), batch_size=12), target_epsilon=3.0,
        epochs=2, bounds="enforced",
    )  # fmt: skip
    train(model, engine, optimizer, loader, criterion, 10)
    with pytest.raises(BudgetExhaustedError):
        train(model, engine, optimizer, loader, criterion, 1)
    # Counts are queries of the same mechanism, and cost nothing beside it.
    assert engine.plan.epsilon() <= 3.0
    assert len(engine.plan.queries) == 6
    assert "enforced" in str(engine.report())
    assert engine.ledger.releases == 10


@pytest.mark.parametrize(
    ("noise", "precision", "compile"),
    [
        ("optimal", "float32", False), ("global", "float32", False),
        ("per_layer", "float32", False), ("optimal", "bfloat16", False),
        ("optimal", "float32", "aot_eager"),
    ],
)  # fmt: skip
def test_a_replay_on_a_neighbour_finds_nothing(noise, precision, compile):
    def run(rows):
        model, criterion = network(), losses.CrossEntropy()
        engine = PrivacyEngine()
        _, optimizer, loader = engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            criterion=criterion, data_loader=DataLoader(rows, batch_size=20),
            noise_multiplier=1.0, bounds="enforced",
            compile=compile,
            options=PrivacyOptions(
                noise=noise, batches=BatchOptions(micro_batch_size=8), precision=precision
            ),
        )  # fmt: skip
        for _ in range(2):
            optimizer.zero_grad()
            for x, y in loader:
                criterion(model(x), y).backward()
                if loader.current.is_last:
                    optimizer.step()
                    optimizer.zero_grad()
        return {"weights": model.state_dict(), "thresholds": engine.session.thresholds.values()}

    rows = TensorDataset(*data())
    rows.tensors[0][7] *= 1e3
    result = replay(run, rows, with_empty_record(rows, 7))
    assert result.passed, result.differences
    assert len({query.name for query in result.queries}) == 12


def test_a_lipschitz_network_keeps_its_proof_as_the_cap():
    def lipschitz():
        torch.manual_seed(0)
        return nn.Sequential(
            lip.BoundedInput(1.0), lip.SpectralLinear(6, 8, bias=True), lip.GroupSort(2),
            lip.SpectralLinear(8, 2),
        )  # fmt: skip

    proved = enforced_run(lipschitz(), data(), bounds="proved")[0].plan
    large = enforced_run(lipschitz(), data(), bounds=EnforcedBounds(thresholds=100.0))[0]
    assert large.plan.sensitivities == proved.sensitivities
    assert set(large.session.report.bounded_by.values()) == {"proof"}
    small = enforced_run(lipschitz(), data(), bounds=EnforcedBounds(thresholds=0.01))[0]
    assert set(small.session.report.bounded_by.values()) == {"enforcement"}
    assert all(each.gradient_bound == 0.01 for each in small.plan.parameters)


def test_thresholds_by_name():
    model = network()
    bounds = EnforcedBounds(thresholds={"": 1.0, "3": 0.5, "3.bias": 0.25})
    plan = enforced_run(model, data(), bounds=bounds)[0].plan
    found = {each.name: each.gradient_bound for each in plan.parameters}
    assert (found["0.weight"], found["3.weight"], found["3.bias"]) == (1.0, 0.5, 0.25)
    with pytest.raises(PrivacyError, match=r"no threshold is given for the parameter 0\.weight"):
        enforced_run(network(), data(), bounds=EnforcedBounds(thresholds={"3": 1.0}))


def test_a_run_is_resumed_with_its_thresholds():
    def begin(state=None, model=None, engine=None):
        model, criterion = model or network(), losses.CrossEntropy()
        engine, optimizer, loader = enforced_run(
            model, data(), noise_multiplier=1.0, criterion=criterion, engine=engine,
            resume_from=state,
        )  # fmt: skip
        return model, engine, optimizer, loader, criterion

    model, engine, optimizer, loader, criterion = begin()
    train(model, engine, optimizer, loader, criterion, 5)
    state, weights = engine.state_dict(), copy.deepcopy(model.state_dict())
    thresholds = engine.session.thresholds.values()
    assert len(set(thresholds.values())) > 1
    train(model, engine, optimizer, loader, criterion, 4)
    other = network()
    other.load_state_dict(weights)
    again = PrivacyEngine(ledger=engine.ledger, insecure_seed=0)
    engine.session.end("the test goes on elsewhere")
    resumed = begin(state, other, again)
    assert resumed[1].session.thresholds.values() == thresholds
    assert resumed[1].plan.sensitivities != resumed[1]._first_plan.sensitivities


def test_what_does_not_go_together_is_refused():
    with pytest.raises(ValueError, match="bounds must be"):
        enforced_run(network(), data(), bounds="forced")
    with pytest.raises(UnsupportedOperationError, match=r"1 \(BatchNorm1d\).*GroupNorm"):
        enforced_run(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), data())


def test_other_inputs_than_those_of_the_proof_are_refused():
    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(1, 2)

        def forward(self, x, factor=None):
            x = x if factor is None else x * factor
            return self.head(x.sum(1, keepdim=True))

    model, criterion = Sums(), losses.CrossEntropy()
    engine, optimizer, loader = enforced_run(model, data(), criterion=criterion)
    train(model, engine, optimizer, loader, criterion, 1)
    x, _ = next(iter(loader))
    with pytest.raises(PrivacyError, match="the same arguments in every step"):
        model(x, factor=torch.ones(len(x), 6))
    with pytest.raises(PrivacyError, match="called on a list"):
        model([x])


def test_a_model_that_starts_to_mix_examples_is_caught_by_a_trial():
    class Turncoat(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.state = nn.Linear(6, 2), [False]

        def forward(self, x):
            return self.head(x - x.mean(0) if self.state[0] else x)

    model, criterion = Turncoat(), losses.CrossEntropy()
    engine, optimizer, loader = enforced_run(model, data(), criterion=criterion)
    model.state[0] = True  # behind the trace's back
    with pytest.raises(PrivacyError, match="replaced, what the model computes for the others"):
        train(model, engine, optimizer, loader, criterion, 1)


def test_dropout_and_a_changed_mode_are_proved_anew():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model[2].eval()
    criterion = losses.CrossEntropy()
    engine, optimizer, loader = enforced_run(model, data(), criterion=criterion)
    train(model, engine, optimizer, loader, criterion, 2)
    model.train()
    with pytest.raises(UnsupportedOperationError, match="BatchNorm1d"):
        train(model, engine, optimizer, loader, criterion, 1)


def test_the_trainer_takes_any_network(tmp_path):
    def trainer():
        return Trainer(
            network(), losses.CrossEntropy(), noise_multiplier=1.0, batch_size=12, steps=8,
            bounds="enforced", run_dir=tmp_path / "run",
            training=TrainingOptions(progress=False, checkpoint_every=3),
        )  # fmt: skip

    first = trainer()
    result = first.fit(data())
    assert (result.steps, result.stopped) == (8, "finished")
    again = trainer()
    assert again.fit(data()).resumed_from == 8
    assert again.engine.session.thresholds.values() == first.engine.session.thresholds.values()


def test_masks_come_from_the_secret_key_and_not_from_seeds():
    """Seeds that somebody sets change no mask; a step that is repeated draws the same ones."""

    def masks(seed, insecure):
        torch.manual_seed(0)
        model, criterion = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5)), losses.CrossEntropy()
        _, optimizer, loader = enforced_run(
            model, data(), criterion=criterion, lr=0.0, engine=PrivacyEngine(insecure_seed=insecure)
        )  # fmt: skip
        found = []
        for x, y in loader:
            torch.manual_seed(seed)
            before = torch.random.get_rng_state()
            output = model(x)
            assert torch.equal(before, torch.random.get_rng_state())
            criterion(output, y).backward()
            optimizer.step()
            found.append((output == 0).flatten())
        return torch.cat(found)

    first = masks(1, 5)
    assert 0.3 < first.float().mean() < 0.7
    assert torch.equal(first, masks(2, 5))
    other = masks(1, 6)
    assert other.shape != first.shape or not torch.equal(first, other)
