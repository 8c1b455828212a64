"""The callbacks behind the report: released quantities only, right on average, resumable."""

import json
import math

import pytest
import torch

from clipless import losses
from clipless import nn as lip
from clipless.report import BoundsCallback, SignalCallback
from clipless.training import Callback
from tests.training.small import DATA, STEPS, StopAt, trainer


class Releases(Callback):
    """Keeps what the optimizer is given."""

    def __init__(self):
        self.gradients = []

    def on_fit_start(self, trainer):
        parameters = dict(trainer.model.named_parameters())
        trainer.optimizer.register_step_pre_hook(
            lambda *_: self.gradients.append(
                {name: each.grad.clone() for name, each in parameters.items()}
            )
        )


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_estimates_are_a_function_of_what_was_released():
    signal, releases = SignalCallback(), Releases()
    run = trainer(callbacks=[signal, releases], noise_multiplier=1.0)
    run.fit(DATA)
    assert [each["steps"] for each in signal.results] == [5, 5, 5, 5, 4]
    deviations = run.engine.plan.noise_deviations
    for index, each in enumerate(signal.results):
        steps = releases.gradients[5 * index : 5 * index + 5]
        for parameter in each["parameters"]:
            name = parameter["name"]
            energy = sum(float(step[name].double().square().sum()) for step in steps) / len(steps)
            noise = parameter["size"] * deviations[name] ** 2
            assert parameter["released_energy"] == pytest.approx(energy, rel=1e-9)
            assert parameter["noise_energy"] == pytest.approx(noise, rel=1e-9)
            assert parameter["signal_energy"] == max(
                0.0, parameter["released_energy"] - parameter["noise_energy"]
            )


def run_of(x, *, noise_multiplier, steps=40):
    """All examples in every step, one layer without a bias."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(lip.BoundedInput(1.0), lip.SpectralLinear(6, 3))
    signal, releases = SignalCallback(), Releases()
    run = trainer(
        model=model, criterion=losses.CrossEntropy(tau=4.0), noise_multiplier=noise_multiplier,
        sampling="full_batch", batch_size=None, steps=steps, callbacks=[signal, releases],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
    )  # fmt: skip
    data = torch.utils.data.TensorDataset(x, DATA[1])
    run.fit(torch.utils.data.DataLoader(data, batch_size=100))
    found = [each["parameters"][0] for each in signal.results]
    return found, releases.gradients


def test_noise_alone_is_seen_as_noise():
    """Inputs of zero have no gradient: what is estimated is an estimate of nothing."""
    found, _ = run_of(torch.zeros(100, 6), noise_multiplier=1.0)
    ratios = [each["ratio"] for each in found]
    assert any(ratio == 0 for ratio in ratios)
    # Two standard deviations: a few of 40 may lie above.
    above = sum(each["ratio"] > each["resolution"] for each in found)
    assert len(found) == 40
    assert above <= 6
    assert found[0]["resolution"] == pytest.approx(2 * math.sqrt(2 / 18))


def test_signal_under_noise_is_found_on_average():
    """The weights stand still, so that the gradient without noise is the same in every step."""
    _, quiet = run_of(DATA[0], noise_multiplier=1e-6, steps=1)
    truth = float(quiet[0]["1.weight"].double().square().sum())
    found, _ = run_of(DATA[0], noise_multiplier=6.0, steps=100)
    excess = [each["released_energy"] - each["noise_energy"] for each in found]
    mean = sum(excess) / len(excess)
    noise = found[0]["noise_energy"]
    # Deviation of the mean: that of the noise's energy, and of its product with the signal.
    deviation = math.sqrt((2 * noise**2 / 18 + 4 * truth * noise / 18) / 100)
    assert abs(mean - truth) < 4 * deviation
    assert noise > 2 * truth
    assert truth > 6 * deviation  # so that zero would not pass


def test_a_parameter_without_noise_has_no_ratio():
    found, _ = run_of(DATA[0], noise_multiplier=0.0, steps=2)
    assert all(each["ratio"] is None for each in found)
    json.dumps(found, allow_nan=False)


def test_files_go_on_after_a_crash(tmp_path):
    callbacks = [SignalCallback(), BoundsCallback(), StopAt(12)]
    with pytest.raises(RuntimeError, match="stop"):
        trainer(tmp_path, callbacks=callbacks).fit(DATA)
    assert [each["step"] for each in lines(tmp_path / "signal.jsonl")[1:]] == [5, 10]
    assert "end" not in json.loads((tmp_path / "bounds.json").read_text())
    with (tmp_path / "signal.jsonl").open("a") as file:
        file.write('{"kind": "sig')  # the crash came in the middle of a line
    run = trainer(tmp_path, callbacks=[SignalCallback(), BoundsCallback()])
    run.fit(DATA)
    assert run.resumed_from == 10
    head, *rest = lines(tmp_path / "signal.jsonl")
    assert (head["format"], head["kind"]) == ("clipless-signal", "header")
    assert [each["step"] for each in rest] == [5, 10, 15, 20, 24]
    assert [each["steps"] for each in rest] == [5, 5, 5, 5, 4]
    bounds = json.loads((tmp_path / "bounds.json").read_text())
    assert (bounds["first_step"], bounds["last_step"]) == (0, STEPS)


def test_a_damaged_file_of_ours_does_not_stop_training(tmp_path):
    with pytest.raises(RuntimeError, match="stop"):
        trainer(tmp_path, callbacks=[BoundsCallback(), StopAt(12)]).fit(DATA)
    (tmp_path / "bounds.json").write_text("{")
    trainer(tmp_path, callbacks=[BoundsCallback()]).fit(DATA)
    assert json.loads((tmp_path / "bounds.json").read_text())["end"]["parameters"]


def test_watching_changes_nothing(tmp_path):
    plain = trainer(noise_multiplier=1.0, insecure_seed=1)
    plain.fit(DATA)
    watched = trainer(
        noise_multiplier=1.0, insecure_seed=1, callbacks=[SignalCallback(), BoundsCallback()]
    )
    watched.fit(DATA)
    for one, other in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert len(watched.optimizer._optimizer_step_pre_hooks) == 0  # all hooks are gone


def test_bounds_are_those_of_the_plan_and_certificates_are_above_the_true_norms():
    watch = BoundsCallback()
    run = trainer(callbacks=[watch], noise_multiplier=1.0)
    run.fit(DATA)
    planned = {each.name: each.gradient_bound for each in run.engine.plan.parameters}
    for each in watch.written["end"]["parameters"]:
        assert each["gradient_bound"] == planned[each["name"]]
        weight = run.model.get_parameter(each["name"]).detach().double()
        norm = torch.linalg.matrix_norm(weight, 2) if weight.ndim == 2 else weight.norm()
        assert float(norm) <= each["certificate"]["bound"] <= each["certificate"]["radius"] + 1e-6
