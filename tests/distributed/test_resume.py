"""Loops of one's own, saved and resumed; the trainer with sharded models."""

import warnings

import pytest
import torch
import torch.distributed as dist

from clipless import PrivacyEngine
from clipless.errors import PrivacyError
from clipless.privacy import ProvedBounds
from tests.distributed.group import outcomes, together
from tests.distributed.runs import final_weights, largest_difference, private_run, whole, wrapped
from tests.privacy.runs import Run, cnn, mlp
from tests.training.small import DATA, VALIDATION, StopAt, counted, trainer


def begun(folder, wrapper):
    """Four steps, saved as a loop of one's own would; then three more."""
    ledger = folder / "ledger.jsonl"
    run = private_run(mlp, wrapper, engine=PrivacyEngine(ledger=ledger)).steps(4)
    state = run.engine.state_dict()
    run.engine.gather_optimizer_state()
    saved = {"engine": state}
    if wrapper == "fsdp":
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        saved["model"], saved["optimizer"] = get_state_dict(
            run.inner, run.optimizer, options=options
        )
    elif dist.get_rank() == 0:
        saved |= {"model": run.inner.state_dict(), "optimizer": run.optimizer.state_dict()}
    if dist.get_rank() == 0:
        torch.save(saved, folder / "saved.pt")
    run.steps(3)
    weights = final_weights(run)
    run.engine.close()
    return weights, run.engine.ledger.releases


def resumed(folder, wrapper, replay):
    saved = torch.load(folder / "saved.pt")
    model = mlp()
    if wrapper != "fsdp":
        model.load_state_dict(saved["model"])
    module = wrapped(model, wrapper)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    if wrapper == "fsdp":
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

        set_state_dict(
            model, optimizer, model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"], options=StateDictOptions(full_state_dict=True),
        )  # fmt: skip
    else:
        optimizer.load_state_dict(saved["optimizer"])
    run = Run(
        model=module, optimizer=optimizer, resume_from=saved["engine"], replay=replay,
        engine=PrivacyEngine(ledger=folder / "ledger.jsonl"),
    )  # fmt: skip
    for _ in range(3):
        run.step()
    return [whole(p) for p in model.parameters()], run.engine.ledger.releases


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_a_loop_is_resumed_bit_for_bit(tmp_path, wrapper):
    (expected, spent), _ = together(begun, 2, tmp_path, wrapper)
    for weights, counted_now in together(resumed, 2, tmp_path, wrapper, True):
        assert largest_difference(weights, expected) == 0
        assert counted_now == spent == 7  # repeated steps are not paid for again
    # In another number of processes the noise cannot be repeated, and new noise is paid for.
    for kind, text in outcomes(resumed, 4, tmp_path, wrapper, True):
        assert kind == "PrivacyError"
        assert "cannot be repeated" in text
    for weights, counted_now in together(resumed, 4, tmp_path, wrapper, False):
        assert largest_difference(weights, expected) > 0
        assert counted_now == 10


def fit_sharded(folder, wrapper, stop, options):
    torch.manual_seed(0)
    model = wrapped(mlp(), wrapper)
    trained = trainer(
        folder, model=model, checkpoint_every=7, callbacks=[StopAt(stop)] if stop else [], **options
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        result = trained.fit(DATA, VALIDATION)
    return [whole(p) for p in model.parameters()], result, trained.evaluate(VALIDATION)


def test_the_trainer_takes_sharded_models(tmp_path):
    bounds = ProvedBounds(product_clip=0.5)
    still = {"noise_multiplier": 0.0, "steps": 12, "bounds": bounds, "insecure_seed": 1}
    ((alone, expected, measured),) = together(fit_sharded, 1, tmp_path / "1", "bare", None, still)
    for weights, result, found in together(fit_sharded, 2, tmp_path / "2", "fsdp", None, still):
        assert largest_difference(weights, alone) < 1e-5
        assert result.history[-1]["loss"] == pytest.approx(expected.history[-1]["loss"], rel=1e-4)
        assert found["loss"] == pytest.approx(measured["loss"], rel=1e-4)


@pytest.mark.parametrize(("before", "after"), [("fsdp", "fsdp"), ("fsdp", "bare")])
def test_sharded_checkpoints_load_anywhere(tmp_path, before, after):
    noisy = {"noise_multiplier": 1.0}
    sizes = (2, 2) if before == after else (2, 1)
    outcomes(fit_sharded, sizes[0], tmp_path / "crashed", before, 10, noisy)
    results = together(fit_sharded, sizes[1], tmp_path / "crashed", after, None, noisy)
    for weights, result, _ in results:
        assert (result.resumed_from, result.steps) == (7, 24)
        assert largest_difference(weights, results[0][0]) == 0
    # The same processes repeat steps 8 to 10; others take them anew, and pay.
    assert counted(tmp_path / "crashed") == (24 if before == after else 27)


def sharded_edit():
    """Weights that are edited outside their sets are noticed, also of a sharded model."""
    run = private_run(cnn, "fsdp").steps(1)
    with torch.no_grad():
        for parameter in run.inner.parameters():
            parameter.mul_(3.0)
    with pytest.raises(Exception, match="outside its constraint") as error:
        run.step()
    assert not isinstance(error.value, PrivacyError)
    run = private_run(cnn, "fsdp").steps(1)
    x, y = run.batch()
    run.backward(x, y)
    with torch.no_grad():
        next(run.inner.parameters()).mul_(0.5)
    with pytest.raises(PrivacyError, match="edited between the backward pass"):
        run.optimizer.step()


def test_edits_of_sharded_weights_are_noticed():
    together(sharded_edit, 2)
