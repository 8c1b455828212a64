"""Several engines at once, in threads and in processes: each step has its noise and its price."""

import copy
import threading
import time
from functools import partial

import pytest
import torch
from joblib import Parallel, delayed

import clipless
from clipless import PrivacyEngine, losses
from clipless import nn as lip
from clipless.bounds import TRIAL_RUN
from clipless.bounds._trial_run import trial_run
from clipless.errors import BudgetExhaustedError
from clipless.ledger import BudgetMeter
from clipless.privacy import Ledger, Relation, default_delta, epsilon
from clipless.privacy.step import _session as sessions
from clipless.sklearn import CliplessClassifier
from tests.privacy.misuse_helpers import counted, gradients_of, refused
from tests.privacy.runs import SHAPES, Run, cnn, examples, mlp, residual


@pytest.fixture
def loud():
    """Threads take turns as often as they can, and an error in one of them is an error."""
    import sys

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def in_threads(*functions):
    """Run functions at once; raise what one of them raises."""
    errors, begun = [], threading.Barrier(len(functions))

    def call(function):
        try:
            begun.wait()
            function()
        except BaseException as error:  # to be raised where pytest sees it
            errors.append(error)

    threads = [threading.Thread(target=call, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def train_loudly(run, steps, *, at_least=10):
    """Every gradient is drowned in noise, and every step is in the ledger."""
    for step in range(steps):
        run.step()
        assert all(g.norm() > at_least for g in gradients_of(run.model).values()), step
    assert counted(run, steps)


@pytest.mark.usefixtures("loud")
def test_a_thread_that_proves_bounds_does_not_turn_hooks_off():
    """The switch was global: steps were taken without noise, and without ledger."""
    run, stop = Run(noise_multiplier=1e4), threading.Event()

    def prove():
        while not stop.is_set():
            clipless.sensitivity(cnn(), loss=losses.CrossEntropy(), input_shape=(1, 4, 4))

    def train():
        try:
            train_loudly(run, 60)
        finally:
            stop.set()

    in_threads(train, prove, prove)


def test_rehearsing_is_of_one_thread():
    inside, done = threading.Event(), threading.Event()

    def rehearse():
        with trial_run():
            assert TRIAL_RUN.here
            inside.set()
            done.wait(10)

    def look():
        inside.wait(10)
        try:
            assert not TRIAL_RUN.here
        finally:
            done.set()

    in_threads(rehearse, look)


@pytest.mark.usefixtures("loud")
def test_several_threads_trace_at_once():
    """Tracing patches torch's modules for the whole process, and left them broken."""
    call = torch.nn.Module.__call__
    expected = {
        build: clipless.sensitivity(build(), loss=1.0, input_shape=shape).parameters
        for build, shape in SHAPES.items()
    }

    def prove(build):
        for _ in range(8):
            found = clipless.sensitivity(build(), loss=1.0, input_shape=SHAPES[build])
            assert [p.name for p in found.parameters] == [p.name for p in expected[build]]

    def infer():
        model, x = mlp(), examples(5)[0]
        for _ in range(400):
            assert isinstance(model(x), torch.Tensor)

    in_threads(*(lambda b=b: prove(b) for b in (mlp, cnn, residual, mlp)), infer)
    assert torch.nn.Module.__call__ is call
    assert isinstance(mlp()(examples(3)[0]), torch.Tensor)


@pytest.mark.usefixtures("loud")
def test_several_engines_train_at_once():
    def train(index):
        build = (mlp, cnn, residual)[index % 3]
        data = examples(100, SHAPES[build], seed=index)
        train_loudly(Run(build(), data, noise_multiplier=1e4), 12)

    in_threads(*(lambda i=i: train(i) for i in range(6)))


def test_two_engines_ask_for_one_loader_at_once():
    from clipless.privacy import PoissonSampling, PrivateLoader

    loader = PrivateLoader(examples(100), sampling=PoissonSampling(dataset_size=100, rate=0.2))
    outcomes = []

    def make():
        model = mlp()
        try:
            PrivacyEngine().make_private(
                module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                data_loader=loader, criterion=losses.CrossEntropy(), noise_multiplier=1.0,
            )  # fmt: skip
            outcomes.append((model, "private"))
        except clipless.errors.PrivacyError as error:
            outcomes.append((model, str(error)))

    in_threads(*[make] * 4)
    assert sum(what == "private" for _, what in outcomes) == 1
    assert sum("belongs to another" in what for _, what in outcomes) == 3


def test_two_threads_step_at_once():
    """The gradients of one sample are released once."""
    run = Run(noise_multiplier=1.0)
    run.backward(*run.batch())
    session, inside, done = run.engine.session, threading.Event(), threading.Event()
    add = session.noise.add_

    def slowly(*arguments):
        inside.set()
        done.wait(10)
        add(*arguments)

    session.noise.add_ = slowly

    def second():
        inside.wait(10)
        try:
            with refused("two threads"):
                run.optimizer.step()
        finally:
            done.set()

    in_threads(run.optimizer.step, second)
    assert counted(run, 1)


def task(steps):
    run = Run(engine=PrivacyEngine(), noise_multiplier=1e4)
    for _ in range(steps):
        run.step()
    noise = torch.cat([g.flatten() for g in gradients_of(run.model).values()])
    plan = run.engine.plan
    assert run.engine.get_epsilon() == epsilon([(plan.mechanism, steps)], plan.delta)
    return noise, run.loader.current.indices.tolist()


@pytest.mark.parametrize("backend", ["threading", "loky"])
def test_workers_of_joblib_share_neither_samples_nor_noise(backend):
    torch.manual_seed(0)
    found = Parallel(n_jobs=2, backend=backend)(delayed(task)(3) for _ in range(4))
    for index, (noise, drawn) in enumerate(found):
        assert noise.norm() > 100
        for other, others in found[:index]:
            assert drawn != others
            assert (noise - other).norm() > noise.norm()


def test_a_compiled_call_waits_for_a_trace():
    """A compiled function refuses to run while another thread traces symbolically."""
    from clipless.kernels import TRACING_LOCK
    from clipless.kernels.layers._compiler_operators import as_operators

    order = []

    def trace():
        with TRACING_LOCK:
            time.sleep(0.2)
            order.append("traced")

    def call():
        time.sleep(0.1)
        with as_operators(False):
            order.append("called")

    in_threads(trace, call)
    assert order == ["traced", "called"]


def test_what_follows_a_clipped_layer_is_per_session():
    """A second model in another thread has counts and thresholds of its own."""

    def following():
        follow = lip.FollowQuantile(quantile=0.5, rate=0.5)
        return torch.nn.Sequential(*mlp(), lip.ClipGradient(0.5, follow=follow))

    runs = [Run(following(), sampling="full_batch", batch_size=100) for _ in range(2)]
    in_threads(*(lambda r=r: r.steps(5) for r in runs))
    assert all(counted(run, 5) for run in runs)


def test_threads_that_share_a_ledger_share_its_budget(monkeypatch):
    """Each saw room for the last step, and all took it: epsilon 3.5 of a budget of 3."""
    ledger = Ledger.in_memory(dataset_size=100, relation=Relation.ZERO_OUT)
    options = {"target_epsilon": 3.0, "target_delta": 1e-4, "steps": 4}
    runs = [Run(engine=PrivacyEngine(ledger=ledger), **options) for _ in range(3)]
    require = BudgetMeter.require

    def require_slowly(*arguments):
        allowed = require(*arguments)
        time.sleep(0.02)
        return allowed

    monkeypatch.setattr(BudgetMeter, "require", require_slowly)

    def train(run):
        with pytest.raises(BudgetExhaustedError):
            run.steps(100)

    in_threads(*(partial(train, run) for run in runs))
    assert ledger.releases >= 4
    assert epsilon(ledger.history(), 1e-4) <= 3.0


def test_runs_that_share_a_ledger_have_their_steps_under_their_own_names(tmp_path):
    """All were written under the name of the run begun last, and the others could not resume."""
    path = tmp_path / "ledger"
    ledger = Ledger(path, dataset_size=100, relation=Relation.ZERO_OUT)
    runs = [Run(engine=PrivacyEngine(ledger=ledger), noise_multiplier=9.0) for _ in range(2)]
    saved = []
    for run in runs:
        run.steps(2)
        saved.append((run.engine.state_dict(), copy.deepcopy(run.model)))
    for _ in range(2):
        for run in runs:
            run.steps(1)
    ledger.close()
    for run, (state, model) in zip(runs, saved, strict=True):
        assert [count for _, count in state["spent"]] == [2]
        engine = PrivacyEngine(ledger=path)
        again = Run(model, engine=engine, noise_multiplier=9.0, resume_from=state)
        again.steps(2)
        engine.close()
        assert engine.ledger.releases == 8  # repeated, and not paid for again
        for one, other in zip(again.model.parameters(), run.model.parameters(), strict=True):
            assert torch.equal(one, other)


def test_of_two_threads_that_make_one_model_private_the_second_takes_over(monkeypatch):
    """Both put their hooks on, and nothing could be trained."""
    take_over = sessions.take_over

    def take_over_slowly(session):
        take_over(session)
        time.sleep(0.1)

    monkeypatch.setattr(sessions, "take_over", take_over_slowly)
    model, runs = mlp(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def make():
        runs.append(Run(model, engine=PrivacyEngine(), optimizer=optimizer))

    in_threads(make, make)
    (live,) = [run for run in runs if run.engine.session.over is None]
    live.steps(2)
    assert live.engine.ledger.releases == 2


def test_fits_in_threads_that_share_a_ledger_keep_its_budget(monkeypatch):
    """Each saw room for its queries before any had asked one: all together were too many."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(500, 3, generator=generator).numpy()
    labels = (features[:, 0] > 0).astype(int)
    ledger = Ledger.in_memory(dataset_size=500, relation=Relation.ZERO_OUT)
    record, refused_fits = Ledger.record, []

    def record_slowly(*arguments, **options):
        time.sleep(0.05)
        record(*arguments, **options)

    monkeypatch.setattr(Ledger, "record", record_slowly)

    def fit():
        try:
            CliplessClassifier(epsilon=0.5, ledger=ledger).fit(features, labels)
        except BudgetExhaustedError as error:
            refused_fits.append(error)

    in_threads(*[fit] * 12)
    assert len(refused_fits) == 11  # the first one has used all that there is
    assert epsilon(ledger.history(), default_delta(500)) <= 0.5


class Waiting(torch.nn.Sequential):
    """Stops in the middle of a forward pass until it is told to go on."""

    begun, go_on = threading.Event(), threading.Event()

    def forward(self, x):
        out = super().forward(x)
        if threading.current_thread() is not threading.main_thread():
            Waiting.begun.set()
            Waiting.go_on.wait(10)
        return out


def test_a_forward_pass_has_the_model_to_itself():
    """Uses of a layer are counted: those of two passes would take each other's bounds."""
    run = Run(Waiting(*mlp()))
    run.step()
    x, _ = run.batch()
    outputs = []
    first = threading.Thread(target=lambda: outputs.append(run.model(x)))
    first.start()
    assert Waiting.begun.wait(10)
    for evaluated in (False, True):
        with (
            torch.set_grad_enabled(not evaluated),
            refused("two threads"),
        ):
            run.model(x)
    Waiting.go_on.set()
    first.join()
    assert outputs
