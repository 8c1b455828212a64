"""One small run with everything a report can show, made once and copied for every test."""

import json
import shutil

import pytest
import torch

from clipless import losses
from clipless.audit import (
    TightnessCallback,
    attack_bounds,
    class_labels,
    membership_inference,
    one_run_audit,
)
from clipless.privacy import FullBatch, Ledger, Mechanism, Relation
from clipless.report import BoundsCallback, SignalCallback
from clipless.robustness import AttackOptions, attack_certificates, certified_accuracy
from tests.training.small import DATA, VALIDATION, model, trainer

STATISTICS = {"column means": 30.0, "column <norms>": 50.0}


def train(folder, *, callbacks=True, statistics=True, **options):
    """A run of 24 steps in 5 epochs, in which two statistics were taken before training."""
    folder.mkdir(parents=True, exist_ok=True)
    if statistics:
        ledger = folder / "ledger.jsonl"
        with Ledger(ledger, dataset_size=100, relation=Relation.ZERO_OUT) as book:
            for label, multiplier in STATISTICS.items():
                whole = FullBatch(dataset_size=100)
                book.record(Mechanism(noise_multiplier=multiplier, sampling=whole), label=label)
    watchers = [SignalCallback(), BoundsCallback(), TightnessCallback(DATA, examples=16)]
    trained = trainer(folder, callbacks=watchers if callbacks else (), **options)
    trained.fit(DATA, VALIDATION)
    return trained


def add_evidence(folder, trained):
    """What the commands certify, audit and train add to a folder."""
    own = trained.model
    certified = certified_accuracy(own, *VALIDATION, curve_points=30)
    broken = attack_certificates(
        own, VALIDATION[0][:5], attack=AttackOptions(restarts=1, steps=3, ladder=())
    )
    members = membership_inference(own, DATA, VALIDATION, loss=trained.criterion)
    generator = torch.Generator().manual_seed(0)
    coins = torch.rand(40, generator=generator) < 0.5
    found = one_run_audit(
        torch.randn(40, generator=generator), coins, delta=1e-4, claimed_epsilon=3.0
    )
    bounds = attack_bounds(
        model(), loss=losses.CrossEntropy(tau=4.0), input_shape=(6,), targets=class_labels(3),
        restarts=1, steps=3,
    )  # fmt: skip
    write(folder, "robustness.json", {"certified": certified.to_dict(), "attack": broken.to_dict()})
    write(
        folder,
        "audit.json",
        {
            "membership": members.to_dict(),
            "one_run": found.to_dict(),
            "bounds": {"found": bounds.found, "bounds": bounds.bounds},
        },
    )
    write(folder, "config.json", {"data": {"name": "small"}, "training": {"steps": 24}})
    write(folder, "environment.json", {"python": "3.11", "torch": torch.__version__})


def write(folder, name, data):
    (folder / name).write_text(json.dumps(data))


@pytest.fixture(scope="session")
def _full_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "full"
    torch.manual_seed(0)
    trained = train(folder)
    add_evidence(folder, trained)
    return folder, trained.engine.get_epsilon()


@pytest.fixture(scope="session")
def _bare_run(tmp_path_factory):
    """What the trainer alone leaves behind."""
    folder = tmp_path_factory.mktemp("runs") / "bare"
    train(folder, callbacks=False, statistics=False)
    return folder


@pytest.fixture
def full(_full_run, tmp_path):
    """A folder with everything, and the epsilon that training ended with."""
    return shutil.copytree(_full_run[0], tmp_path / "full"), _full_run[1]


@pytest.fixture
def run(full):
    return full[0]


@pytest.fixture
def bare(_bare_run, tmp_path):
    return shutil.copytree(_bare_run, tmp_path / "bare")
