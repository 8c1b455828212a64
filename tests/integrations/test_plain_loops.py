"""Fabric and accelerate: the loop of a plain private run, with their wrappers around it."""

import accelerate
import lightning
import pytest
import torch
from torch.utils.data import DataLoader, WeightedRandomSampler

from clipless import PrivacyEngine
from clipless.errors import PrivacyError
from clipless.integrations import prepare_private
from clipless.privacy import BatchOptions, PrivacyOptions
from tests.integrations.lightning_runs import (
    BATCH,
    SIZE,
    Classifier,
    data,
    loader,
    plain_loop,
    same,
    weights,
)


def fabric(**given):
    return lightning.Fabric(accelerator="cpu", devices=1, **given)


def accelerator(**given):
    return accelerate.Accelerator(cpu=True, **given)


@pytest.fixture(params=[fabric, accelerator])
def helper(request):
    return request.param()


def prepared(helper, *, module=None, given=None, **arguments):
    """Return what a loop needs: module, model, optimizer, schedule, batches, engine."""
    module = Classifier() if module is None else module
    configured = module.configure_optimizers()
    engine = PrivacyEngine(insecure_seed=0)
    if "target_epsilon" not in arguments:
        arguments.setdefault("noise_multiplier", 1.0)
    model, optimizer, batches = prepare_private(
        helper, engine=engine, module=module.network, optimizer=configured["optimizer"],
        data_loader=loader() if given is None else given, criterion=module.criterion, **arguments,
    )  # fmt: skip
    return module, model, optimizer, configured["lr_scheduler"]["scheduler"], batches, engine


@pytest.mark.parametrize("micro_batch_size", [None, 5])
def test_the_weights_of_a_plain_private_loop(helper, micro_batch_size):
    options = PrivacyOptions(batches=BatchOptions(micro_batch_size=micro_batch_size))
    module, model, optimizer, scheduler, batches, engine = prepared(helper, options=options)
    for _ in range(2):
        for x, y in batches:
            optimizer.zero_grad()
            helper.backward(module.criterion(model(x), y))
            if batches.current.is_last:
                optimizer.step()
                scheduler.step()
    engine.detach()
    assert engine.ledger.releases == 12
    assert same(weights(module), plain_loop(steps=12, options=options))


def test_a_budget(helper):
    options = {"target_epsilon": 2.0, "epochs": 1}
    module, model, optimizer, _, batches, engine = prepared(helper, **options)
    assert len(batches) == engine.plan.steps == 6
    for x, y in batches:
        helper.backward(module.criterion(model(x), y))
        optimizer.step()
    assert not engine.allows_step()


def test_clipping_between_backward_and_step(helper):
    module, model, optimizer, _, batches, engine = prepared(helper)
    x, y = next(iter(batches))
    helper.backward(module.criterion(model(x), y))
    clip = getattr(helper, "clip_gradients", None)
    arguments = (model.parameters(),) if clip is None else (model, optimizer)
    with pytest.raises(PrivacyError, match="clip_grad_norm_"):
        (clip or helper.clip_grad_norm_)(*arguments, max_norm=1.0)
    assert engine.ledger.releases == 0


def test_foreign_samplers_and_batches(helper):
    weighted = WeightedRandomSampler(torch.ones(SIZE), SIZE)
    with pytest.raises(PrivacyError, match="WeightedRandomSampler"):
        prepared(helper, given=DataLoader(data(), batch_size=BATCH, sampler=weighted))
    _, model, _, _, _, _ = prepared(helper)
    with pytest.raises(PrivacyError, match="before a batch was drawn"):
        model(next(iter(loader()))[0])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fabric(precision="bf16-mixed"), "precision='bfloat16'"),
        (lambda: accelerator(gradient_accumulation_steps=2), "micro_batch_size"),
        (lambda: accelerator(mixed_precision="bf16"), "precision='bfloat16'"),
        (lambda: 3, "expected a lightning.Fabric or an accelerate.Accelerator"),
    ],
)
def test_helpers_that_would_void_the_proof(make, words):
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    with pytest.raises(PrivacyError, match=words):
        prepared(make())
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
