"""What a ledger knows of runs whose steps are paid for pass by pass."""

import pytest

from clipless.accounting import CyclicPoissonSampling, FixedOrder, Mechanism, Relation
from clipless.errors import LedgerError
from clipless.ledger import Ledger, nothing_released_since

PASS = Mechanism(noise_multiplier=2.0, sampling=FixedOrder(dataset_size=20, batch_size=5))
ROUND = Mechanism(
    noise_multiplier=2.0,
    sampling=CyclicPoissonSampling(dataset_size=20, rate=0.25, groups=4),
)


def ledger(path=None):
    return Ledger(path, dataset_size=20, relation=Relation.ZERO_OUT)


def test_who_has_released_what_since_a_state():
    book = ledger()

    def free(run, step):
        return nothing_released_since(book.entries(), run, step)

    assert not free("first", 0)  # never begun here
    book.begin_run("first")
    assert free("first", 0)
    for step in range(3):
        book.release(step, f"{step:016x}")
    assert [free("first", step) for step in range(5)] == [False, False, False, True, True]
    book.begin_run("second")  # begun, and nothing more
    assert free("first", 3)
    assert free("second", 3)
    book.release(3, "3" * 16)
    assert not free("first", 3)
    assert not free("second", 3)
    assert free("second", 4)
    book.begin_run("first", spent=())
    book.release(3, "4" * 16)
    assert not free("second", 4)  # whoever it was may have gone on from the same state


@pytest.mark.parametrize("certain", [False, True])
def test_lines_that_must_be_there_are_waited_for(tmp_path, monkeypatch, certain):
    book = ledger(tmp_path / "ledger.jsonl")
    waited = []
    append = book._file.append

    def watched(*given, sync=True, **named):
        waited.append(sync)
        return append(*given, sync=sync, **named)

    monkeypatch.setattr(book._file, "append", watched)
    book.release(0, "0" * 16, certain=certain)
    assert waited == [certain]


@pytest.mark.parametrize("paid", [PASS, ROUND], ids=["passes", "rounds of groups"])
def test_a_ledger_that_went_another_way_with_passes_or_rounds_is_not_added(paid):
    book = ledger()
    book.spend(paid)
    common = book.snapshot()
    other = Ledger(None, snapshot=common)
    other.spend(paid)
    book.absorb(common)
    with pytest.raises(LedgerError, match="passes in a fixed order, or rounds of groups"):
        book.absorb(other.snapshot())
    assert book.history() == ((paid, 1),)


def test_a_pass_is_reserved_alone_and_read_again(tmp_path):
    path = tmp_path / "ledger.jsonl"
    with ledger(path) as book:
        for _ in range(3):
            book.spend(PASS, limit=1)
            assert book._unspent == 0
    with Ledger(path) as again:
        assert again.history() == ((PASS, 3),)
