"""Tries an installed wheel with one extra, as its user would: python smoke.py EXTRA.

Runs in a fresh environment and an empty folder, without this repository on the path.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


def core() -> None:
    """Prove bounds, train, and write a report, without any extra; hints name the extras."""
    import torch

    import clipless
    from clipless import losses
    from clipless import nn as lip
    from clipless.report import write_report
    from clipless.training import Trainer

    assert "site-packages" in clipless.__file__, clipless.__file__
    model = torch.nn.Sequential(lip.BoundedInput(2.0), lip.SpectralLinear(8, 2))
    criterion = losses.CrossEntropy(tau=10.0)
    report = clipless.sensitivity(model, loss=criterion, input_shape=(8,))
    assert report.lipschitz <= 1
    x = torch.randn(300, 8)
    trainer = Trainer(model, criterion, target_epsilon=3.0, batch_size=60, steps=10, run_dir="run")
    result = trainer.fit((x, (x[:, 0] > 0).long()))
    assert 0 < result.epsilon <= 3.0
    assert write_report("run").sound
    assert "clipless" in Path("run/report.html").read_text(encoding="utf-8")


def bare() -> None:
    """What is missing in the core alone is said by the name of the extra that brings it."""
    core()
    for code, extra in (
        ("import clipless.sklearn", "sklearn"),
        ("from clipless.plots import new_figure; new_figure()", "plots"),
        ("from clipless.cli import main; main()", "cli"),
    ):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode != 0, code
        assert f"clipless[{extra}]" in done.stderr, f"{code}: {done.stderr}"


def cli() -> None:
    """The command starts, and computes."""
    command = [Path(sys.executable).parent / "clipless"]
    subprocess.run([*command, "--version"], check=True)
    flags = [
        "--epsilon",
        "3",
        "--examples",
        "1000",
        "--batch-size",
        "100",
        "--steps",
        "10",
        "--json",
    ]
    subprocess.run([*command, "budget", *flags], check=True)


def sklearn() -> None:
    """An estimator is fitted."""
    from sklearn.datasets import load_breast_cancer

    from clipless.sklearn import CliplessClassifier

    features, labels = load_breast_cancer(return_X_y=True)
    fitted = CliplessClassifier(epsilon=3.0, classes=[0, 1]).fit(features, labels)
    assert fitted.privacy_.epsilon <= 3.0


def data() -> None:
    """A table is read."""
    from clipless.data import read_table

    Path("people.csv").write_text("age,income\n30,low\n40,high\n", encoding="utf-8")
    features, target = read_table("people.csv", target="income")
    assert len(features) == len(target) == 2


def plots() -> None:
    """A figure is drawn."""
    from clipless.plots import bounds_figure

    bounds_figure({"weight": 1.0}).savefig("bounds.png")


def tensorboard() -> None:
    """Events are written."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter("events") as writer:
        writer.add_scalar("loss", 1.0)
    assert list(Path("events").iterdir())


def onnx() -> None:
    """A model is exported."""
    import torch

    from clipless import nn as lip
    from clipless import to_torch

    model = to_torch(torch.nn.Sequential(lip.BoundedInput(2.0), lip.SpectralLinear(8, 2)))
    torch.onnx.export(model, (torch.randn(2, 8),), "model.onnx", dynamo=True)


def sweeps() -> None:
    """A sweep of three trials is run."""
    from clipless.sweeps import Outcome, Sweep, run_sweep

    sweep = Sweep.from_dict({
        "sweep": {"trials": 3, "sampler": "random"},
        "space": {"training.learning_rate": {"low": 0.01, "high": 1.0}},
    })  # fmt: skip

    def train(settings: dict[str, dict[str, float]], folder: Path, report: object) -> Outcome:
        return Outcome(value=settings["training"]["learning_rate"], epsilon=1.0, delta=1e-5)

    assert len(run_sweep(sweep, "sweep", train=train).trials) == 3


def postgresql() -> None:
    """The driver is there."""
    import psycopg

    assert psycopg.__version__


def lightning() -> None:
    """A Lightning module is trained privately."""
    import lightning as pl
    import torch

    from clipless import losses
    from clipless import nn as lip
    from clipless.integrations import CliplessCallback

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Sequential(lip.BoundedInput(2.0), lip.SpectralLinear(8, 2))
            self.criterion = losses.CrossEntropy(tau=10.0)

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            x, y = batch
            return self.criterion(self.model(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    x = torch.randn(300, 8)
    rows = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
    callback = CliplessCallback(target_epsilon=3.0)
    pl.Trainer(
        max_epochs=1, callbacks=[callback], accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(Classifier(), torch.utils.data.DataLoader(rows, batch_size=60))  # fmt: skip
    assert callback.run.engine.get_epsilon() <= 3.0


def transformers(adapters: bool = False) -> None:
    """A model of the Hugging Face library is trained privately by its trainer."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

    from clipless import losses
    from clipless.integrations import CliplessTrainer
    from clipless.privacy import EnforcedBounds

    model = BertForSequenceClassification(BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=8, num_labels=2,
    ))  # fmt: skip
    if adapters:
        import peft

        settings = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
        model = peft.get_peft_model(model, settings)
    ids = torch.randint(0, 30, (200, 8))
    trainer = CliplessTrainer(
        model,
        TrainingArguments(
            "trained", max_steps=2, per_device_train_batch_size=20, max_grad_norm=0, use_cpu=True,
            report_to="none", disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": int(row[0] > 15)} for row in ids],
        criterion=losses.CrossEntropy(),
        privacy={"target_epsilon": 3.0, "bounds": EnforcedBounds(thresholds=0.5)},
    )  # fmt: skip
    trainer.train()
    assert trainer.engine.get_epsilon() <= 3.0


def peft() -> None:
    """An adapter is trained privately, on a model that stays as it is."""
    transformers(adapters=True)


def flower() -> None:
    """Flower's client app is made of a client of ours; rounds need Flower's own server."""
    import torch
    from flwr.clientapp import ClientApp

    from clipless.federated import FederatedClient, FederatedServer, FederatedTerms
    from clipless.integrations import flower_client_app, train_with_flower

    terms = FederatedTerms(clients=1, rounds=1, bound=1.0, noise_multiplier=1.0, noise="shares")
    client = FederatedClient(torch.nn.Linear(2, 1), lambda model, number: None, terms)
    assert isinstance(flower_client_app(lambda context: client), ClientApp)
    server = FederatedServer(torch.nn.Linear(2, 1), terms)
    assert train_with_flower(server, grid=None, rounds=0) == []
    task = server.begin_round()
    (name,) = server.chosen([1])
    assert server.finish_round({name: client.answer(task)}).summed == (1,)


def everything() -> None:
    """What most people install: all of it together, and the doctor is content."""
    core()
    for each in (cli, sklearn, data, plots, sweeps, tensorboard):
        each()
    subprocess.run([Path(sys.executable).parent / "clipless", "doctor"], check=True)


TESTS: dict[str, Callable[[], None]] = {
    "core": bare, "cli": cli, "sklearn": sklearn, "data": data, "plots": plots,
    "tensorboard": tensorboard, "onnx": onnx, "demo": sklearn, "sweeps": sweeps,
    "postgresql": postgresql, "lightning": lightning, "transformers": transformers, "peft": peft,
    "flower": flower, "all": everything,
}  # fmt: skip
"""What is tried of each extra that users install."""

if __name__ == "__main__":
    TESTS[sys.argv[1]]()
    print(f"{sys.argv[1]}: works")
