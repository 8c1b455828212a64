"""What a side of a federated run counts: of one set of terms, once a round, and honestly."""

import contextlib
import json
import math
import threading
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from clipless.accounting import FullBatch, LargeDelta, Mechanism, Relation, epsilon
from clipless.errors import PrivacyError
from clipless.federated import (
    FederatedClient,
    FederatedServer,
    FederatedTerms,
    RoundTask,
    encoded_update,
)
from clipless.ledger import Ledger

CENTRAL = FederatedTerms(clients=6, rounds=4, bound=0.5, noise_multiplier=2.0)
SHARES = replace(CENTRAL, noise="shares", dropouts=1, colluding=1)


def model():
    return nn.Linear(4, 1, bias=False)


def task(terms, number):
    weights = {name: each.detach().clone() for name, each in model().named_parameters()}
    return RoundTask(number=number, terms=terms.digest, weights=weights)


def client(terms, train=lambda module, number: None, **options):
    return FederatedClient(model(), train, terms, **options)


def in_memory(dataset_size=6, relation=Relation.ZERO_OUT):
    return Ledger.in_memory(dataset_size=dataset_size, relation=relation)


@pytest.mark.parametrize("side", ["client", "server"])
def test_seeded_noise_has_no_epsilon(side):
    server = FederatedServer(model(), SHARES, insecure_seed=1)
    party = client(SHARES, insecure_seed=1)
    party.answer(server.begin_round())
    cost = party.cost if side == "client" else server.cost
    assert (cost.epsilon, cost.message_epsilon) == (math.inf, math.inf)
    assert "not private" in str(cost)
    assert "epsilon" not in str(cost).replace("insecure", "")
    data = json.loads(json.dumps(cost.to_dict(), allow_nan=False))
    assert data["insecure"] is True
    assert (data["epsilon"], data["message_epsilon"]) == (None, None)


@pytest.mark.parametrize("side", ["client", "server"])
def test_a_ledger_belongs_to_the_terms_it_was_begun_for(tmp_path, side):
    def opened(terms):
        if side == "client":
            return client(terms, ledger=tmp_path / "ledger.jsonl")
        return FederatedServer(model(), terms, ledger=tmp_path / "ledger.jsonl")

    first = opened(CENTRAL)
    first.ledger.close()
    opened(CENTRAL).ledger.close()
    assert (tmp_path / "ledger.jsonl").read_text().count(f"terms {CENTRAL.digest}") == 1
    with pytest.raises(PrivacyError, match="rounds under other terms"):
        opened(SHARES)
    opened(CENTRAL).ledger.close()  # whoever was refused holds no lock


def test_messages_without_noise_are_not_forgotten_when_terms_change():
    ledger = in_memory()
    client(CENTRAL, ledger=ledger).answer(task(CENTRAL, 1))
    with pytest.raises(PrivacyError, match="rounds under other terms"):
        client(SHARES, ledger=ledger)


def test_ledgers_about_something_else_are_refused_and_what_else_is_counted_costs():
    for other in (in_memory(dataset_size=7), in_memory(relation=Relation.REPLACE_ONE)):
        with pytest.raises(PrivacyError, match="a ledger of its own"):
            client(SHARES, ledger=other)
    release = Mechanism(noise_multiplier=3.0, sampling=FullBatch(dataset_size=6))
    used = in_memory()
    used.record(release, label="something else")
    with pytest.raises(PrivacyError, match="counted something else"):
        client(SHARES, ledger=used)
    later = client(SHARES)
    assert (later.cost.epsilon, later.cost.message_epsilon) == (0.0, 0.0)
    later.ledger.record(release, label="something else")
    alone = epsilon(((release, 1),), SHARES.target_delta)
    assert later.cost.rounds == 0
    assert later.cost.epsilon == pytest.approx(alone)
    assert later.cost.message_epsilon == pytest.approx(alone)


def test_delta_is_chosen_as_everywhere_else():
    with pytest.raises(PrivacyError, match="at least 1/N"):
        FederatedTerms.for_epsilon(0.5, clients=20, rounds=3, bound=1.0, delta=0.5)
    with pytest.raises(PrivacyError, match=r"above 0\.1/N"):
        replace(CENTRAL, delta=0.1)
    with pytest.warns(UserWarning, match=r"above 0\.1/N"):
        assert replace(CENTRAL, delta=LargeDelta(0.1)).target_delta == 0.1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert replace(CENTRAL, delta=0.1 / 6).target_delta == 0.1 / 6


@pytest.mark.parametrize("shared", ["client", "ledger"])
def test_a_round_is_answered_once_by_two_threads(shared):
    """Both look whether the round was answered before either has answered it, if they may."""
    meeting = threading.Barrier(2)

    def train(module, number):
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait(0.5)

    ledger = in_memory()
    parties = [client(SHARES, train, ledger=ledger)]
    parties.append(parties[0] if shared == "client" else client(SHARES, train, ledger=ledger))
    answers, refused = [], []

    def run(party):
        try:
            answers.append(party.answer(task(SHARES, 1)))
        except PrivacyError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=run, args=(each,)) for each in parties]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(answers) == 1
    assert "answered before" in refused[0]
    assert ledger.releases == 1


def test_a_training_that_answers_its_own_round_gives_one_answer():
    inner = []

    def train(module, number):
        if not inner:
            inner.append(None)
            inner.append(party.answer(task(SHARES, 1)))

    party = client(SHARES, train)
    with pytest.raises(PrivacyError, match="answered before"):
        party.answer(task(SHARES, 1))
    assert party.ledger.releases == 1


def test_nobody_is_asked_if_too_few_are_there_for_the_noise():
    server = FederatedServer(model(), SHARES)
    first = server.begin_round()
    with pytest.raises(PrivacyError, match="nobody is asked"):
        server.chosen(range(4))
    parties = {name: client(SHARES) for name in server.chosen(range(5))}  # one has come since
    result = server.finish_round({name: each.answer(first) for name, each in parties.items()})
    assert len(result.summed) == 5
    few = FederatedServer(model(), CENTRAL)
    few.begin_round()
    assert few.chosen(range(2)) == [0, 1]  # with central noise absent clients count as zero


@pytest.mark.parametrize("bound", [5e-324, 1e-300, 1e-280])
@pytest.mark.parametrize("size", [3e38, 1.7e308])
def test_updates_that_are_far_above_the_bound_are_scaled_to_it(bound, size):
    """Once, their ratio overflowed, and the rounding never ended."""
    done = []

    def encode():
        done.append(encoded_update(torch.tensor([3, -4.0]).double() / 4 * size, bound=bound,
                                   limit=1000))  # fmt: skip

    thread = threading.Thread(target=encode, daemon=True)
    thread.start()
    thread.join(5)
    assert done, "the update is still being rounded"
    assert done[0].tolist() == [599, -799]
