"""Passes and criteria as CUDA graphs.

Here a recording is a function that is called again, on the same arguments. What it computed last is
overwritten, and everything else about it is what a graph does; `gpu` tests record real ones.
"""

import copy
import gc
import itertools
import warnings
import weakref

import pytest
import torch

from clipless import losses
from clipless.privacy import TrainingSession
from clipless.privacy.compiled import _recorded
from clipless.privacy.compiled._calls import is_our_own
from clipless.privacy.compiled._recorded import Recorded
from tests.privacy.compiled_runs import BACKEND, compiled
from tests.privacy.misuse_helpers import (
    assert_close,
    edit_in_secret,
    expected_gradients,
    refused,
    weights_of,
)
from tests.privacy.runs import SHAPES, Run, cnn, examples, mlp, residual

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Repetition:
    """Stands in for a recording where there is no GPU."""

    made = 0
    fails: Exception | None = None

    def __init__(self, work, *, device, pool=None):
        if Repetition.fails is not None:
            raise Repetition.fails
        Repetition.made += 1
        self._work, self.result, self.replays = work, work(), 0

    def replay(self):
        old = self.result
        self.result = self._work()
        for one, new in zip(_tensors(old), _tensors(self.result), strict=True):
            one.data.copy_(new.detach())  # whoever still holds the old one sees what a graph does
        self.replays += 1


def _tensors(result):
    several = [result] if isinstance(result, torch.Tensor) else result
    return [each for each in several if each is not None]


@pytest.fixture(autouse=True)
def _as_on_a_gpu(request, monkeypatch, fresh_compiler):
    monkeypatch.setattr(Repetition, "made", 0)
    monkeypatch.setattr(Repetition, "fails", None)
    if "real" not in request.node.name:
        monkeypatch.setattr(_recorded, "RecordedGraph", Repetition)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        monkeypatch.setattr(TrainingSession, "on_cuda", property(lambda session: True))
        monkeypatch.setattr(TrainingSession, "on_accelerator", property(lambda session: True))


def passes_of(run):
    return run.engine.session._compiled._passes


# --- the same numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "precision"), [(mlp, "float32"), (cnn, "bfloat16"), (residual, "float32")]
)
def test_training_is_the_same(build, precision):
    weights = []
    for options in ({"pad": True}, {"compile": BACKEND}):
        torch.manual_seed(1)
        data = examples(100, SHAPES[build])
        run = Run(build(), data, precision=precision, **options).steps(4)
        assert run.engine.session.uses_graphs == ("compile" in options)
        weights.append(weights_of(run.model))
    assert Repetition.made == 3  # two passes and the criterion
    tolerance = 1e-5 if precision == "float32" else 1e-2
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, atol=tolerance, rtol=tolerance)


def test_gradients_are_those_of_the_batch():
    run = compiled(data=examples(40), noise_multiplier=0.0, batch_size=20).steps(2)
    for _ in range(3):
        x, y = run.batch()
        run.backward(x, y)
        assert_close(run.gradients(), expected_gradients(run, x, y))
        run.optimizer.step()


def test_evaluation_is_not_recorded():
    run = compiled().steps(3)
    x = torch.randn(7, 6)
    run.model.eval()
    torch.testing.assert_close(run.model(x), copy.deepcopy(run.model)(x))
    run.model.train()
    run.steps(2)
    assert Repetition.made == 3


# --- whose memory is whose -----------------------------------------------------------------------


def test_what_was_handed_out_stays_what_it_was():
    """The next gradient, which has no noise yet, must not appear in that of the last step."""
    run = compiled().steps(2)
    kept = []
    for _ in range(2):
        x, y = run.batch()
        output = run.model(x)
        loss = run.criterion(output, y)
        run.optimizer.zero_grad()
        loss.backward()
        run.optimizer.step()
        kept.append([output.detach(), loss.detach(), *(p.grad for p in run.model.parameters())])
        if len(kept) == 1:
            values = [each.clone() for each in kept[0]]
    x, y = run.batch()
    run.backward(x, y)
    assert all(map(torch.equal, kept[0], values))
    assert not any(map(torch.equal, kept[0], kept[1]))


@pytest.mark.parametrize("early", [False, True])
def test_edited_outputs_change_nothing(early):
    run = compiled(noise_multiplier=0.0).steps(1 if early else 3)
    x, y = run.batch()
    expected = expected_gradients(run, x, y)
    out = run.model(x)
    edit_in_secret(out, "through data")
    run.criterion(out, y).backward()
    assert_close(run.gradients(), expected)


def test_outputs_that_are_kept_keep_no_graphs():
    run = compiled().steps(2)
    x, y = run.batch()
    output = run.model(x)
    run.criterion(output, y).backward()
    run.optimizer.step()
    graphs = weakref.ref(run.engine.session._compiled._passes)
    run.engine.compile(backend=BACKEND)
    gc.collect()
    assert graphs() is None
    assert output.requires_grad


def test_the_model_remembers_one_batch():
    run = compiled().steps(2)
    x, y = run.batch()
    loss = run.criterion(run.model(x), y)
    run.model(x)
    with refused("call backward first", "default"):
        loss.backward()


# --- when things change --------------------------------------------------------------------------


def test_a_changed_model_is_compiled_and_recorded_anew():
    """A graph of what the model was would not have the bounds of what it is."""
    run = compiled(noise_multiplier=0.0).steps(3)
    old = max(run.engine.plan.sensitivities.values())
    run.model[0].norm = 0.5
    run.step()  # compiled anew
    run.step()  # recorded anew
    assert Repetition.made == 3 + 2
    x, y = run.batch()
    run.backward(x, y)
    assert_close(run.gradients(), expected_gradients(run, x, y))
    assert max(run.engine.plan.sensitivities.values()) < old


def test_moved_weights_are_followed():
    run = compiled(noise_multiplier=0.0).steps(3)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.data = parameter.data.clone()
    run.steps(2)
    assert Repetition.made == 3 + 2
    x, y = run.batch()
    run.backward(x, y)
    assert_close(run.gradients(), expected_gradients(run, x, y))


def test_a_changed_criterion_is_recorded_anew():
    run = compiled(noise_multiplier=0.0).steps(3)
    run.criterion.tau = 3.0
    run.steps(2)
    assert Repetition.made == 3 + 1
    x, y = run.batch()
    run.backward(x, y)
    assert_close(run.gradients(), expected_gradients(run, x, y, tau=3.0))


def test_changes_without_end():
    calls = []
    run = Recorded(
        lambda x: [calls.append(1) or 2 * x], name="it", wanted=lambda x: True,
        parts=lambda: [object()],
    )  # fmt: skip
    for _ in range(8):
        assert run(torch.ones(2))[0].tolist() == [2.0, 2.0]
    with pytest.warns(UserWarning, match="it cannot be recorded.*again and again"):
        run(torch.ones(2))
    run(torch.ones(2))
    assert len(calls) == 10
    assert run.active is False


@pytest.mark.parametrize(
    ("sizes", "made"),
    [
        ((3, 3, 3, 5, 3), 1),  # the first call with a shape is left alone
        ((5, 5, 3, 3, 5, 3), 2),  # a smaller recording has room where the larger one is
        ((3, 3, 5, 5, 5, 3, 3), 3),  # a larger one has not: it comes first, and the other anew
        ((3, 3, 4, 4, 5, 5, 3, 4, 5), 5),
        ((9, 9, 3, 9, 3), 1),  # of nine nobody wants a recording
    ],
)
def test_every_shape_has_a_recording_of_its_own(sizes, made):
    part = object()
    run = Recorded(lambda x: [2 * x], name="it", wanted=lambda x: len(x) < 9, parts=lambda: [part])
    kept = []
    for rows in sizes:
        x = torch.randn(rows)
        kept.append((2 * x, run(x)[0]))
    for expected, found in kept:  # and none writes over what another has computed
        torch.testing.assert_close(found, expected)
    assert Repetition.made == made
    assert run.active


def test_recordings_share_their_memory(monkeypatch):
    """Until one needs more: then all are forgotten, and what comes next has new memory."""
    pools = itertools.count()
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    given = []
    monkeypatch.setattr(
        _recorded, "RecordedGraph",
        lambda work, *, device, pool: given.append(pool) or Repetition(work, device=device),
    )  # fmt: skip
    part = object()
    run = Recorded(lambda x: [2 * x], name="it", wanted=lambda x: True, parts=lambda: [part])
    for rows in (4, 4, 3, 3, 5, 5, 3, 4):
        run(torch.ones(rows))
    assert given == [0, 0, 1, 1, 1]


def test_only_so_many_shapes_are_recorded():
    part = object()
    run = Recorded(lambda x: [2 * x], name="it", wanted=lambda x: True, parts=lambda: [part])
    for rows in range(20, 1, -1):
        run(torch.ones(rows))
        assert run(torch.ones(rows))[0].tolist() == [2.0] * rows
    assert Repetition.made == 8


def test_steps_of_several_sizes():
    """Each is recorded, and has the gradients of its own batch."""
    run = compiled(noise_multiplier=0.0, sizes=3)
    rows = set()
    for _ in range(14):
        x, y = run.batch()
        run.backward(x, y)
        assert_close(run.gradients(), expected_gradients(run, x, y))
        run.optimizer.step()
        rows.add(len(x))
    assert len(rows) > 1
    kinds = [kind for kind in passes_of(run)._kinds if kind.replay is not None]
    assert {len(kind.values[0]) for kind in kinds} == rows
    assert run.engine.session.uses_graphs


def test_a_pass_of_another_size_in_between_is_noticed():
    run = compiled(sizes=3)
    batches = {}
    while len(batches) < 2 or passes_of(run)._passes < 8:
        x, y = run.batch()
        batches[len(x)] = x
        run.backward(x, y)
        run.optimizer.step()
    x, y = run.batch()
    loss = run.criterion(run.model(x), y)
    other = next(size for size in batches if size != len(x))
    run.model(batches[other])
    with refused("call backward first"):
        loss.backward()


# --- where it is not done ------------------------------------------------------------------------


def test_what_cannot_be_recorded(monkeypatch):
    monkeypatch.setattr(Repetition, "fails", RuntimeError("operation not permitted"))
    run = compiled(noise_multiplier=0.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.steps(4)
    texts = [str(w.message) for w in caught if "CUDA graphs" in str(w.message)]
    assert [text.split(" cannot")[0] for text in texts] == ["the model's passes", "the criterion"]
    assert all("not permitted" in text for text in texts)
    assert run.engine.session.compiled
    assert not run.engine.session.uses_graphs
    x, y = run.batch()
    run.backward(x, y)
    assert_close(run.gradients(), expected_gradients(run, x, y))


class Forgetful(Repetition):
    """Stands in for a graph whose memory somebody else has overwritten."""

    def replay(self):
        super().replay()
        for each in _tensors(self.result):
            each.data.mul_(1.5)


def test_replays_that_compute_something_else(monkeypatch):
    """Gradients of a broken graph have no bound."""
    monkeypatch.setattr(_recorded, "RecordedGraph", Forgetful)
    run = compiled(noise_multiplier=0.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.steps(4)
    texts = [str(w.message) for w in caught if "CUDA graphs" in str(w.message)]
    assert len(texts) == 2
    assert all("something else" in text for text in texts)
    assert not run.engine.session.uses_graphs
    x, y = run.batch()
    run.backward(x, y)
    assert_close(run.gradients(), expected_gradients(run, x, y))


def test_functions_that_draw_numbers_cannot_be_compared():
    part = object()
    run = Recorded(
        lambda x: [x + torch.rand_like(x)], name="it", wanted=lambda x: True, parts=lambda: [part]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = [run(torch.zeros(3))[0] for _ in range(4)]
    assert run.active
    assert not torch.equal(results[2], results[3])


@pytest.mark.parametrize(
    ("options", "mode", "expected"),
    [
        ({}, None, True),
        ({}, "default", False),
        ({"pad": False}, None, False),
        ({"micro_batch_size": 8}, None, False),
    ],
    ids=str,
)
def test_when_passes_are_recorded(options, mode, expected):
    run = Run(**{"pad": True, **options})
    run.engine.compile(backend=BACKEND, mode=mode)
    run.steps(3)
    assert run.engine.session.compiled
    assert run.engine.session.uses_graphs == expected
    assert (Repetition.made > 0) == expected


@pytest.mark.parametrize(
    ("mode", "most", "expected"),
    [(None, 1e9, True), (None, 1.0, False), ("reduce-overhead", 1.0, True)],
)
def test_large_passes_are_recorded_on_demand(monkeypatch, mode, most, expected):
    """Graphs reserve their memory, and large passes need no help with being launched."""
    monkeypatch.setattr("clipless.privacy.compiled._functions.GRAPHED_BYTES", most)
    run = Run(pad=True)
    run.engine.compile(backend=BACKEND, mode=mode)
    run.steps(3)
    assert run.engine.session.uses_graphs == expected


def test_functions_of_the_user_are_not_recorded():
    """They may read what changes from step to step; compilers notice that, graphs do not."""
    own = losses.PerExample(lambda out, y: (out - y).abs().sum(), lipschitz=2.0)
    assert not is_our_own(own)
    assert is_our_own(losses.CrossEntropy())

    class Mine(losses.CrossEntropy):
        pass

    assert not is_our_own(Mine())


# --- on a GPU ------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("integers", [False, True])
def test_real_graphs(precision, integers, monkeypatch):
    """Sums of floats are those of the batch; of integers, up to the grid, a part of the bound."""
    if not integers:
        monkeypatch.setattr("clipless.kernels.exact._weights._KINDS", {"cpu": None, "cuda": None})
    torch.manual_seed(1)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    model = cnn().cuda()
    data = tuple(each.cuda() for each in examples(100, SHAPES[cnn]))
    run = Run(model, data, precision=precision, compile=True, noise_multiplier=0.0).steps(3)
    assert run.engine.session.uses_graphs
    for _ in range(3):
        x, y = run.batch()
        run.backward(x, y)
        found, expected = run.gradients(), expected_gradients(run, x, y)
        for name, gradient in expected.items():
            error = (found[name] - gradient).norm()
            grid = 0.02 * run.engine.plan.sensitivities[name] if integers else 1e-6
            assert error <= (1e-3 if precision == "float32" else 0.1) * gradient.norm() + grid
