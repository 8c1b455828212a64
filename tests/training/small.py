"""Small runs of the trainer that several test files use."""

import dataclasses
import inspect

import torch

from clipless import losses
from clipless.ledger import read_ledger
from clipless.training import Callback, Trainer, TrainingOptions
from tests.privacy.runs import examples, mlp, privacy_options

DATA = examples(100)
VALIDATION = examples(50, seed=1)
STEPS = 24


def model():
    torch.manual_seed(0)
    return mlp()


def trainer(run_dir=None, **options):
    given = {"target_epsilon": 3.0, "batch_size": 20, "steps": STEPS} | options
    if given.get("noise_multiplier") is not None and "target_epsilon" not in options:
        del given["target_epsilon"]
    criterion = given.pop("criterion", losses.CrossEntropy(tau=4.0))
    return make_trainer(given.pop("model", None) or model(), criterion, run_dir=run_dir, **given)


def make_trainer(model, criterion, *, kind=Trainer, **given):
    """A trainer from flat keywords, each of which goes into the record that it belongs to."""
    own = inspect.signature(Trainer).parameters
    names = {field.name for field in dataclasses.fields(TrainingOptions)}
    training = {name: given.pop(name) for name in names & given.keys()}
    privacy = {name: given.pop(name) for name in given.keys() - own.keys()}
    return kind(
        model, criterion, **given, options=privacy_options(**privacy),
        training=TrainingOptions(**training),
    )  # fmt: skip


def weights(trained):
    return [parameter.detach().clone() for parameter in trained.model.parameters()]


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def counted(run_dir):
    """How many releases the ledger of a run counts."""
    path = run_dir / "ledger.jsonl"
    if not path.exists() or not path.read_text():
        return 0
    return sum(read_ledger(path).counts().values())


class Look(Callback):
    """Remembers the weights after every step; a step that is taken again must end at the same."""

    def __init__(self, seen=None):
        self.seen = {} if seen is None else seen

    def on_step_end(self, trainer):
        now = weights(trainer)
        assert same(now, self.seen.setdefault(trainer.step, now)), "a step came out in two ways"


class StopAt(Callback):
    """Raises an error at a step, as a crash would."""

    def __init__(self, step, error=RuntimeError):
        self.step, self.error = step, error

    def on_step_end(self, trainer):
        if trainer.step == self.step:
            raise self.error("stop")
