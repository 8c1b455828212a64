"""Private rows answer with noise that is paid for, and with nothing else."""

import math

import numpy as np
import pytest
import torch

from clipless.errors import PrivacyError
from clipless.privacy import FullBatch, Ledger, Relation
from clipless.statistics import PrivateRows, fit_scaling


def rows_of(*columns, seed=0):
    ledger = Ledger.in_memory(dataset_size=len(columns[0]), relation=Relation.ZERO_OUT)
    return PrivateRows(*columns, ledger=ledger, insecure_seed=seed), ledger


@pytest.mark.parametrize(
    "peek",
    [
        lambda rows: rows[0], list, np.asarray, np.mean, lambda rows: rows.mean(),
        lambda rows: rows.columns, lambda rows: torch.as_tensor(rows), sum, repr,
        lambda rows: __import__("pickle").dumps(rows), lambda rows: __import__("copy").copy(rows),
    ],
)  # fmt: skip
def test_rows_cannot_be_read(peek):
    secret = torch.full((10, 2), 123456.0)
    rows, ledger = rows_of(secret)
    try:
        seen = peek(rows)
    except (PrivacyError, TypeError, ValueError):
        seen = ""
    assert "123456" not in str(seen)
    assert ledger.releases == 0


def test_sums_are_clipped_and_have_the_stated_noise():
    x = torch.tensor([[3.0, 4.0], [0.3, 0.4], [float("nan"), 1.0]])
    rows, ledger = rows_of(x, seed=None)
    ask = {"bound": 1.0, "noise_multiplier": 2.0, "label": "sum"}
    answers = torch.stack([rows.noisy_sum(lambda x: x, **ask) for _ in range(4000)])
    expected = torch.tensor([0.6 + 0.3 + 0, 0.8 + 0.4 + 1.0], dtype=torch.float64)
    assert (answers.mean(0) - expected).abs().max() < 4 * 2 / math.sqrt(4000)
    assert (answers.std(0) - 2).abs().max() < 0.1
    (mechanism, count), = ledger.history()  # fmt: skip
    assert (mechanism.noise_multiplier, count) == (2.0, 4000)
    assert mechanism.sampling == FullBatch(dataset_size=3)


def test_neighbours_differ_by_the_sensitivity_at_most():
    """Counts and sums of neighbouring tables, with the same noise: never further than claimed."""
    random = torch.Generator().manual_seed(0)

    def ask(table):
        rows, _ = rows_of(table)
        counts = rows.noisy_counts(
            lambda x: x.long().clamp(-3, 7), bins=[4, 4, 4, 4], noise_multiplier=1.0, label=""
        )
        total = rows.noisy_sum(lambda x: x, bound=2.0, noise_multiplier=1.0, label="")
        return torch.cat(counts), total

    def limit(entries):  # each is rounded to 2^-28 of a deviation, which the deviation pays for
        return 2 * (1 + 1.125 * math.sqrt(entries) * 2.0**-28)

    for _ in range(50):
        x = torch.randn(30, 4, generator=random) * 10 ** torch.randn(30, 1, generator=random)
        (counts, total), (other_counts, other_total) = ask(x), ask(x[:-1])
        assert (counts - other_counts).norm() <= limit(16)
        assert (total - other_total).norm() <= limit(4)


def test_the_ledger_is_written_before_the_noise_is_drawn(monkeypatch):
    rows, ledger = rows_of(torch.ones(5, 1))

    def full(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(ledger, "record", full)
    with pytest.raises(OSError, match="disk full"):
        rows.noisy_sum(lambda x: x, bound=1.0, noise_multiplier=1.0, label="")


@pytest.mark.parametrize(
    "mixing",
    [lambda x: x - x.mean(0), lambda x: x / x.norm(), lambda x: x.cumsum(0), lambda x: x.flip(0)],
)
def test_functions_that_mix_rows_are_caught(mixing):
    rows, ledger = rows_of(torch.randn(50, 3))
    with pytest.raises(PrivacyError, match="among other rows"):
        rows.noisy_sum(mixing, bound=1.0, noise_multiplier=1.0, label="")
    with pytest.raises(PrivacyError, match="among other rows"):
        rows.map_rows(lambda x: (mixing(x),))
    assert ledger.releases == 0


def test_mapped_rows_stay_in_custody():
    rows, ledger = rows_of(torch.arange(10.0)[:, None])
    doubled = rows.map_rows(lambda x: (2 * x,))
    answer = doubled.noisy_sum(lambda x: x, bound=100.0, noise_multiplier=1e-6, label="")
    assert answer.item() == pytest.approx(90, abs=0.1)
    assert ledger.releases == 1
    assert len(doubled.hand_over()) == 10


def test_a_ledger_for_other_data_is_refused():
    ledger = Ledger.in_memory(dataset_size=3, relation=Relation.ZERO_OUT)
    with pytest.raises(PrivacyError, match="kept for 3 examples"):
        PrivateRows(torch.ones(4, 1), ledger=ledger)


def test_scaling_finds_centre_and_spread_of_columns_of_any_size():
    random = torch.Generator().manual_seed(0)
    scales = torch.tensor([1e-4, 1.0, 1e6])
    x = scales * (2 + torch.randn(20000, 3, generator=random))
    x[::4, 1] = float("nan")
    rows, ledger = rows_of(x.double())
    found = fit_scaling(rows, numbers=lambda x: x, numeric=3, noise_multiplier=20.0)
    assert ((found.center / scales - 2).abs() < 0.15).all()
    assert ((found.spread / scales - 1).abs() < 0.15).all()
    assert found.missing[1] == pytest.approx(0.25, abs=0.02)
    assert found.missing[[0, 2]].max() < 0.01
    assert not found.switches.any()
    assert ledger.releases == 3


def test_columns_of_two_values_and_constants_are_noticed():
    x = torch.zeros(5000, 3)
    x[::3, 0], x[:, 1] = 1.0, 7.0
    x[:, 2] = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    rows, _ = rows_of(x)
    found = fit_scaling(rows, numbers=lambda x: x, numeric=3, noise_multiplier=12.0)
    assert found.switches.tolist() == [True, True, False]
    assert (found.spread > 0).all()


def test_gram_matrices_of_neighbours_differ_by_one_at_most(monkeypatch):
    """The entries on and above the diagonal are released, and nobody moves them further."""
    sent = []

    def release(self, value, sensitivity, noise_multiplier, label):
        sent.append((value.clone(), sensitivity))
        return value

    monkeypatch.setattr(PrivateRows, "_release", release)
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(40, 5, 3, generator=generator)
    one_channel, tiny = torch.zeros(5, 3), torch.full((5, 3), 1e-3)
    one_channel[2] = 1e20
    for newcomer in (torch.randn(5, 3), one_channel, tiny, torch.full((5, 3), float("nan"))):
        sent.clear()
        ask = {"noise_multiplier": 1.0, "label": "gram"}
        found = rows_of(table)[0].noisy_gram(lambda x: x, **ask)
        rows_of(torch.cat([table, newcomer[None]]))[0].noisy_gram(lambda x: x, **ask)
        (one, sensitivity), (other, _) = sent
        assert sensitivity == 1
        assert one.shape == (15,)
        moved = (one - other).norm().item()
        assert moved <= 1 + 1e-9
        if newcomer is one_channel:  # all in one entry: as far as it goes
            assert moved == pytest.approx(1)
    scaled = table.double() / table.double().flatten(1).norm(dim=1).clamp(min=1)[:, None, None]
    torch.testing.assert_close(found, torch.einsum("nip,njp->ij", scaled, scaled))


def test_gram_noise_is_as_stated_and_symmetric():
    rows, ledger = rows_of(torch.zeros(3, 4, 2), seed=None)
    answers = torch.stack(
        [rows.noisy_gram(lambda x: x, noise_multiplier=3.0, label="gram") for _ in range(3000)]
    )
    assert torch.equal(answers, answers.mT)
    assert (answers.std(0) - 3).abs().max() < 0.2
    assert ledger.releases == 3000


def test_gram_matrices_refuse_what_depends_on_other_rows():
    rows, ledger = rows_of(torch.randn(9, 4, 2))
    with pytest.raises(PrivacyError, match="among other rows"):
        rows.noisy_gram(lambda x: x - x.mean(0), noise_multiplier=1.0, label="")
    assert ledger.releases == 0


def test_noise_is_never_the_same_and_a_seed_says_that_nothing_is_private():
    ask = {"bound": 1.0, "noise_multiplier": 2.0, "label": "sum"}
    x = torch.ones(10, 3)
    (rows, ledger), (others, _) = rows_of(x, seed=None), rows_of(x, seed=None)
    one, two = (each.noisy_sum(lambda x: x, **ask) for each in (rows, others))
    assert (one != two).all()
    assert "not private" not in repr(rows) + ledger.entries()[-1].label
    (rows, ledger), (others, _) = rows_of(x, seed=7), rows_of(x, seed=7)
    for seeded in (rows.map_rows(lambda x: (x,)), others):
        two, one = one, seeded.noisy_sum(lambda x: x, **ask)
    assert torch.equal(one, two)
    assert "not private" in repr(rows)
    assert "not private" in ledger.entries()[-1].label
    with pytest.raises(TypeError, match="seed"):
        PrivateRows(x, ledger=ledger, seed=7)


def test_empty_records_contribute_nothing_anywhere(monkeypatch):
    sent = []

    def release(self, value, *_):
        sent.append(value.clone())
        return value

    monkeypatch.setattr(PrivateRows, "_release", release)
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    present = torch.ones(20, dtype=torch.bool)
    present[[0, 7, 19]] = False
    whole = torch.where(present[:, None], x, float("nan"))

    def answers(rows):
        sent.clear()
        rows.noisy_sum(lambda x: x, bound=2.0, noise_multiplier=1.0, label="")
        rows.noisy_gram(lambda x: x[:, :, None], noise_multiplier=1.0, label="")
        rows.noisy_counts(lambda x: (x > 0).long(), bins=[2] * 3, noise_multiplier=1.0, label="")
        rows.noisy_values(
            lambda x: (x[:, 0] > 0).long(), values=["a", "b"], noise_multiplier=1.0, failure=0.1,
            label="",
        )  # fmt: skip
        return list(sent)

    ledger = Ledger.in_memory(dataset_size=20, relation=Relation.ZERO_OUT)
    masked = PrivateRows(x, ledger=ledger, present=present)
    for rows in (masked, PrivateRows(whole, ledger=ledger).where(lambda x: ~x.isnan().any(1))):
        sums, gram, counts, values = answers(rows)
        kept = x[present].double()
        clipped = kept * (2 / kept.norm(dim=1, keepdim=True).clamp(min=2))
        torch.testing.assert_close(sums, clipped.sum(0))
        unit = kept / kept.norm(dim=1, keepdim=True).clamp(min=1)
        torch.testing.assert_close(gram, (unit.T @ unit)[tuple(torch.triu_indices(3, 3))])
        assert counts.sum() == 3 * 17
        assert values.sum() == 17
        assert (rows.hand_over().tensors[0][~present] == 0).all()
        assert torch.equal(rows.hand_over().tensors[0][present], x[present])
