"""People as units of privacy: who is sampled, what they contribute, and what neighbours show."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from clipless import PrivacyEngine, losses
from clipless import nn as lip
from clipless.audit import record, with_empty_user
from clipless.errors import LedgerError, PrivacyError
from clipless.privacy import (
    BatchOptions,
    Ledger,
    Plan,
    PoissonSampling,
    PrivacyOptions,
    PrivateLoader,
    Relation,
    Users,
    default_delta,
)
from clipless.privacy.sampling import _users as internals

SIZES = [1, 10, 1000, *[3] * 40]


def data(seed=0):
    """Records of 43 users in a random order; those of the first three are alike, and extreme."""
    ids = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(SIZES)), SIZES))
    users = Users(ids, records=16)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(ids), 6, generator=generator)
    y = torch.randint(3, (len(ids),), generator=generator)
    for user in range(3):
        x[users.of(user)] = torch.tensor([5.0, -5.0, 5.0, 0.0, 0.0, 1.0])
        y[users.of(user)] = 1
    return users, x, y


def lipschitz():
    torch.manual_seed(0)
    return nn.Sequential(
        lip.BoundedInput(1.0),
        lip.SpectralLinear(6, 8, bias=True),
        lip.GroupSort(2),
        lip.SpectralLinear(8, 3),
    )


def clipped():
    torch.manual_seed(0)
    follow = lip.FollowQuantile(quantile=0.5)
    body = [*lipschitz(), lip.ClipGradient(0.3, follow=follow)]
    return nn.Sequential(*body)


def ordinary():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))


def make(model, users, x, y, *, batch=25, steps=4, bounds="proved", noise=1.0, **options):
    engine = PrivacyEngine()
    criterion = losses.CrossEntropy()
    parts = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=batch),
        criterion=criterion,
        noise_multiplier=noise,
        bounds=bounds,
        options=PrivacyOptions(unit=users, steps=steps, **options),
    )
    return engine, criterion, *parts


def run(model, users, x, y, *, steps=4, **options):
    engine, criterion, model, optimizer, loader = make(model, users, x, y, steps=steps, **options)
    taken = 0
    for inputs, targets in loader:
        criterion(model(inputs), targets).backward()
        if loader.current.is_last:
            optimizer.step()
            taken += 1
        if taken == steps:
            break
    weights = [each.detach().clone() for each in model.parameters()]
    return {"weights": weights, "epsilon": engine.get_epsilon(), "report": str(engine.report())}


WAYS = {
    "proved": (lipschitz, {"batch": 43}),
    "proved, in micro-batches, padded": (
        lipschitz,
        {"batch": 40, "batches": BatchOptions(micro_batch_size=9, pad=True)},
    ),
    "a threshold that follows": (clipped, {"batch": 43}),
    "enforced": (ordinary, {"batch": 43, "bounds": "enforced"}),
    "fixed size": (lipschitz, {"batch": 40, "sampling": "fixed_size"}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_user_of_any_number_of_records_moves_each_release_by_what_is_declared(way):
    build, options = WAYS[way]
    users, x, y = data()
    recording = record(lambda both: run(build(), users, *both, **options), (x, y))
    for user in range(3):
        result = recording.replay(with_empty_user((x, y), users, user))
        assert result.passed, result
        assert not result.unmoved
        assert max(result.largest.values()) > 0.3  # the records were made to weigh


@pytest.mark.parametrize(("build", "bounds"), [(lipschitz, "proved"), (ordinary, "enforced")])
def test_rows_that_count_as_units_are_caught(build, bounds, monkeypatch):
    monkeypatch.setattr(internals, "_ROOM", 16.0)  # each record has a share of one, or above
    users, x, y = data()
    recording = record(lambda both: run(build(), users, *both, batch=43, bounds=bounds), (x, y))
    assert not recording.replay(with_empty_user((x, y), users, 1)).passed
    assert not recording.replay(with_empty_user((x, y), users, 2)).passed


def test_a_sum_without_shares_is_refused(monkeypatch):
    from clipless.kernels import _bounded_gradients as kernels

    monkeypatch.setattr(kernels, "times_shares", lambda factors, rows: factors)
    with pytest.raises(PrivacyError, match="without their shares"):
        run(lipschitz(), *data())


@pytest.mark.parametrize(("build", "bounds"), [(lipschitz, "proved"), (ordinary, "enforced")])
def test_a_user_contributes_the_average_of_their_records(build, bounds):
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(9, 6, generator=generator), torch.tensor([0, 1, 2] * 3)
    users = Users([0, 1, 1, 1, 1, 2, 2, 0, 2], records=8)
    engine, criterion, model, _, loader = make(
        build(), users, x, y, batch=3, noise=1e-6, bounds=bounds
    )
    plain = build()
    plain.load_state_dict(model.state_dict())
    losses_of = torch.func.functional_call
    expected = [torch.zeros_like(each) for each in plain.parameters()]
    for user in range(3):
        for place in users.of(user):
            parameters = dict(plain.named_parameters())
            loss = losses.CrossEntropy()(losses_of(plain, parameters, x[[place]]), y[[place]])
            found = torch.autograd.grad(loss, list(parameters.values()))
            for total, each in zip(expected, found, strict=True):
                total += each / len(users.of(user)) / 3
    if bounds == "enforced":  # thresholds that never act
        engine.session.thresholds._followed = {
            name: type(each)(value=1e3, searching=False)
            for name, each in engine.session.thresholds._followed.items()
        }
        engine.session.hold_to_thresholds()
    inputs, targets = next(iter(loader))
    loss = criterion(model(inputs), targets)
    loss.backward()
    sums = engine.session._book.progress.gradients
    for place, total in enumerate(expected):
        torch.testing.assert_close(sums[place].float(), total, rtol=1e-4, atol=1e-6)
    own = losses.CrossEntropy(reduction="none")(plain(x), y).detach()
    mean = sum(own[users.of(user)].mean() for user in range(3)) / 3
    torch.testing.assert_close(loss.detach(), mean, rtol=1e-4, atol=1e-6)


def test_users_are_sampled_and_their_records_chosen_anew():
    users, x, y = data()
    sampling = PoissonSampling(dataset_size=users.number, rate=0.5)
    loader = PrivateLoader((x, y), sampling=sampling, unit=users, steps_per_epoch=60)
    counts, chosen = torch.zeros(users.number), []
    for inputs, _ in loader:
        sample = loader.current
        assert len(inputs) == len(sample.indices) == sample.rows == len(sample.shares)
        assert (torch.from_numpy(users.codes)[sample.indices] == sample.users).all()
        assert (inputs == x[sample.indices]).all()
        for user in sample.users.unique():
            own = sample.indices[sample.users == user]
            assert len(own.unique()) == len(own) == min(SIZES[user], users.records)
            share = sample.shares[sample.users == user].double().sum()
            assert 1 - 1e-5 < share <= 1
            counts[user] += 1
        chosen.append(tuple(sample.indices[sample.users == 2].tolist()))
    assert (counts - 30).abs().max() < 16  # 4 deviations
    seen = [each for each in chosen if each]
    assert len(set(seen)) == len(seen)
    assert len({place for each in seen for place in each}) > 200  # of 1,000 records


def test_all_public_numbers_count_users():
    users, x, y = data()
    engine = make(lipschitz(), users, x, y)[0]
    plan = engine.plan
    assert (plan.unit, plan.user_records) == ("user", 16)
    assert plan.sampling.dataset_size == engine.ledger.dataset_size == 43
    assert plan.expected_batch_size == pytest.approx(25)
    assert plan.delta == default_delta(43)
    assert Plan.from_dict(plan.to_dict()) == plan
    old = {key: value for key, value in plan.to_dict().items() if key != "user_records"}
    assert Plan.from_dict(old).unit == "example"
    text = " ".join(str(engine.report()).split())
    assert "all records of one user" in text
    assert "1000" not in text.replace(",", "")  # nobody's number of records is told


def test_ids_of_all_kinds():
    for ids in (["b", "a", "b"], np.array([2, 1, 2]), torch.tensor([5, 3, 5]), [("x",), 1, ("x",)]):
        users = Users(ids)
        assert (users.number, len(users)) == (2, 3)
        assert users.codes[0] == users.codes[2] != users.codes[1]


@pytest.mark.parametrize("ids", [[1, None], [1.0, float("nan")], [["a", None]], []])
def test_records_of_nobody_are_refused(ids):
    with pytest.raises(PrivacyError, match="user"):
        Users(ids)


def test_what_does_not_fit_is_refused():
    users, x, y = data()
    with pytest.raises(ValueError, match="records must be"):
        Users([1, 2], records=0)
    with pytest.raises(PrivacyError, match="ids of users for 2 records"):
        make(lipschitz(), Users([1, 2]), x, y)
    with pytest.raises(PrivacyError, match="does not go with compile"):
        make(lipschitz(), users, x, y, compile=True)
    engine = make(lipschitz(), users, x, y)[0]
    with pytest.raises(PrivacyError, match="does not go with compile"):
        engine.compile()
    sampling = PoissonSampling(dataset_size=len(x), rate=0.1)
    with pytest.raises(PrivacyError, match="43 users but the sampling describes 1131"):
        PrivateLoader((x, y), sampling=sampling, unit=users)


def test_what_stands_for_a_grouping_knows_it_and_no_names():
    assert Users([5, 7, 5]).digest == Users(["b", "a", "b"]).digest
    assert Users([5, 7, 5]).digest != Users([5, 7, 7]).digest != Users([5, 5, 7]).digest


def test_a_run_is_not_resumed_with_other_users():
    users, x, y = data()
    others = Users(np.roll(users.ids, 1), records=16)
    assert others.number == users.number
    model = lipschitz()
    engine, criterion, model, optimizer, loader = make(model, users, x, y)
    for inputs, targets in loader:
        criterion(model(inputs), targets).backward()
        optimizer.step()
        break
    state, text = engine.state_dict(), engine.ledger.snapshot()
    engine.close()

    def resume(chosen, ledger, **change):
        return PrivacyEngine(ledger=ledger).make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=25),
            criterion=losses.CrossEntropy(), noise_multiplier=1.0, resume_from=state | change,
            options=PrivacyOptions(unit=chosen, steps=4),
        )  # fmt: skip

    with pytest.raises(PrivacyError, match="about other units"):
        resume(others, Ledger(None, snapshot=text))
    with pytest.raises(PrivacyError, match="about other units"):
        resume(users, Ledger(None, snapshot=text), users=None)
    with pytest.raises(LedgerError, match="was begun for users"):
        resume(others, Ledger(None, snapshot=text), users=others.digest)
    resume(users, Ledger(None, snapshot=text))


def test_a_ledger_is_about_one_unit():
    users = Users([0, 1, 2, 0])
    ledger = Ledger.in_memory(dataset_size=3, relation=Relation.ZERO_OUT, unit=users.digest)
    ledger.require_unit(users.digest)
    for other in (None, Users([0, 1, 2, 1]).digest):
        with pytest.raises(LedgerError, match="not for"):
            ledger.require_unit(other)
    text = ledger.snapshot()
    with pytest.raises(LedgerError, match="not for single examples"):
        Ledger(None, snapshot=text, unit="example")
    examples = Ledger.in_memory(dataset_size=3, relation=Relation.ZERO_OUT)
    with pytest.raises(LedgerError, match="not for"):
        examples.absorb(text)
    with pytest.raises(LedgerError, match="not for"):
        PrivacyEngine(ledger=examples).make_private(
            module=lipschitz(), optimizer=torch.optim.SGD([torch.zeros(1)], lr=0.1),
            data_loader=DataLoader(TensorDataset(torch.zeros(4, 6), torch.zeros(4)), batch_size=2),
            criterion=losses.CrossEntropy(), noise_multiplier=1.0,
            options=PrivacyOptions(unit=users, steps=1),
        )  # fmt: skip
