"""Work in parts: every item once, on any number of threads, and errors come back."""

import threading

import pytest
import torch

from clipless import nn as lip
from clipless.kernels.layers import _memory as _parts
from clipless.kernels.layers._memory import run_in_blocks


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def small(monkeypatch):
    """Parts of two items of four entries, and threads for anything."""
    monkeypatch.setattr(_parts, "GRAIN", 8)
    monkeypatch.setattr(_parts, "_WORTH_THREADS", 1)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8, 25])
def test_every_item_once(count, threads):
    done, workers = torch.zeros(count, dtype=torch.int64), set()

    def work(part):
        assert part.stop - part.start == 2
        done[part] += 1
        workers.add(threading.get_ident())

    run_in_blocks(work, count, entries=4)
    assert done.tolist() == [1] * count
    assert len(workers) <= threads


@pytest.mark.usefixtures("small")
def test_errors_come_back(threads):
    def work(part):
        if part.start == 2:
            raise KeyError("from a part")

    with pytest.raises(KeyError, match="from a part"):
        run_in_blocks(work, 9, entries=4)


@pytest.mark.usefixtures("small")
def test_layers_on_several_threads(threads):
    """With a graph, without, and in inference mode: modes belong to threads."""
    x = torch.randn(9, 4, 4, 4)
    for layer in (lip.GroupSort(2), lip.MaxMin(), lip.ScaledL2NormPool2d(2)):
        alone = torch.cat([layer(row[None]) for row in x])
        assert torch.equal(layer(x), alone)
        with torch.inference_mode():
            assert torch.equal(layer(x), alone)
            assert torch.equal(layer(x + 0.0), alone)
        leaf = x.clone().requires_grad_()
        layer(leaf).sum().backward()
        rows = x.clone().requires_grad_()
        sum(layer(row[None]).sum() for row in rows).backward()
        assert torch.equal(leaf.grad, rows.grad)


def test_items_larger_than_a_part_stay_with_the_caller(threads, monkeypatch):
    monkeypatch.setattr(_parts, "GRAIN", 8)
    monkeypatch.setattr(_parts, "_WORTH_THREADS", 1)
    workers = set()
    run_in_blocks(lambda part: workers.add(threading.get_ident()), 9, entries=9)
    assert workers == {threading.get_ident()}
