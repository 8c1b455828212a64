"""The trainer: what it accepts, shows, calls, measures, and when it stops."""

import json
import math
import signal
import sys

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from clipless import losses
from clipless import nn as lip
from clipless.errors import PrivacyError
from clipless.privacy import ProvedBounds, epsilon
from clipless.training import Callback, LayerAdam, TensorBoardWriter, Trainer, WeightAverage
from clipless.training._metrics import correct
from clipless.training._progress import EpsilonGauge
from tests.privacy.runs import examples, mlp
from tests.training.small import DATA, STEPS, VALIDATION, model, same, trainer, weights


class Rows(Dataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data[0])

    def __getitem__(self, index):
        return self.data[0][index], self.data[1][index]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


def test_fit_keeps_the_budget_and_says_how_it_went():
    trained = trainer()
    result = trained.fit(DATA, VALIDATION)
    assert result.stopped == "finished"
    assert result.steps == trained.engine.ledger.releases == STEPS
    assert 2.9 < result.epsilon <= 3.0
    assert result.delta == trained.engine.plan.delta
    assert set(result.metrics) == set(result.averaged_metrics) == {"loss", "accuracy"}
    assert [line["step"] for line in result.history] == [5, 10, 15, 20, 24]
    assert result.history[-1]["validation_loss"] == result.averaged_metrics["loss"]
    assert result.history[-1]["epsilon_bound"] >= result.epsilon - 1e-12
    assert result.seconds > 0
    assert result.resumed_from is None
    assert "differentially private" in str(result)
    assert trained.report().epsilon == result.epsilon


@pytest.mark.parametrize(
    "wrap",
    [
        lambda data: data,
        lambda data: TensorDataset(*data),
        Rows,
        lambda data: DataLoader(Rows(data), batch_size=20, num_workers=2),
        lambda data: DataLoader(TensorDataset(*data), batch_size=20),
    ],
    ids=["tensors", "tensor data set", "data set", "workers", "loader"],
)
def test_all_kinds_of_data_give_the_same_training(wrap):
    expected = trainer(steps=6, insecure_seed=1)
    expected.fit(DATA)
    data = wrap(DATA)
    size = {} if isinstance(data, DataLoader) else {"batch_size": 20}
    trained = trainer(steps=6, insecure_seed=1, **({"batch_size": None} | size))
    trained.fit(data, wrap(VALIDATION))
    assert same(weights(trained), weights(expected))


def test_training_learns():
    x = torch.randn(2000, 6)
    y = x[:, :3].argmax(dim=1)
    trained = trainer(
        criterion=losses.CrossEntropy(tau=16.0), batch_size=500, steps=60, target_epsilon=8.0,
        optimizer=lambda parameters: LayerAdam(parameters, lr=0.03),
    )  # fmt: skip
    result = trained.fit((x, y), (x, y))
    assert result.averaged_metrics["accuracy"] > 0.75


def test_refuses_what_it_cannot_train():
    with pytest.raises(ValueError, match="target_epsilon"):
        Trainer(mlp(), losses.CrossEntropy(), batch_size=10, epochs=1)
    with pytest.raises(ValueError, match="epochs or steps"):
        trainer(epochs=2)
    with pytest.raises(ValueError, match="scheduler"):
        trainer(scheduler="linear")
    with pytest.raises(ValueError, match="batch_size is needed"):
        trainer(batch_size=None).fit(DATA)
    with pytest.raises(ValueError, match="the data loader has 10"):
        trainer().fit(DataLoader(TensorDataset(*DATA), batch_size=10))
    with pytest.raises(TypeError, match="is no data"):
        trainer().fit(3)
    stream = DataLoader(Stream(), batch_size=20)
    with pytest.raises(PrivacyError):
        trainer().fit(stream)
    with pytest.raises(TypeError, match="inputs and targets"):
        trainer(input_shape=(6,)).fit(TensorDataset(DATA[0]))


def test_model_and_criterion_are_ordinary_afterwards():
    trained = trainer()
    trained.model.eval()
    trained.fit(DATA)
    assert not trained.model.training
    trained.criterion(trained.model(DATA[0]), DATA[1]).backward()  # no hooks any more


def test_optimizers_schedulers_and_averages_of_ones_own():
    rates = []

    class Rates(Callback):
        def on_step_end(self, trainer):
            rates.append(trainer.optimizer.param_groups[0]["lr"])

    def half(optimizer, steps):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - 0.5 * step / steps)

    trained = trainer(
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.2, momentum=0.9),
        scheduler=half,
        average=lambda model: WeightAverage(model, decay=1.0, start=10),
        callbacks=[Rates()],
    )
    trained.fit(DATA)
    assert rates[-1] == pytest.approx(0.1)
    assert trained.average.updates == STEPS
    assert trained.average.start == 10

    net = model()
    own = torch.optim.SGD(net.parameters(), lr=0.1)
    trained = trainer(model=net, optimizer=own, scheduler=None, average=None)
    result = trained.fit(DATA, VALIDATION)
    assert own.param_groups[0]["lr"] == 0.1
    assert result.averaged_metrics == {}
    with pytest.raises(ValueError, match="no averaged weights"):
        trained.evaluate(VALIDATION, averaged=True)
    assert isinstance(trainer().optimizer, LayerAdam)


def test_cosine_ends_at_zero():
    trained = trainer()
    trained.fit(DATA)
    assert trained.optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    "options",
    [
        {"micro_batch_size": 8},
        {"pad": True},
        {"sampling": "fixed_size"},
        {"sampling": "full_batch", "steps": 5},
        {"noise": "per_layer", "accountant": "rdp"},
    ],
    ids=str,
)
def test_options_of_the_engine(options):
    result = trainer(**options).fit(DATA, VALIDATION)
    assert result.epsilon <= 3.0
    assert result.stopped == "finished"
    assert 0 < result.history[0]["accuracy"] < 1


def test_micro_batches_and_padding_change_nothing():
    plain = trainer(insecure_seed=1)
    plain.fit(DATA)
    parts = trainer(insecure_seed=1, micro_batch_size=8)
    result = parts.fit(DATA)
    for one, other in zip(weights(plain), weights(parts), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    assert result.history[0]["accuracy"] == pytest.approx(plain.history[0]["accuracy"])
    assert result.history[0]["loss"] == pytest.approx(plain.history[0]["loss"], rel=1e-4)


def test_stops_at_the_budget():
    trained = trainer(noise_multiplier=1.5, target_epsilon=1.5, steps=500)
    result = trained.fit(DATA, VALIDATION)
    assert result.stopped == "budget"
    assert 0 < result.steps < 500
    assert result.epsilon <= 1.5
    more = [(trained.engine.plan.mechanism, result.steps + 1)]
    assert epsilon(more, result.delta) > 1.5
    assert result.history[-1]["step"] == result.steps


def test_a_second_fit_has_only_what_is_left():
    trained = trainer()
    trained.fit(DATA)
    noise = trained.engine.plan.noise_multiplier
    result = trained.fit(DATA)
    assert trained.engine.ledger.releases == 2 * STEPS
    assert result.epsilon <= 3.0
    assert trained.engine.plan.noise_multiplier > 10 * noise


def test_fixed_noise_has_no_budget():
    result = trainer(noise_multiplier=1.0).fit(DATA)
    assert result.stopped == "finished"
    assert result.epsilon > 3.0


class Recorder(Callback):
    def __init__(self):
        self.calls = []

    def on_fit_start(self, trainer):
        self.calls.append(("start", trainer.step))

    def on_step_end(self, trainer):
        self.calls.append(("step", trainer.step, trainer.epoch))
        assert trainer.engine.ledger.releases == trainer.step
        assert trainer.metrics["loss"] > 0

    def on_epoch_end(self, trainer):
        self.calls.append(("epoch", trainer.epoch, trainer.history[-1]["step"]))

    def on_fit_end(self, trainer):
        self.calls.append(("end", trainer.stopped))


def test_callbacks_in_order():
    recorder = Recorder()
    trainer(steps=7, callbacks=[recorder, Callback()]).fit(DATA)
    assert recorder.calls == [
        ("start", 0),
        *[("step", step, 1) for step in range(1, 6)],
        ("epoch", 1, 5),
        ("step", 6, 2),
        ("step", 7, 2),
        ("epoch", 2, 7),
        ("end", "finished"),
    ]


def test_evaluate_and_predict_with_both_kinds_of_weights():
    trained = trainer()
    trained.fit(DATA)
    last = trained.evaluate(VALIDATION, averaged=False)
    averaged = trained.evaluate(VALIDATION)
    assert last != averaged
    before = weights(trained)
    outputs = trained.predict(VALIDATION[0], averaged=True)
    parts = trained.predict(DataLoader(Rows(VALIDATION), batch_size=7))
    assert torch.allclose(outputs, parts, atol=1e-6)
    accuracy = (outputs.argmax(1) == VALIDATION[1]).float().mean().item()
    assert averaged["accuracy"] == pytest.approx(accuracy)
    losses_now = trained.criterion(trained.predict(VALIDATION[0], averaged=False), VALIDATION[1])
    assert last["loss"] == pytest.approx(losses_now.item(), rel=1e-5)
    assert same(before, weights(trained))


def test_accuracy_of_binary_and_several_labels():
    logits = torch.tensor([0.3, -0.2, 0.1])
    assert correct(logits, torch.tensor([1, 1, 0])).tolist() == [1, 0, 0]
    assert correct(logits[:, None], torch.tensor([1, -1, 1])).tolist() == [1, 1, 1]
    several = torch.tensor([[0.3, -0.2], [0.1, 0.1]])
    assert correct(several, torch.tensor([[1, 1], [1, 1]])).tolist() == [0.5, 1]


def test_regression_has_no_accuracy():
    net = torch.nn.Sequential(lip.BoundedInput(1.0), lip.SpectralLinear(6, 1))
    data = (DATA[0], torch.rand(100, 1))
    trained = trainer(model=net, criterion=losses.Huber(delta=1.0))
    result = trained.fit(data, data)
    assert set(result.metrics) == {"loss"}
    assert "accuracy" not in result.history[0]


def test_quiet_when_not_a_terminal(capfd, tmp_path):
    trainer(tmp_path).fit(DATA, VALIDATION)
    output = capfd.readouterr()
    assert (output.out, output.err) == ("", "")


def test_bar_on_demand(capfd):
    trainer(progress=True).fit(DATA)
    text = capfd.readouterr().err
    assert "24/24" in text
    assert "epsilon" in text


def test_the_gauge_is_a_bound_and_asks_seldom():
    seen, asked = [], []

    class Look(Callback):
        def on_fit_start(self, trainer):
            ask = trainer.engine.get_epsilon
            trainer.engine.get_epsilon = lambda *a, **k: asked.append(k) or ask(*a, **k)
            self.gauge = EpsilonGauge(trainer.engine, steps=trainer.steps)
            self.gauge._may_ask = lambda: True

        def on_step_end(self, trainer):
            now = epsilon(trainer.engine.ledger.history(), trainer.engine.plan.delta)
            seen.append((now, self.gauge.at(trainer.step)))

    trainer(steps=40, callbacks=[Look()]).fit(DATA)
    assert all(now <= shown <= 3.0 for now, shown in seen)
    assert len({shown for _, shown in seen}) > 8
    assert len(asked) < 30


def test_metrics_file(tmp_path):
    trained = trainer(tmp_path)
    result = trained.fit(DATA, VALIDATION)
    header, *lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert header["kind"] == "header"
    assert "not covered by the guarantee" in header["note"]
    assert [line["step"] for line in lines if line["kind"] == "step"] == [10, 20]
    epochs = [line for line in lines if line["kind"] == "epoch"]
    assert [{k: v for k, v in line.items() if k != "kind"} for line in epochs] == [*result.history]


def test_tensorboard_is_asked_for_by_name(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"clipless\[tensorboard\]"):
        TensorBoardWriter(tmp_path)


def test_tensorboard_gets_the_numbers(monkeypatch, tmp_path):
    points = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            points.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            points.append((name, step))

        def close(self):
            points.append("closed")

    module = type(sys)("tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    trainer(tmp_path, steps=10, callbacks=[TensorBoardWriter()]).fit(DATA)
    assert points[0] == (str(tmp_path / "tensorboard"), 1)
    assert ("training/loss", 10) in points
    assert ("epoch/accuracy", 5) in points
    assert points[-1] == "closed"


def test_control_c_ends_after_the_step():
    recorder = Recorder()

    class Press(Callback):
        def on_step_end(self, trainer):
            if trainer.step == 3:
                signal.raise_signal(signal.SIGINT)

    trained = trainer(callbacks=[Press(), recorder])
    with pytest.raises(KeyboardInterrupt):
        trained.fit(DATA)
    assert trained.step == trained.engine.ledger.releases == 3
    assert recorder.calls[-1] == ("end", "interrupted")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_only_an_insecure_seed_makes_runs_equal_and_they_are_not_private():
    runs = []
    for seed in (5, 5, None, None):
        torch.manual_seed(7)
        trained = trainer(insecure_seed=seed)
        result = trained.fit(examples(100))
        runs.append(weights(trained))
        assert (result.epsilon == math.inf) == (seed is not None)
        assert ("not private" in str(result)) == (seed is not None)
        assert ("not private" in str(trained.report())) == (seed is not None)
        assert trained.engine.ledger.releases == STEPS  # which is counted all the same
    assert same(runs[0], runs[1])
    assert not same(runs[2], runs[3])


def test_product_clipping_is_one_option():
    plain, clipped = trainer(), trainer(bounds=ProvedBounds(product_clip=0.2))
    for each in (plain, clipped):
        each.fit(DATA)
    for before, after in zip(
        plain.engine.plan.parameters, clipped.engine.plan.parameters, strict=True
    ):
        factor = 1.0 if before.name.endswith("bias") else 0.2
        assert after.gradient_bound == pytest.approx(factor * before.gradient_bound)
