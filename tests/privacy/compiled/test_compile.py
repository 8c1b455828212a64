"""Compiled runs: the same numbers, and a way out where there is no compiler.

On a GPU the criterion is compiled too; here its turn comes with `accelerated`.
"""

import copy
import io
import math
import warnings

import pytest
import torch
from torch import nn

import clipless
from clipless import losses
from clipless import nn as lip
from clipless.kernels import CompiledFunction
from clipless.kernels.layers._compiler_operators import join_sorted_norms
from clipless.nn import prepare_projection
from clipless.privacy import PrivacyOptions
from clipless.privacy.compiled import _functions
from clipless.privacy.compiled._functions import compiled_projection, guarded_losses, kept_bytes
from clipless.training import Trainer
from tests.privacy.compiled_runs import BACKEND, PRECISIONS, clipped, compiled
from tests.privacy.misuse_helpers import (
    assert_close,
    edit_in_secret,
    expected_gradients,
    gradients_of,
    refused,
    weights_of,
)
from tests.privacy.runs import SHAPES, Run, cnn, examples, mlp, residual

pytestmark = pytest.mark.usefixtures("fresh_compiler")


# --- the same numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "precision"),
    [(mlp, "float32"), (cnn, "bfloat16"), (residual, "float32"), (clipped, "float32"),
     (clipped, "bfloat16")],
)  # fmt: skip
def test_training_is_the_same(build, precision):
    weights = []
    for options in ({"pad": True}, {"compile": BACKEND}):
        torch.manual_seed(1)
        run = Run(
            build(), examples(100, SHAPES.get(build, (6,))), precision=precision, **options
        ).steps(3)
        assert run.engine.session.compiled == ("compile" in options)
        weights.append(weights_of(run.model))
    # In bfloat16 a different order of operations can exchange a pair that is nearly equal.
    tolerance = 1e-5 if precision == "float32" else 1e-2
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("where", ["cpu", "accelerator"])
def test_layers_are_joined_on_accelerators_alone(where, precision, monkeypatch, request):
    """And training is the same."""
    if where == "accelerator":
        request.getfixturevalue("accelerated")
    counts = []

    def join_and_count(graph):
        counts.append(join_sorted_norms(graph))
        return counts[-1]

    monkeypatch.setattr("clipless.kernels.compilation._compiled.join_sorted_norms", join_and_count)
    weights = []
    for options in ({"pad": True}, {"compile": BACKEND}):
        torch.manual_seed(1)
        run = Run(cnn(), examples(100, SHAPES[cnn]), precision=precision, **options).steps(3)
        weights.append(weights_of(run.model))
    assert counts == ([1] if where == "accelerator" else [])
    tolerance = 1e-5 if precision == "float32" else 1e-2
    torch.testing.assert_close(weights[1], weights[0], atol=tolerance, rtol=tolerance)


def test_the_compiled_criterion_is_the_same(accelerated):
    run = compiled(data=examples(40), noise_multiplier=0.0, batch_size=20)
    x, y = run.batch()
    run.backward(x, y)
    assert run.engine.session._compiled._losses.works
    assert_close(run.gradients(), expected_gradients(run, x, y))


@pytest.mark.parametrize("how", ["without gradients", "through data"])
def test_the_compiled_criterion_reads_the_model_s_own_output(accelerated, how):
    """What everybody sees can be edited, and rows could be mixed that way."""
    run = compiled(data=examples(40), noise_multiplier=0.0, batch_size=20)
    x, y = run.batch()
    expected = expected_gradients(run, x, y)
    out = run.model(x)
    edit_in_secret(out, how)
    run.criterion(out, y).backward()
    assert run.engine.session._compiled._losses.works
    assert_close(run.gradients(), expected)


@pytest.mark.parametrize(
    ("loss", "logits"),
    [
        (losses.CrossEntropy(tau=30.0), 4),
        (losses.BinaryCrossEntropy(tau=3.0), 1),
        (losses.Huber(delta=0.5), 2),
        (losses.PerExample(lambda out, y: 3 * (out - y).abs().sum(), lipschitz=1.0), 2),
    ],
    ids=lambda each: type(each).__name__,
)
def test_guarded_losses_are_finite_clipped_and_leave_padding_out(loss, logits):
    output = 5 * torch.randn(12, logits)
    output[3] = math.nan
    floats = isinstance(loss, losses.PerExample | losses.Huber)
    target = torch.randn(12, logits) if floats else torch.randint(2, (12,))
    if isinstance(loss, losses.BinaryCrossEntropy):
        target = target[:, None].float()
    weights = (torch.arange(12) < 9).float()
    limit = loss.lipschitz_for((logits,)) / 10
    _, cotangents = guarded_losses(loss, output, target, weights, 10.0, limit)
    norms = cotangents.flatten(1).norm(dim=1)
    assert cotangents.isfinite().all()
    assert (norms <= limit * (1 + 1e-6)).all()
    assert (norms[:3] > 0).any()
    assert not cotangents[9:].any()
    free = output[:3].clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss.per_example(free, target[:3]).sum() / 10, free)
    if not isinstance(loss, losses.PerExample):  # that one says less than the truth of itself
        torch.testing.assert_close(cotangents[:3], expected)


def test_one_graph_for_all_steps():
    counters = torch._dynamo.utils.counters
    counters.clear()
    run = compiled(cnn(), data=examples(100, SHAPES[cnn])).steps(4)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    with torch.no_grad():  # evaluation takes any number of rows, and is not compiled
        run.model(torch.randn(7, *SHAPES[cnn]))
    run.model.eval()
    run.model(torch.randn(3, *SHAPES[cnn]))
    run.model.train()
    run.steps(2)
    assert counters["stats"]["unique_graphs"] == 1


@torch._dynamo.config.patch(cache_size_limit=2)  # also known as recompile_limit since torch 2.7
def test_more_runs_than_the_compiler_keeps_versions_of():
    for _ in range(4):
        run = compiled(nn.Sequential(lip.BoundedInput(1.0), lip.SpectralLinear(6, 3)))
        counters = torch._dynamo.utils.counters
        counters.clear()
        run.steps(1)
        assert counters["stats"]["unique_graphs"] == 1


def test_bounds_of_another_run_do_not_become_variables(recwarn):
    """Numbers that differed between runs of one process were traced as variables, which failed."""
    for build in (mlp, cnn):
        run = compiled(build(), data=examples(8, SHAPES.get(build, (6,))))
        run.steps(1)
        assert run.engine.session.compiled
    assert not [each for each in recwarn if "could not be compiled" in str(each.message)]


def test_channels_last():
    weights = []
    for options in ({"pad": True}, {"compile": BACKEND}):
        torch.manual_seed(1)
        model = cnn().to(memory_format=torch.channels_last)
        run = Run(model, examples(100, SHAPES[cnn]), **options).steps(2)
        assert model[1].weight.is_contiguous(memory_format=torch.channels_last)
        lip.certify(model)
        run.model.to(memory_format=torch.contiguous_format)  # the other way in mid-run
        run.step()
        weights.append(weights_of(model))
    torch.testing.assert_close(weights[0], weights[1], atol=1e-5, rtol=1e-4)


# --- objects, switches ---------------------------------------------------------------------------


def test_objects_stay_what_they_are():
    model = mlp()
    keys = list(model.state_dict())
    run = compiled(model).steps(1)
    assert run.model is model
    assert type(model) is nn.Sequential
    assert list(model.state_dict()) == keys
    twin = copy.deepcopy(model)
    assert twin._compiled_call_impl is None
    x = torch.randn(5, 6)
    torch.testing.assert_close(twin(x), model.eval()(x))
    torch.save(model, io.BytesIO())
    run.engine.detach()
    assert model._compiled_call_impl is None
    assert run.criterion._compiled_call_impl is None
    assert not run.engine.session.compiled


def test_padding_is_the_default():
    assert compiled().loader.rows is not None
    assert Run().loader.rows is None
    assert compiled(pad=False).loader.rows is None


def test_batches_of_changing_size():
    run = compiled(pad=False).steps(4)
    assert run.engine.session.compiled
    assert run.engine.ledger.releases == 4


@pytest.mark.parametrize("micro_batch_size", [None, 9])
def test_every_size_is_compared_when_it_comes(micro_batch_size, monkeypatch):
    """With the model, and rows with each other; within a step too."""
    compared = []
    compare = _functions._compare
    monkeypatch.setattr(
        _functions, "_compare", lambda *given: compared.append(len(given[2][0])) or compare(*given)
    )
    run = compiled(noise_multiplier=0.0, sizes=3, micro_batch_size=micro_batch_size)
    rows = set()
    for _ in range(12):
        run.optimizer.zero_grad()
        expected = None
        while expected is None or not run.loader.current.is_last:
            x, y = run.batch()
            rows.add(len(x))
            own = expected_gradients(run, x, y)
            expected = own if expected is None else {n: expected[n] + own[n] for n in own}
            run.criterion(run.model(x), y).backward()
        assert_close(run.gradients(), expected)
        run.optimizer.step()
    assert len(rows) > 1
    assert sorted(compared) == sorted(rows)
    assert run.engine.session.compiled


def test_a_size_that_is_compiled_wrongly_stops_compiled_code():
    def attempt(function, x):
        if len(x) == 3:
            raise RuntimeError("another result")

    call = CompiledFunction(
        lambda x: 2 * x, name="it", attempt=attempt, backend=BACKEND, fixed=True
    )
    assert call(torch.ones(2)).tolist() == [2.0, 2.0]
    assert call.works
    with pytest.warns(UserWarning, match="it could not be compiled.*another result"):
        assert call(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
    assert not call.works


@pytest.mark.parametrize("what", ["model", "criterion"])
def test_compiling_what_is_compiled_already(accelerated, what):
    """By the user, around ours: the session's checks must not become compiled code."""
    run = compiled(noise_multiplier=1e3).steps(1)
    setattr(run, what, torch.compile(getattr(run, what), backend="eager"))
    run.steps(3)
    assert run.engine.ledger.releases == 4
    assert run.engine.session.compiled
    assert all(gradient.norm() > 10 for gradient in gradients_of(run.model).values())
    x, _ = run.batch()
    with refused("criterion"):
        run.model(x).sum().backward()


def test_compiling_in_the_middle_of_a_run():
    run = Run(pad=True).steps(1)
    run.engine.compile(backend=BACKEND)
    run.steps(2)
    assert run.engine.session.compiled
    run.engine.compile(backend=BACKEND)  # once more
    run.steps(1)
    run.backward(*run.batch())
    with refused("between steps"):
        run.engine.compile(backend=BACKEND)


def test_graphs_need_steps_of_one_batch():
    """A graph writes its gradients to the same place again, over those of the batch before."""
    run = Run(pad=True, micro_batch_size=8)
    with refused("micro_batch_size"):
        run.engine.compile(mode="reduce-overhead")
    run.steps(1)
    assert not run.engine.session.compiled


def test_what_a_pass_keeps_is_told_from_a_few_rows():
    """Two linear layers with a square between them keep their inputs, 6 and 4 numbers a row."""
    first, second = nn.Linear(6, 4), nn.Linear(4, 3)
    kept = kept_bytes(lambda x: second(first(x).square()), [torch.randn(50, 6)])
    assert kept == 50 * 4 * (6 + 4 + 4)  # the square keeps its input as well
    assert kept_bytes(first, [torch.randn(1, 6)]) == 0.0


def test_weighing_a_pass_leaves_nothing_behind():
    """A graph that stays alive is waited for by later ones, which CUDA graphs must not do."""
    model = cnn()
    kept_bytes(model, [torch.randn(8, 1, 4, 4)])
    for parameter in model.parameters():
        _node(parameter).metadata["seen"] = True
        assert "seen" not in _node(parameter).metadata


def _node(parameter):
    return parameter.view_as(parameter).grad_fn.next_functions[0][0]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_trainer_passes_it_on(precision):
    trainer = Trainer(
        mlp(),
        losses.CrossEntropy(),
        noise_multiplier=1.0,
        batch_size=20,
        steps=3,
        options=PrivacyOptions(compile=BACKEND, precision=precision),
    )
    trainer.fit(examples(100), validation_data=examples(30))
    assert trainer.step == 3
    assert trainer.engine.plan.precision == precision


# --- where it cannot be done ---------------------------------------------------------------------


def failing(graph, inputs):
    raise OSError("no compiler found")


def wrong(graph, inputs):
    return lambda *arguments: [1.5 * each for each in graph(*arguments)]


@pytest.mark.parametrize(("backend", "words"), [(failing, "no compiler"), (wrong, "differ")])
def test_falling_back(backend, words):
    run = Run(pad=True)
    run.engine.compile(backend=backend)
    with pytest.warns(UserWarning, match=f"runs uncompiled.*{words}"):
        run.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.steps(2)
    assert not run.engine.session.compiled
    assert run.engine.ledger.releases == 3


def test_a_wrong_criterion_is_not_used(accelerated):
    """Its gradient is what everything else is bounded by."""
    run = Run(pad=True, noise_multiplier=0.0)
    run.engine.compile(backend=BACKEND)
    run.engine.session._compiled._compile_criterion(wrong)
    x, y = run.batch()
    with pytest.warns(UserWarning, match="the criterion could not be compiled.*differs"):
        run.backward(x, y)
    assert_close(run.gradients(), expected_gradients(run, x, y))


def moved_projection():
    model = residual()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model, prepare_projection(model)


def test_a_compiled_projection_projects():
    model, projection = moved_projection()
    expected = projection(projection.parameters)
    compiled = compiled_projection(projection, backend=BACKEND)
    projection.compute_by(compiled)
    projection.apply()
    assert compiled.works
    assert all(found.holds for found in clipless.certify(model).values())
    for parameter, weight in zip(projection.parameters, expected, strict=True):
        torch.testing.assert_close(parameter.detach(), weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("backend", "words"), [(failing, "no compiler"), (wrong, "differs")])
def test_a_wrong_projection_is_not_used(backend, words):
    """Weights that a compiler got wrong would leave their sets, and the noise would not know."""
    _, projection = moved_projection()
    weights = [parameter.detach().clone() for parameter in projection.parameters]
    compiled = compiled_projection(projection, backend=backend)
    with pytest.warns(UserWarning, match=f"the projection could not be compiled.*{words}"):
        found = compiled(*weights)
    assert not compiled.works
    for one, expected in zip(found, projection(weights), strict=True):
        assert torch.equal(one, expected)


def test_on_the_cpu_the_projection_is_left_as_it_is():
    """Where values may be looked at, the projection that looks at them is the faster one."""
    run = Run(pad=True)
    run.engine.compile(backend=BACKEND)
    run.steps(1)
    assert run.engine.session._guard.projection.computes_itself


def test_wrong_gradients_are_noticed():
    """A backend whose forward pass is right and whose backward pass loses a factor."""
    from torch._dynamo.backends.common import aot_autograd

    def backward(graph, inputs):
        return lambda *arguments: [
            None if each is None else 0.0 * each for each in graph(*arguments)
        ]

    backend = aot_autograd(fw_compiler=lambda graph, inputs: graph.forward, bw_compiler=backward)
    run = Run(pad=True)
    run.engine.compile(backend=backend)
    with pytest.warns(UserWarning, match="gradients differ"):
        run.step()
    assert run.engine.session.compiled is False


def test_thresholds_that_move_are_not_compiled():
    model = nn.Sequential(
        lip.BoundedInput(1.0),
        lip.SpectralLinear(6, 3),
        lip.ClipGradient(0.1, follow=lip.FollowQuantile()),
    )
    with pytest.warns(UserWarning, match="follows a quantile"):
        run = compiled(model)
    assert not run.steps(3).engine.session.compiled


def test_what_is_raised_by_the_function_itself_comes_through():
    def function(x):
        raise ValueError("its own fault")

    call = CompiledFunction(
        function, name="it", attempt=lambda f, x: f(x), backend="eager", fixed=True
    )
    with pytest.warns(UserWarning, match="runs uncompiled"), pytest.raises(ValueError, match="own"):
        call(torch.ones(2))
