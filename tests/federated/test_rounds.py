"""Rounds of clients and a server: what is sent, summed, refused and counted; and its neighbours."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from clipless.accounting import epsilon
from clipless.audit import record
from clipless.errors import BudgetExhaustedError, PrivacyError
from clipless.federated import (
    SHARE_STEPS,
    FederatedClient,
    FederatedServer,
    FederatedTerms,
    decoded_update,
    encoded_update,
    excess,
)
from clipless.ledger import read_ledger

CENTRAL = FederatedTerms(clients=6, rounds=4, bound=0.5, noise_multiplier=2.0)
SHARES = replace(CENTRAL, noise="shares", dropouts=1, colluding=1)


def model(entries=40):
    torch.manual_seed(0)
    return nn.Linear(entries, 1, bias=False)


def moving(by):
    """Local training that moves the weights by so much, whatever they are."""

    def train(module, number):
        with torch.no_grad():
            module.weight += by

    return train


def federation(terms, moves, **options):
    server = FederatedServer(model(len(moves[0])), terms, **options)
    clients = [FederatedClient(model(len(move)), moving(move), terms) for move in moves]
    return server, clients


def one_round(server, clients, dropped=()):
    task = server.begin_round()
    asked = server.chosen(range(len(clients)))
    messages = {name: clients[name].answer(task) for name in asked if name not in dropped}
    return server.finish_round(messages), messages


# --- the grid -------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 1000, 2**24, 2**31])
def test_updates_never_exceed_the_limit_and_lose_little(limit):
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-300, 1e-3, 0.7, 1.0, 1e9, 1e300):
        for size in (1, 7, 5000):
            update = scale * torch.randn(size, generator=generator, dtype=torch.float64)
            steps = encoded_update(update, bound=0.7, limit=limit)
            assert sum(int(each) ** 2 for each in steps) <= limit**2
            assert not excess(steps, limit=limit)
            wanted = update * min(1.0, 0.7 / max(float((update / scale).norm()) * scale, 1e-300))
            lost = (decoded_update(steps, bound=0.7, limit=limit) - wanted).abs().max()
            assert float(lost) <= 2 * 0.7 / limit


def test_an_excess_of_one_step_is_seen():
    limit = 2**31
    exact = torch.tensor([limit])
    assert not excess(exact, limit=limit)
    assert excess(torch.tensor([limit, 1]), limit=limit)
    assert excess(torch.tensor([limit + 1]), limit=limit)
    side = math.isqrt(limit**2 // 10**6)
    assert not excess(torch.full((10**6,), side), limit=limit)
    assert excess(torch.full((10**6,), side + 1), limit=limit)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_of_an_update_that_is_not_finite_nothing_is_left(bad):
    assert not encoded_update(torch.tensor([1.0, bad]), bound=1.0, limit=100).any()


# --- what is released -----------------------------------------------------------------------------


@pytest.mark.parametrize("terms", [CENTRAL, SHARES], ids=lambda each: each.noise)
@pytest.mark.parametrize("client", [0, 3])
def test_a_client_moves_what_is_released_by_the_declared_sensitivity(terms, client):
    """Replay: the update of one client is extreme in one run, and zero in the other."""

    def run(moves):
        server, clients = federation(terms, list(moves))
        results = [one_round(server, clients)[0] for _ in range(2)]
        return {
            "updates": [each.update for each in results],
            "weights": server.model.weight.detach().clone(),
            "cost": str(server.cost),
            "summed": [each.summed for each in results],
        }

    moves = 5.0 * torch.randn(6, 40, generator=torch.Generator().manual_seed(1))
    neighbour = moves.clone()
    neighbour[client] = 0.0
    result = record(run, moves).replay(neighbour)
    assert not result.differences
    # Shares of twice the sensitivity, as for a client that is replaced; here one is emptied.
    assert 0.49 < max(result.largest.values()) <= 0.5


def test_shares_of_the_honest_add_up_to_the_planned_noise():
    """With one dropout and one share that the adversary knows, what is left is the plan's."""
    size = 20_000
    server, clients = federation(SHARES, [torch.zeros(size)] * 6)
    _, messages = one_round(server, clients, dropped=(2,))
    known = messages[5]
    left = sum(messages.values()) - known
    deviation = float(left.double().std()) / SHARES.limit
    assert deviation == pytest.approx(SHARES.noise_multiplier, rel=0.02)
    assert SHARE_STEPS * math.sqrt(SHARES.honest) / SHARES.limit >= SHARES.noise_multiplier


def test_too_few_shares_are_not_opened_and_the_round_stays_counted():
    server, clients = federation(SHARES, [torch.ones(40)] * 6)
    weights = server.model.weight.detach().clone()
    with pytest.raises(PrivacyError, match="must not be opened"):
        one_round(server, clients, dropped=(2, 3))
    assert torch.equal(server.model.weight, weights)
    assert server.cost.rounds == 1
    with pytest.raises(PrivacyError, match="no round is open"):
        server.finish_round({})


def test_masks_of_secure_aggregation_leave_the_sum_as_it_is():
    """Additive masks, whole numbers modulo 2^64, hide every message and cancel out exactly."""
    server, clients = federation(SHARES, [torch.ones(40)] * 6)
    task = server.begin_round()
    messages = [clients[name].answer(task) for name in server.chosen(range(6))]
    masks = torch.randint(-(2**63), 2**63 - 1, (6, 40))
    masked = [message + mask for message, mask in zip(messages, masks, strict=True)]
    total = sum(masked[1:], masked[0]) - masks.sum(dim=0)
    assert torch.equal(total, torch.stack(messages).sum(dim=0))
    assert not any(torch.equal(a, b) for a, b in zip(masked, messages, strict=True))


def test_central_noise_is_that_of_the_terms_and_the_mean_is_over_the_public_number():
    size = 20_000
    move = torch.zeros(size)
    move[0] = 0.25
    server, clients = federation(replace(CENTRAL, noise_multiplier=0.5), [move] * 6)
    result, _ = one_round(server, clients, dropped=(0, 1, 2))  # absent clients count as zero
    noise = result.update.clone()
    noise[0] -= 3 * 0.25 / 6
    assert float(noise.std()) == pytest.approx(0.5 * 0.5 / 6, rel=0.02)
    assert abs(float(noise[0])) < 6 * 0.5 * 0.5 / 6


def test_the_server_leaves_out_what_no_client_may_send():
    terms = replace(CENTRAL, noise_multiplier=1e-6)
    server, clients = federation(terms, [torch.full((40,), 1e-3)] * 6)
    task = server.begin_round()
    server.chosen(range(6))
    honest = clients[0].answer(task)
    long = torch.zeros(40, dtype=torch.int64)
    long[0] = terms.limit + 1
    result = server.finish_round(
        {0: honest, 1: long, 2: honest.double(), 3: honest[:-1], 4: 2**40 * honest, "x": honest}
    )
    assert result.summed == (0,)
    assert "longer than the bound" in result.refused[1]
    assert "longer than the bound" in result.refused[4]
    assert "no vector of 40 whole numbers" in result.refused[2]
    assert "no vector" in result.refused[3]
    assert "was not asked" in result.refused["x"]
    assert float(result.update.abs().max()) < 1e-3


def test_poisson_sampling_of_clients_is_what_is_accounted_for():
    terms = replace(CENTRAL, clients=4000, rounds=3, rate=0.1)
    server = FederatedServer(model(), terms)
    asked = []
    for _ in range(3):
        server.begin_round()
        asked.append(set(server.chosen(range(4000))))
        with pytest.raises(PrivacyError, match="second draw"):
            server.chosen(range(4000))
        server.finish_round({})  # a round in which nobody answers has noise, and counts
    assert all(abs(len(each) - 400) < 5 * math.sqrt(360) for each in asked)
    assert abs(len(asked[0] & asked[1]) - 40) < 5 * math.sqrt(40)
    assert server.cost.epsilon == pytest.approx(terms.epsilon())
    client = FederatedClient(model(), moving(0.0), terms)
    client.answer(FederatedServer(model(), terms).begin_round())
    # A client knows that it took part: its own figure claims no amplification.
    assert client.cost.epsilon == epsilon(((terms.taking_part, 1),), terms.target_delta)
    assert client.cost.epsilon > server.cost.epsilon


def test_training_learns_under_both_kinds_of_noise():
    goal = torch.linspace(-1, 1, 40)

    def towards(module, number):
        with torch.no_grad():
            module.weight += 0.5 * (goal - module.weight)

    for noise in ("central", "shares"):
        terms = FederatedTerms.for_epsilon(
            8.0, clients=60, rounds=8, bound=2.0, noise=noise, delta=1e-3
        )
        server = FederatedServer(model(), terms)
        clients = [FederatedClient(model(), towards, terms) for _ in range(60)]
        before = float((server.model.weight.detach() - goal).norm())
        for _ in range(8):
            one_round(server, clients)
        assert float((server.model.weight.detach() - goal).norm()) < 0.25 * before
        assert server.cost.epsilon <= 8.0
        assert server.cost.epsilon == pytest.approx(clients[0].cost.epsilon)


# --- what is counted and refused ------------------------------------------------------------------


def test_each_side_keeps_its_books_over_restarts(tmp_path):
    terms = SHARES
    server = FederatedServer(model(), terms, ledger=tmp_path / "server.jsonl")
    client = FederatedClient(model(), moving(0.1), terms, ledger=tmp_path / "client.jsonl")
    task = server.begin_round()
    first = client.answer(task)
    server.ledger.close()
    client.ledger.close()
    again = FederatedClient(model(), moving(0.1), terms, ledger=tmp_path / "client.jsonl")
    with pytest.raises(PrivacyError, match="answered before"):
        again.answer(task)
    restarted = FederatedServer(model(), terms, ledger=tmp_path / "server.jsonl")
    task = restarted.begin_round()
    assert task.number == 2
    assert not torch.equal(again.answer(task), first)
    assert (again.cost.rounds, restarted.cost.rounds) == (2, 2)
    kept = read_ledger(tmp_path / "client.jsonl")
    assert sum(kept.counts().values()) == 2
    alone = epsilon(((terms.message, 2),), terms.target_delta)
    assert again.cost.message_epsilon == pytest.approx(alone)
    assert again.cost.epsilon < alone
    assert restarted.cost.to_dict()["message_epsilon"] == pytest.approx(alone)


def test_a_client_refuses_other_terms_other_models_and_more_rounds():
    server, clients = federation(CENTRAL, [torch.zeros(40)] * 6)
    task = server.begin_round()
    weaker = replace(CENTRAL, noise_multiplier=0.1)
    with pytest.raises(PrivacyError, match="terms are not those"):
        clients[0].answer(replace(task, terms=weaker.digest))
    with pytest.raises(PrivacyError, match="another model"):
        clients[0].answer(replace(task, weights={"weight": torch.zeros(1, 3)}))
    with pytest.raises(BudgetExhaustedError, match="round 5 is none"):
        clients[0].answer(replace(task, number=5))
    assert clients[0].cost.rounds == 0
    for _ in range(3):
        server.begin_round()
    with pytest.raises(BudgetExhaustedError, match="all 4 rounds"):
        server.begin_round()
    with pytest.raises(PrivacyError, match="number of clients is public"):
        server.chosen(range(7))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"clients": 0}, "clients must be"),
        ({"noise": "local"}, "noise must be"),
        ({"rate": 0.0}, "rate must lie"),
        ({"dropouts": 1}, "leave them out"),
        ({"noise": "shares", "rate": 0.5}, "rate=1"),
        ({"noise": "shares", "dropouts": 3, "colluding": 3}, "nobody's share"),
        ({"noise": "shares", "noise_multiplier": 1e-6}, "has room for"),
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"delta": 1.0}, "delta must lie"),
    ],
)
def test_terms_without_a_meaning_are_refused(change, match):
    with pytest.raises(ValueError, match=match):
        replace(CENTRAL, **change)


def test_runs_that_draw_more_noise_than_is_accounted_for_are_refused():
    terms = replace(SHARES, clients=10**6, rounds=10**4)
    with pytest.raises(PrivacyError, match="2\\^38"):
        FederatedServer(model(), terms)


def test_seeded_noise_is_marked_in_the_ledger():
    client = FederatedClient(model(), moving(0.1), SHARES, insecure_seed=1)
    client.answer(FederatedServer(model(), SHARES).begin_round())
    assert client.ledger.insecure
    assert client.answered == {1}
