"""Neighbours of a small data set, chosen to be awkward."""

import math

import torch

from clipless.audit import with_empty_record

LONE = 7
"""The only record of the last class."""


def records(count=40, shape=(6,), classes=3, seed=0):
    """Inputs and labels, with one record of the last class."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, *shape, generator=generator)
    y = torch.randint(classes - 1, (count,), generator=generator)
    y[LONE] = classes - 1
    return x, y


def with_record(data, index, x=None, y=None):
    """The data with one record replaced: by an input, a label, or both."""
    inputs, labels = (part.clone() for part in data)
    if x is not None:
        inputs[index] = x
    if y is not None:
        labels[index] = y
    return inputs, labels


def neighbours(data, *, new_label=None):
    """At least 20 of them: emptied records, and records replaced by something extreme."""
    x, y = data
    last = len(x) - 1
    spike = torch.zeros_like(x[0])
    spike.view(-1)[0] = 1e6
    one_nan = x[3].clone()
    one_nan.view(-1)[0] = math.nan
    return {
        **{
            f"record {index} emptied": with_empty_record(data, index)
            for index in (0, 1, LONE, 20, last)
        },
        "huge": with_record(data, 0, 1e30),
        "huge and negative": with_record(data, last, -1e30),
        "above float32": with_record(data, 3, 3e38),
        "tiny": with_record(data, 3, 1e-38),
        "zero": with_record(data, 0, 0.0),
        "negative": with_record(data, 5, -x[5]),
        "nan": with_record(data, 0, math.nan),
        "one nan": with_record(data, 3, one_nan),
        "last is nan": with_record(data, last, math.nan),
        "infinite": with_record(data, 4, math.inf),
        "minus infinite": with_record(data, 4, -math.inf),
        "a spike": with_record(data, LONE, spike),
        "constant": with_record(data, 9, 1.0),
        "the first one twice": with_record(data, last, x[0], y[0]),
        "the last one twice": with_record(data, 0, x[last], y[last]),
        "no record of a class": with_record(data, LONE, y=0),
        "another record of a rare class": with_record(data, 11, y=int(y[LONE])),
        "a rare class first": with_record(data, 0, y=int(y[LONE])),
        "everything at once": with_record(data, last, 1e38, int(y[LONE])),
    }


def assert_replays(recording, others):
    """All neighbours pass, and some query does depend on the record."""
    assert len(others) >= 20
    results = {name: recording.replay(neighbour) for name, neighbour in others.items()}
    failed = [f"{name}: {each}" for name, each in results.items() if not each.passed]
    assert not failed, "\n".join(failed)
    assert all(each.queries for each in results.values())
    moved = [name for name, each in results.items() if not each.unmoved]
    assert moved, "no query depended on any record: nothing was tested"
