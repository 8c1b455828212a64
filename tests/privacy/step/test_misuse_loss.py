"""Misuse of the loss: what a careless user can do between the model's output and backward.

See `tests.privacy.misuse_helpers` for how every case must end. Here: other criteria, other terms,
scaled losses, changed outputs, wrong labels, second passes, evaluation.
"""

import copy
import io
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from clipless import PrivacyEngine, losses
from clipless.errors import (
    LabelError,
)
from tests.privacy.misuse_helpers import (
    assert_close,
    bounded_or_refused,
    counted,
    counting_skipped_steps,
    edit_in_secret,
    expected_gradients,
    full,
    gradients_of,
    refused,
    refused_unharmed,
)
from tests.privacy.runs import Run, examples

# --- the loss ------------------------------------------------------------------------------------


def _through_model(term):
    """A term of the loss that looks at the model's output and targets."""
    return lambda run, x, y: term(run, run.model(x), y)


_OTHER_LOSSES = {
    "torch's cross-entropy": _through_model(lambda run, out, y: F.cross_entropy(out, y)),
    "the mean output": _through_model(lambda run, out, y: out.mean()),
    "the criterion's forward": _through_model(
        lambda run, out, y: run.criterion.forward(out, y).mean()
    ),
    "per_example": _through_model(lambda run, out, y: run.criterion.per_example(out, y).mean()),
    "a loss made and another used": _through_model(
        lambda run, out, y: (run.criterion(out, y), F.cross_entropy(out, y))[1]
    ),
    "the sum of two outputs": lambda run, x, y: (run.model(x) - run.model(-x)).abs().sum(),
}  # fmt: skip


@pytest.mark.parametrize("name", _OTHER_LOSSES)
def test_backward_without_the_criterion(name):
    run = Run()
    x, y = run.batch()
    with refused_unharmed(run, "besides the criterion", "PerExample"):
        _OTHER_LOSSES[name](run, x, y).backward()
    assert not gradients_of(run.model)
    with refused_unharmed(run, ("without a batch", "backward was called for 0 of the 1")):
        run.optimizer.step()
    assert counted(run, 0)


@pytest.mark.parametrize(
    "loss",
    {
        "of the loss": lambda run, x, y: run.criterion(run.model(x), y),
        "of the output": lambda run, x, y: run.model(x).sum(),
    }.items(),
    ids=lambda item: item[0],
)
@pytest.mark.parametrize("of", ["inputs", "parameters"])
def test_autograd_grad_finds_no_way_to_data_or_parameters(loss, of):
    run = full()
    x, y = run.batch()
    x.requires_grad_()
    wanted = [x] if of == "inputs" else list(run.model.parameters())
    with refused_unharmed(run, "not have been used in the graph", error=RuntimeError):
        torch.autograd.grad(loss[1](run, x, y), wanted, create_graph=True)
    assert not gradients_of(run.model)
    with refused_unharmed(run, ("without a batch", "backward was called for 0 of the 1")):
        run.optimizer.step()
    assert counted(run, 0)


def test_backward_for_some_tensors_only():
    run = full()
    x, y = run.batch()
    loss = run.criterion(run.model(x), y)
    loss.backward(inputs=[run.model[1].weight])
    assert not gradients_of(run.model)
    with refused_unharmed(run, "backward was called for 0 of the 1"):
        run.optimizer.step()
    loss.backward()
    run.optimizer.step()
    assert counted(run, 1)


@pytest.mark.parametrize(
    "term",
    {
        "confidence penalty": lambda out, y: 0.1 * out.logsumexp(1).mean(),
        "batch variance": lambda out, y: out.var(0).sum(),
        "contrast between examples": lambda out, y: (out @ out.T).sum(),
        "a second loss": lambda out, y: F.cross_entropy(out, y),
    }.items(),
    ids=lambda item: item[0],
)
def test_a_term_next_to_the_criterion(term):
    run = Run()
    x, y = run.batch()
    out = run.model(x)
    with refused_unharmed(run, "besides the criterion", "PerExample"):
        (run.criterion(out, y) + term[1](out, y)).backward()


@pytest.mark.parametrize(
    "change",
    {
        "times a constant": lambda loss: 10 * loss,
        "divided by accumulation steps": lambda loss: loss / 4,
        "times the batch": lambda loss: loss * 20,
        "exponential": lambda loss: loss.exp(),
        "zero": lambda loss: 0 * loss,
        "a hook on the loss": lambda loss: (loss.register_hook(lambda g: 3 * g), loss)[1],
    }.items(),
    ids=lambda item: item[0],
)
def test_a_scaled_loss(change):
    run = Run()
    x, y = run.batch()
    with refused_unharmed(run, "multiplied by", "learning rate", "micro_batch_size"):
        change[1](run.criterion(run.model(x), y)).backward()


def test_a_scaled_loss_by_the_argument_of_backward():
    run = Run()
    with refused_unharmed(run, "multiplied by 7"):
        run.criterion(run.model((batch := run.batch())[0]), batch[1]).backward(torch.tensor(7.0))


def test_the_criterion_twice_on_one_output():
    run = Run()
    x, y = run.batch()
    out = run.model(x)
    with refused_unharmed(run, "went through the criterion before"):
        (run.criterion(out, y) + run.criterion(out, y)).backward()


@pytest.mark.parametrize(
    "change",
    {
        "reshaped": lambda out: out.view(-1, 3),
        "centred over the batch": lambda out: out - out.mean(0),
        "transposed twice": lambda out: out.T.T,
        "a row": lambda out: out[:1],
        "cloned": lambda out: out.clone(),
        "double precision": lambda out: out.double(),
        "normalised": lambda out: F.normalize(out),
        "detached": lambda out: out.detach(),
        "permuted": lambda out: out[torch.randperm(len(out))],
    }.items(),
    ids=lambda item: item[0],
)
def test_the_criterion_on_a_changed_output(change):
    run = Run()
    x, y = run.batch()
    with refused_unharmed(run, "model's output itself, unchanged", "torch.no_grad()"):
        run.criterion(change[1](run.model(x)), y)


def test_an_output_edited_in_place():
    run = Run()
    x, _ = run.batch()
    out = run.model(x)
    with refused_unharmed(run, "in-place operation", error=RuntimeError):
        out.sub_(out.mean(0))


@pytest.mark.parametrize("how", ["without gradients", "through data"])
def test_an_output_edited_in_secret(how):
    # What is differentiated is the criterion's own copy of the model's output.
    run = full()
    x, y = run.batch()
    expected = expected_gradients(run, x, y)
    out = run.model(x)
    edit_in_secret(out, how)
    run.criterion(out, y).backward()
    assert_close(run.gradients(), expected)
    run.optimizer.step()
    assert counted(run, 1)


@pytest.mark.parametrize("how", ["copied", "saved and loaded"])
def test_a_copy_of_the_output(how):
    run = full()
    x, y = run.batch()
    out = run.model(x)
    if how == "copied":
        other = copy.deepcopy(out)
    else:
        torch.save(out, buffer := io.BytesIO())
        buffer.seek(0)
        other = torch.load(buffer)
    assert other.equal(out)
    with refused_unharmed(run, "model's output itself, unchanged"):
        run.criterion(other, y)
    run.criterion(out, y).backward()
    run.optimizer.step()
    assert counted(run, 1)


def test_the_criterion_of_another_model():
    engine = PrivacyEngine()
    one, two = full(engine=engine), full(engine=engine)
    x, y = one.batch()
    two.batch()
    with refused_unharmed(one, "output of the private model"):
        two.criterion(one.model(x), y)
    one.backward(x, y)
    one.optimizer.step()
    assert counted(one, 1)


def test_the_criterion_without_gradients():
    run = full()
    x, y = run.batch()
    out = run.model(x)
    with torch.no_grad():
        loss = run.criterion(out, y)
    with refused_unharmed(run, "does not require grad", error=RuntimeError):
        loss.backward()
    with refused_unharmed(run, "without a batch"):
        run.optimizer.step()
    run.criterion(out, y).backward()  # it was not used up by looking at the loss
    run.optimizer.step()
    assert counted(run, 1)


def test_the_criterion_with_keywords():
    run = Run()
    x, y = run.batch()
    with refused_unharmed(run, "criterion(output, target)"):
        run.criterion(output=run.model(x), target=y)
    with torch.no_grad():
        assert run.criterion(output=run.model(x), target=y).ndim == 0


def test_the_model_with_keywords():
    run = Run()
    x, _ = run.batch()
    with refused_unharmed(run, "by position"):
        run.model(input=x)


def test_two_backward_passes():
    run = Run(noise_multiplier=0.0)
    before = copy.deepcopy(run.model.state_dict())
    x, y = run.batch()
    loss = run.criterion(run.model(x), y)
    loss.backward(retain_graph=True)
    with refused_unharmed(run, "a second time", "retain_graph=True"):
        loss.backward()
    run.optimizer.step()  # on the gradients of the first
    assert run.engine.ledger.releases == 1
    plain = copy.deepcopy(run.model)
    plain.load_state_dict(before)
    F.cross_entropy(plain(x), y, reduction="sum").div(20).backward()
    for name, expected in gradients_of(plain).items():
        torch.testing.assert_close(run.model.get_parameter(name).grad, expected)


def test_backward_after_the_step():
    run = Run()
    x, y = run.batch()
    spare = run.model(x)
    run.backward(x, y)
    run.optimizer.step()
    with refused_unharmed(run, "no new batch was drawn"):
        run.criterion(spare, y).backward()


def test_a_graph_of_the_backward_pass():
    # create_graph=True, as for gradient penalties: nothing more can be differentiated.
    run = full()
    x, y = run.batch()
    expected = expected_gradients(run, x, y)
    run.criterion(run.model(x.requires_grad_()), y).backward(create_graph=True)
    assert x.grad is None
    assert_close(run.gradients(), expected)
    assert not any(gradient.requires_grad for gradient in run.gradients().values())
    run.optimizer.step()
    assert counted(run, 1)


def test_consistency_between_two_passes():
    # The target is a second output of the model: its gradient has no criterion of its own.
    criterion = losses.PerExample(lambda a, b: (a - b).abs().mean(), lipschitz=1.0)
    run = Run(criterion=criterion)
    x, _ = run.batch()
    with refused_unharmed(run, "besides the criterion"):
        criterion(run.model(x), run.model(x + 0.1)).backward()


def test_the_second_of_two_outputs_counts_once():
    run = full(noise_multiplier=0.0)
    x, y = run.batch()
    run.model(x)
    run.backward(x, y)
    run.optimizer.step()
    assert run.engine.ledger.releases == 1
    for name, sensitivity in run.engine.plan.sensitivities.items():
        assert gradients_of(run.model)[name].norm() <= 16 * sensitivity


@pytest.mark.parametrize(
    "labels",
    {
        "out of range": (lambda y: y + 3, "class indices run from 0 to 2"),
        "unlabelled": (lambda y: y - 100, "Remove unlabelled examples"),
        "one-hot": (lambda y: F.one_hot(y, 3), "target.argmax(dim=1)"),
        "smoothed": (lambda y: F.one_hot(y, 3).float() * 0.9, "another Lipschitz constant"),
        "floats": (lambda y: y.float(), "target.long()"),
        "of another batch": (lambda y: torch.cat([y, y]), "one class index per example"),
        "a column": (lambda y: y[:, None], "target.squeeze(1)"),
    }.items(),
    ids=lambda item: item[0],
)
def test_wrong_labels(labels):
    change, words = labels[1]
    run = Run()
    x, y = run.batch()
    with refused_unharmed(run, words, error=LabelError):
        run.backward(x, change(y))
    # The run goes on; what was drawn is counted.
    with counting_skipped_steps():
        run.step()
    assert counted(run, 2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_regression_targets_that_are_not_finite(bad):
    x, _ = examples(16)
    target = torch.zeros(16, 3)
    target[0] = bad
    run = full(data=(x, target), criterion=losses.AbsoluteError(), noise_multiplier=0.0)
    run.step()
    assert all(torch.isfinite(p).all() for p in run.model.parameters())
    for name, sensitivity in run.engine.plan.sensitivities.items():
        assert gradients_of(run.model)[name].norm() <= 16 * sensitivity


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), F.cross_entropy, losses.CrossEntropy])
def test_a_criterion_that_is_not_a_private_loss(criterion):
    with refused("not a per-example loss", "clipless.losses", "PerExample"):
        Run(criterion=criterion)


def test_a_claimed_constant_that_is_too_small_clips():
    # The loss is 1000 times steeper than its author says.
    assert not bounded_or_refused(
        lambda run: run.step(),
        criterion=lambda: losses.PerExample(
            lambda out, y: 1000 * (out * F.one_hot(y, 3)).sum(), lipschitz=1.0
        ),
    )


def test_a_constant_of_the_loss_changed_in_training():
    def attack(run):
        run.criterion.floor = 1e-4
        run.step()

    bounded_or_refused(attack, criterion=lambda: losses.CosineSimilarity(1.0))


class RelativeLoss(losses.CrossEntropy):
    """Weighs every example by the largest loss of the batch."""

    def per_example(self, output, target):
        each = super().per_example(output, target)
        return each / each.detach().max().square()


def test_a_loss_of_ones_own_that_looks_at_the_batch():
    x, y = torch.eye(6)[:1].repeat(64, 1), torch.zeros(64).long()
    wild = x.clone()
    wild[0] = -wild[0]
    bounded_or_refused(
        lambda run: run.step(),
        criterion=lambda: RelativeLoss(tau=4.0),
        data=((x, y), (wild, y.index_fill(0, torch.tensor([0]), 1))),
    )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_reduction_set_back_by_hand(reduction):
    run = Run()
    run.criterion.reduction = reduction
    with refused_unharmed(run, "reduction"):
        run.step()


def test_the_loss_function_replaced_in_training():
    run = Run()
    original = run.criterion.per_example
    run.criterion.per_example = lambda out, y: original(out, y) * original(out, y).detach().sum()
    with refused_unharmed(run, "criterion"):
        run.step()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_on_the_criterion(when):
    criterion = losses.CrossEntropy()

    def relative(module, arguments, each):
        return each * each.detach().sum() if each.ndim else each

    if when == "before":
        criterion.register_forward_hook(relative)
        with refused("hook"):
            Run(criterion=criterion).step()
    else:
        run = Run(criterion=criterion)
        criterion.register_forward_hook(relative, prepend=True)
        with refused_unharmed(run, "hook"):
            run.step()


def test_evaluation_costs_nothing_and_is_ordinary():
    run = Run().steps(2)
    spent = run.engine.get_epsilon()
    x, y = examples(30, seed=5)
    expected = F.cross_entropy(run.model.eval()(x).detach(), y)
    torch.testing.assert_close(run.criterion(run.model(x), y).detach(), expected)
    with torch.no_grad():
        torch.testing.assert_close(run.criterion(run.model(x), y), expected)
        torch.testing.assert_close(run.criterion(run.model.train()(x), y), expected)
        torch.testing.assert_close(run.criterion(run.model(x).clone(), y), expected)
    with torch.inference_mode():
        torch.testing.assert_close(run.criterion(run.model(x), y), expected)
    assert run.engine.get_epsilon() == spent
    run.step()
    assert counted(run, 3)


def test_evaluation_between_forward_and_step():
    run = full(noise_multiplier=0.0)
    x, y = run.batch()
    loss = run.criterion(run.model(x), y)
    run.model.eval()
    with torch.no_grad():
        run.criterion(run.model(x), y)
    run.model.train()
    loss.backward()
    run.criterion(run.model.eval()(x), y)
    run.model.train()
    run.optimizer.step()
    assert run.engine.ledger.releases == 1


def test_forgetting_train_after_evaluation():
    run = Run().steps(1)
    run.model.eval()
    with refused_unharmed(run, "in evaluation mode", "Call model.train()"):
        run.step()
    assert not gradients_of(run.model)  # those of evaluation had no noise
    run.model.train()
    with counting_skipped_steps():
        run.step()
    assert counted(run, 3)


def test_gradients_of_evaluation_are_not_trained_on():
    # Attacks on the model need them. They do not get into a step, with or without zero_grad.
    run = full(noise_multiplier=0.0, lr=0.0)
    x, y = run.batch()
    test_x, test_y = examples(4, seed=7)
    F.cross_entropy(run.model.eval()(test_x.requires_grad_()), test_y).backward()
    assert test_x.grad.norm() > 0
    run.model.train()
    with refused_unharmed(run, "did not come through the private criterion", "discarded"):
        run.backward(x, y)
    assert not gradients_of(run.model)

    x, y = run.batch()
    with counting_skipped_steps():
        run.backward(x, y)
    F.cross_entropy(run.model.eval()(x), y).backward()
    run.model.train()
    with refused_unharmed(run, "did not come through the private criterion", "discarded"):
        run.optimizer.step()
    run.optimizer.step()  # what was in escrow is whole
    assert run.engine.ledger.releases == 2
    assert_close(gradients_of(run.model), expected_gradients(run, x, y))

    x, y = run.batch()
    F.cross_entropy(run.model.eval()(x), y).backward()  # on top of the gradients of the last step
    run.model.train()
    run.backward(x, y)
    run.optimizer.step()
    assert_close(gradients_of(run.model), expected_gradients(run, x, y))
