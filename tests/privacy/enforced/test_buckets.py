"""Sequences of several lengths in one run: the same gradients as padded to one, in less work."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from clipless import PrivacyEngine, losses
from clipless.audit import replay, with_empty_record
from clipless.errors import PrivacyError
from clipless.privacy import BatchOptions, Buckets, EnforcedBounds, PrivacyOptions

LONGEST = 12
LENGTHS = (3, 6, LONGEST)


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(20, 8), nn.Embedding(LONGEST, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 2)
        self.lengths = []

    def forward(self, tokens, mask):
        self.lengths.append(tokens.shape[1])
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        x = self.norm(x + self.attention(x, x, x, key_padding_mask=~mask, need_weights=False)[0])
        kept = mask.unsqueeze(-1).float()
        return self.head((x * kept).sum(1) / kept.sum(1))


def records(count=60):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, LONGEST + 1, (count,), generator=generator)
    mask = torch.arange(LONGEST) < sizes.unsqueeze(1)
    tokens = torch.randint(1, 20, (count, LONGEST), generator=generator) * mask
    return tokens, mask, (tokens[:, 0] > 10).long(), sizes


def run(buckets, *, steps=4, noise=0.0, follow=False, **options):
    torch.manual_seed(0)
    tokens, mask, labels, _ = records()
    model, criterion, engine = Reads(), losses.CrossEntropy(), PrivacyEngine(insecure_seed=3)
    _, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), criterion=criterion,
        data_loader=DataLoader(TensorDataset(tokens, mask, labels), batch_size=20),
        noise_multiplier=noise, bounds=EnforcedBounds(thresholds=0.05, follow=follow),
        options=PrivacyOptions(batches=BatchOptions(buckets=buckets, **options)),
    )  # fmt: skip
    model.lengths.clear()
    taken = 0
    while taken < steps:
        for tokens, mask, y in loader:
            if loader.current.micro_batch == 0:
                optimizer.zero_grad()
            assert loader.current.length in (None, tokens.shape[1])
            criterion(model(tokens, mask), y).backward()
            if loader.current.is_last:
                optimizer.step()
                taken += 1
                if taken == steps:
                    break
    return model, engine


def test_buckets_train_as_one_length_does():
    plain, _ = run(None)
    for options in ({}, {"micro_batch_size": 4}):
        model, engine = run(Buckets(records()[3], LENGTHS), **options)
        assert set(model.lengths) == set(LENGTHS)
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert engine.session.plan.sensitivities == run(None)[1].session.plan.sensitivities


def test_counts_of_all_buckets_move_thresholds():
    _, engine = run(Buckets(records()[3], LENGTHS), noise=0.05, follow=True, steps=8)
    assert len(set(engine.session.thresholds.values().values())) > 1


def test_every_example_is_in_the_bucket_of_its_own_and_cut_to_it():
    tokens, _, _, sizes = records()
    buckets = Buckets(sizes, LENGTHS)
    engine = run(buckets)[1]
    loader = engine.session.loader
    seen = set()
    for x, kept, _ in loader:
        sample = loader.current
        assert x.shape[1] == kept.shape[1] == sample.length
        assert torch.equal(x, tokens[sample.indices, : sample.length])
        assert (sizes[sample.indices] <= sample.length).all()
        seen.add(sample.length)
    assert seen == set(LENGTHS)


def test_a_replay_on_a_neighbour_finds_nothing():
    """An emptied record keeps its place in its bucket: nothing else moves."""
    tokens, mask, labels, sizes = records()

    def train(rows):
        torch.manual_seed(0)
        model, criterion, engine = Reads(), losses.CrossEntropy(), PrivacyEngine()
        _, optimizer, loader = engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            criterion=criterion, data_loader=DataLoader(rows, batch_size=20), noise_multiplier=1.0,
            bounds="enforced",
            options=PrivacyOptions(batches=BatchOptions(buckets=Buckets(sizes, LENGTHS))),
        )  # fmt: skip
        for x, kept, y in loader:
            criterion(model(x, kept), y).backward()
            if loader.current.is_last:
                optimizer.step()
                optimizer.zero_grad()
        return {"weights": model.state_dict(), "lengths": model.lengths}

    rows = TensorDataset(tokens, mask, labels)
    record = int((sizes <= LENGTHS[0]).nonzero()[0])
    result = replay(train, rows, with_empty_record(rows, record))
    assert result.passed, result.differences


def test_what_does_not_fit_is_refused():
    sizes = records()[3]
    with pytest.raises(ValueError, match=r"record \d+ has 1[0-2] entries"):
        Buckets(sizes, (3, 9))
    with pytest.raises(ValueError, match="lengths must grow"):
        Buckets(sizes, (6, 3))
    with pytest.raises(PrivacyError, match="sizes of 59 records"):
        run(Buckets(sizes[:-1], LENGTHS))
    with pytest.raises(PrivacyError, match="pad=True"):
        run(Buckets(sizes, LENGTHS), pad=True)
    model, engine = run(Buckets(sizes, LENGTHS))
    tokens, mask, labels, _ = records()
    for x, _, _ in engine.session.loader:
        with pytest.raises(PrivacyError, match="the same arguments in every step"):
            model(tokens[: len(x), :5], mask[: len(x), :5])  # no bucket has this length
        break
    with pytest.raises(PrivacyError, match="for bounds='enforced'"):
        PrivacyEngine(insecure_seed=0).make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            criterion=losses.CrossEntropy(), noise_multiplier=1.0,
            data_loader=DataLoader(TensorDataset(tokens, mask, labels), batch_size=20),
            options=PrivacyOptions(batches=BatchOptions(buckets=Buckets(sizes, LENGTHS))),
        )  # fmt: skip
