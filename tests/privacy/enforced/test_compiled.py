"""Enforced bounds in compiled passes and in bfloat16: the same limits, sums and counts."""

import random

import pytest
import torch
from torch import nn

from clipless import PrivacyEngine, losses
from clipless.privacy import BatchOptions, EnforcedBounds, PrivacyOptions
from tests.privacy.enforced.architectures import KINDS, architecture
from tests.privacy.enforced.runs import EXAMPLES, enforced_run, sums
from tests.privacy.enforced.test_thresholds_hold import adversarial

pytestmark = pytest.mark.filterwarnings("error:.*uncompiled.*")
SOME = [1, 5, 7, 10]  # a convolution, attention with lone parameters, embeddings, tied weights
BATCHES = BatchOptions(pad=True)
REST = [seed for seed in range(2 * len(KINDS)) if seed not in SOME]


def session_of(model, draw, *, precision="float32", thresholds=1.0, **options):
    bounds = EnforcedBounds(thresholds=thresholds)
    return enforced_run(
        model, (draw(EXAMPLES), torch.zeros(EXAMPLES).long()), bounds=bounds,
        options=PrivacyOptions(precision=precision), **options,
    )[0].session  # fmt: skip


def compiled_sums(session, inputs, cotangents):
    """As `sums`, by the compiled code."""
    enforcement = session.enforcement
    with enforcement.stand_in():
        enforcement.begin_pass(inputs)
        output, _ = session._compiled._run_passes(*inputs)
        found = enforcement.gradients(output, cotangents.to(output.dtype))
    assert session.compiled
    names = [each.name for each in session.plan.parameters]
    return {n: torch.zeros(()) if g is None else g for n, g in zip(names, found, strict=True)}


def norm(x):
    return float(torch.linalg.vector_norm(x.double()))


def hold(session, run, x, cotangents):
    """Each row alone keeps to the bounds; returns what each has added."""
    found = []
    for row in range(len(x)):
        alone = torch.zeros_like(cotangents)
        alone[row] = cotangents[row]
        found.append(run(session, [x], alone))
        for name, bound in session.plan.sensitivities.items():
            assert norm(found[-1][name]) <= bound, (name, row)
    return found


def attack_compiled(seed):
    rng, (model, draw) = random.Random(seed), architecture(seed)
    scale = 10 ** rng.uniform(-2, 0.5)
    session = session_of(model, draw, thresholds=scale, compile="aot_eager")
    divisor = session.plan.loss_divisor
    x = adversarial(draw, 9, rng)
    cotangents = torch.randn(9, 3) * 10.0 ** torch.randint(-3, 3, (9, 1)) / divisor
    alone = hold(session, compiled_sums, x, cotangents)
    # What the compiled code adds up is what the model's own layers do.
    eager = sums(session, [x], cotangents)
    together = compiled_sums(session, [x], cotangents)
    for name, limit in session.plan.sensitivities.items():
        assert norm(together[name] - eager[name]) <= 2e-3 * len(x) * limit, name
        added = sum(each[name].double() for each in alone)
        assert norm(together[name] - added) <= 2e-3 * len(x) * limit, name
    # A record that is emptied moves them by their sensitivity at most.
    without, other = cotangents.clone(), x.clone()
    without[3], other[3] = 0.0, draw(1)[0]
    moved = compiled_sums(session, [other], without)
    for name, bound in session.plan.sensitivities.items():
        assert norm(together[name] - moved[name]) <= bound * (1 + 1e-6), name
    session.detach()


@pytest.mark.parametrize("seed", SOME)
def test_compiled_passes_keep_to_their_thresholds(seed):
    attack_compiled(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", REST)
def test_compiled_passes_of_all_kinds_keep_to_their_thresholds(seed):
    attack_compiled(seed)


@pytest.mark.parametrize("seed", range(len(KINDS)))
def test_thresholds_hold_in_bfloat16(seed):
    rng, (model, draw) = random.Random(seed), architecture(seed)
    session = session_of(model, draw, precision="bfloat16", thresholds=0.05)
    x = adversarial(draw, 7, rng)
    cotangents = torch.randn(7, 3) * 10.0 ** torch.randint(-2, 4, (7, 1)) / 10

    clipped = hold(session, sums, x, cotangents)
    limit = session.plan.sensitivities
    reached = sum(norm(each[name]) > 0.9 * limit[name] for each in clipped for name in each)
    assert reached > len(limit)  # thresholds act, and are not missed by far


def test_compiled_passes_keep_to_their_thresholds_in_bfloat16():
    model, draw = architecture(5)
    session = session_of(
        model, draw, precision="bfloat16", thresholds=0.05, compile="aot_eager"
    )  # fmt: skip
    cotangents = torch.randn(6, 3) * 10.0 ** torch.randint(-2, 4, (6, 1)) / 10
    x = draw(6)
    hold(session, compiled_sums, x, cotangents)
    eager, compiled = sums(session, [x], cotangents), compiled_sums(session, [x], cotangents)
    for name, limit in session.plan.sensitivities.items():
        assert norm(eager[name] - compiled[name]) <= 0.1 * len(x) * limit


class Text(nn.Module):
    """Takes its mask by name, and returns an object with logits."""

    def __init__(self):
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(9, 6), nn.LayerNorm(6), nn.Linear(6, 2)

    def forward(self, tokens, mask=None):
        x = torch.tanh(self.norm(self.words(tokens)))
        return Answer(logits=self.head((x * mask.unsqueeze(-1)).sum(1)))


class Answer:
    def __init__(self, logits):
        self.logits = logits


def trained(compile):
    torch.manual_seed(0)
    tokens = torch.randint(0, 9, (200, 5))
    data = torch.utils.data.TensorDataset(
        tokens, (torch.rand(200, 5) < 0.7).float(), (tokens[:, 0] > 4).long()
    )
    model, criterion = Text(), losses.CrossEntropy()
    engine, optimizer, loader = enforced_run(
        model, data.tensors, bounds=EnforcedBounds(thresholds=0.05, follow=True), batch_size=40,
        criterion=criterion, engine=PrivacyEngine(insecure_seed=1), compile=compile,
        noise_multiplier=0.3, options=PrivacyOptions(batches=BATCHES),
    )  # fmt: skip
    for _ in range(4):
        for tokens, mask, y in loader:
            optimizer.zero_grad()
            output = model(tokens, mask=mask)
            assert isinstance(output, Answer)
            criterion(output, y).backward()
            optimizer.step()
    assert engine.session.compiled is (compile is not None)
    assert engine.session._compiled is None or engine.session._compiled.compilations == 2
    return [p.detach().clone() for p in model.parameters()], engine.session.thresholds.values()


def test_a_compiled_run_is_the_same_run():
    (plain, values), (compiled, others) = trained(None), trained("aot_eager")
    assert values == others  # every count, of every step, was the same
    assert set(values.values()) != {0.05}  # and thresholds moved
    for one, other in zip(plain, compiled, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_model_that_changes_is_compiled_anew():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.0), nn.Linear(8, 2))
    criterion = losses.CrossEntropy()
    data = torch.randn(40, 6), torch.randint(2, (40,))
    engine, optimizer, loader = enforced_run(
        model, data, criterion=criterion, compile="aot_eager",
        bounds=EnforcedBounds(thresholds=1.0), options=PrivacyOptions(batches=BATCHES),
    )  # fmt: skip

    def step():
        x, y = next(iter(loader))
        optimizer.zero_grad()
        output = model(x)
        found = output.detach().clone()
        criterion(output, y).backward()
        optimizer.step()
        return x, found

    step()
    model[1] = nn.Tanh()
    weights = [p.detach().clone() for p in model.parameters()]
    x, found = step()
    one, shift, two, other = weights
    expected = torch.tanh(x @ one.mT + shift) @ two.mT + other
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert engine.session.compiled


class Scaled(nn.Module):
    """Its cotangents lie just above what bfloat16 rounds them to, before they are rounded."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 16, bias=False), nn.Linear(16, 3, bias=False)

    def forward(self, x):
        return self.last(self.first(x)) * 1.0039


def test_what_is_measured_is_what_is_added():
    """Torch's compiler leaves out roundings to bfloat16 where it fuses, unless told not to."""
    model = Scaled()
    session = session_of(
        model, lambda rows: torch.ones(rows, 16), precision="bfloat16", thresholds=0.05,
        compile="inductor",
    )  # fmt: skip
    cotangents = torch.zeros(6, 3)
    cotangents[0] = 1.0
    found = compiled_sums(session, [torch.ones(6, 16)], cotangents)
    for name, bound in session.plan.sensitivities.items():
        assert 0.99 * bound < norm(found[name]) <= bound, name
    session.detach()


def test_limits_of_float64_models_are_not_rounded_up():
    """The float32 number nearest to 0.1 is larger by 1.5e-8 of it, what float64 rounds far less."""
    model = nn.Linear(16, 3, bias=False).double()
    session = session_of(
        model, lambda rows: torch.ones(rows, 16).double(), thresholds=1.0, compile="aot_eager"
    )  # fmt: skip
    cotangents = torch.zeros(6, 3, dtype=torch.float64)
    cotangents[0] = 1.0
    found = compiled_sums(session, [torch.ones(6, 16).double()], cotangents)
    limit = 1.0 / session.plan.loss_divisor
    assert limit == 0.1
    assert limit * (1 - 1e-6) < norm(found["weight"]) <= limit * (1 + 1e-10)
    session.detach()
