"""Habits: work on weights that becomes a CUDA graph. Here a graph is a list of calls to repeat."""

import pytest
import torch

from clipless.kernels import LazyCudaGraph
from clipless.kernels.compilation import _cuda_graphs as _graphs

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Repetition:
    """Records without doing anything, as a graph does."""

    made, replayed, spoils = 0, 0, False

    def __init__(self, work, *, device):
        self._work = work
        type(self).made += 1

    def replay(self):
        type(self).replayed += 1
        if not self.spoils:
            self._work()


@pytest.fixture
def repetition(monkeypatch):
    kind = type("Fresh", (Repetition,), {})
    monkeypatch.setattr(_graphs, "RecordedGraph", kind)
    monkeypatch.setattr(_graphs, "_may_record", lambda tensors: True)
    return kind


def halve(tensors):
    torch._foreach_mul_(tensors, 0.5)


def test_the_third_time_is_recorded_and_each_is_done_once(repetition):
    habit, tensors = LazyCudaGraph(), [torch.ones(3), torch.full((2,), 4.0)]
    for time in range(1, 6):
        versions = [tensor._version for tensor in tensors]
        habit.run(halve, tensors)
        assert torch.equal(tensors[0], torch.full((3,), 0.5**time))
        assert torch.equal(tensors[1], torch.full((2,), 4 * 0.5**time))
        assert all(tensor._version > old for tensor, old in zip(tensors, versions, strict=True))
        assert repetition.made == int(time >= 3)
    assert repetition.replayed == 4  # once to be compared, then three times for good


def test_memory_that_moves_is_recorded_anew(repetition):
    habit = LazyCudaGraph()
    for _ in range(2):
        tensors = [torch.ones(3)]
        for _ in range(4):
            habit.run(halve, tensors)
        assert torch.equal(tensors[0], torch.full((3,), 0.5**4))
    assert repetition.made == 2


def test_a_replay_that_does_something_else_is_not_used(repetition):
    repetition.spoils = True
    habit, tensors = LazyCudaGraph(), [torch.ones(3)]
    habit.run(halve, tensors)
    habit.run(halve, tensors)
    with pytest.warns(UserWarning, match="something else"):
        habit.run(halve, tensors)
    habit.run(halve, tensors)
    assert torch.equal(tensors[0], torch.full((3,), 0.5**4))
    assert repetition.replayed == 1


def test_work_that_cannot_be_recorded_goes_on(repetition, monkeypatch):
    def fail(self, work, *, device):
        raise RuntimeError("looks at values")

    monkeypatch.setattr(repetition, "__init__", fail)
    habit, tensors = LazyCudaGraph(), [torch.ones(3)]
    for _ in range(5):
        habit.run(halve, tensors)
    assert torch.equal(tensors[0], torch.full((3,), 0.5**5))


@gpu
def test_real_graphs():
    habit, tensors = LazyCudaGraph(), [torch.ones(3, device="cuda")]
    for _ in range(5):
        habit.run(halve, tensors)
    assert torch.equal(tensors[0].cpu(), torch.full((3,), 0.5**5))
    assert habit._recording is not None
