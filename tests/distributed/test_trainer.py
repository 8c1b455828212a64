"""The trainer in several processes: told nothing, and kept by process 0."""

import json
import os

import pytest
import torch
import torch.distributed as dist

from tests.distributed.group import outcomes, together
from tests.training.small import DATA, VALIDATION, StopAt, counted, same, trainer, weights


def fit(folder, stop=None, **options):
    callbacks = [StopAt(stop)] if stop else []
    trained = trainer(folder, checkpoint_every=7, callbacks=callbacks, **options)
    result = trained.fit(DATA, VALIDATION)
    return weights(trained), result, trained.metrics


def test_processes_train_as_one_does(tmp_path):
    """Without noise; metrics are those of all processes together."""
    options = {"noise_multiplier": 0.0, "steps": 12, "insecure_seed": 1}
    ((alone, result, _),) = together(_fit_with, 1, tmp_path / "alone", options)
    for found, other, _ in together(_fit_with, 2, tmp_path / "both", options):
        for a, b in zip(alone, found, strict=True):
            assert torch.allclose(a, b, atol=1e-5)
        for line, own in zip(result.history, other.history, strict=True):
            assert own["loss"] == pytest.approx(line["loss"], rel=1e-4)
            assert own["accuracy"] == pytest.approx(line["accuracy"])
            assert own["validation_loss"] == pytest.approx(line["validation_loss"], rel=1e-4)
        assert (other.steps, other.stopped) == (12, "finished")


def _fit_with(folder, options):
    return fit(folder, **options)


def test_a_crash_is_resumed_at_no_extra_cost(tmp_path):
    (_, result, _), _ = together(fit, 2, tmp_path / "whole")
    crashed = outcomes(fit, 2, tmp_path / "crashed", 10)
    assert crashed[0][0] == "RuntimeError"
    assert "another process has ended" in crashed[1][1]
    results = together(fit, 2, tmp_path / "crashed")
    for found, again, _ in results:
        assert again.resumed_from == 7
        assert again.epsilon == result.epsilon
        assert same(found, results[0][0])
    assert counted(tmp_path / "crashed") == counted(tmp_path / "whole") == 24


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 1), (1, 2)])
def test_checkpoints_load_in_another_number_of_processes(tmp_path, before, after):
    options = {"noise_multiplier": 1.0}
    outcomes(_crash_with, before, tmp_path, options)
    spent = counted(tmp_path)
    assert spent >= 10
    results = together(_fit_with, after, tmp_path, options)
    for found, again, _ in results:
        assert (again.resumed_from, again.steps, again.stopped) == (7, 24, "finished")
        assert same(found, results[0][0])
    # Steps 8 to 10 were seen by the callback, and are paid twice.
    assert counted(tmp_path) == spent + 24 - 7


def _crash_with(folder, options):
    return fit(folder, 10, **options)


def interrupted(folder):
    """Ctrl-C reaches one process only; all stop after the same step."""
    import signal

    from clipless.training import Callback

    class Interrupt(Callback):
        def on_step_end(self, trainer):
            if trainer.step == 9:
                os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    trained = trainer(folder, callbacks=[Interrupt()] if dist.get_rank() == 0 else [])
    with pytest.raises(KeyboardInterrupt):
        trained.fit(DATA)
    return trained.step, trained.stopped


def test_ctrl_c_stops_all_after_the_same_step(tmp_path):
    first, second = together(interrupted, 2, tmp_path)
    assert first == second
    assert first[1] == "interrupted"
    assert 9 <= first[0] <= 11
    assert counted(tmp_path) == first[0]


def fit_as_torchrun_starts_it(folder):
    """Told nothing but what is in the environment; with weights and noise of its own at first."""
    torch.manual_seed(int(os.environ["RANK"]))
    trained = trainer(folder, steps=12)
    result = trained.fit(DATA, VALIDATION)
    return weights(trained), result, dist.get_backend(), dist.get_world_size()


def test_torchrun_needs_nothing_more(tmp_path):
    """(The command itself is run in test_command_line.)"""
    first, second = together(fit_as_torchrun_starts_it, 2, tmp_path / "run", joined=False)
    assert same(first[0], second[0])
    assert first[1].epsilon == second[1].epsilon
    assert first[1].averaged_metrics == second[1].averaged_metrics
    assert first[2:] == second[2:] == ("gloo", 2)
    assert counted(tmp_path / "run") == 12
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["plan"]["steps"] == 12
