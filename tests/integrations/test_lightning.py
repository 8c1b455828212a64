"""Lightning: what is released is what a plain private loop releases, and nothing else is."""

import subprocess
import sys

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, WeightedRandomSampler

from clipless import losses
from clipless.errors import PrivacyError
from clipless.integrations import CliplessCallback
from clipless.ledger import Ledger
from clipless.privacy import BatchOptions, EnforcedBounds, PrivacyOptions
from tests.integrations.lightning_runs import (
    BATCH,
    SIZE,
    Classifier,
    callback,
    data,
    loader,
    plain_loop,
    same,
    trainer,
    weights,
)


def fit(own, module=None, given=None, **settings):
    module = Classifier() if module is None else module
    made = trainer(own, **settings)
    made.fit(module, loader() if given is None else given)
    return module, made


# --- the same releases as a plain loop -----------------------------------------------------------


def test_the_weights_of_a_plain_private_loop():
    own = callback()
    module, made = fit(own)
    assert same(weights(module), plain_loop(steps=12))
    assert own.run.engine.ledger.releases == made.global_step == 12
    assert own.run.engine.plan.steps == 12


def test_accumulated_batches_are_micro_batches_of_one_sample():
    own = callback()
    module, made = fit(own, given=loader(BATCH // 4), accumulate_grad_batches=4)
    options = PrivacyOptions(batches=BatchOptions(micro_batch_size=BATCH // 4, pad=True))
    assert same(weights(module), plain_loop(steps=12, options=options))
    assert own.run.engine.plan.sampling.rate == BATCH / SIZE
    assert own.run.engine.ledger.releases == made.global_step == 12
    assert made.accumulate_grad_batches == 4  # as the user had it
    assert not vars(made.fit_loop.epoch_loop).keys() & {"_accumulated_batches_reached"}


def test_steps_and_limits_of_the_trainer_are_the_plan():
    own = callback()
    _, made = fit(own, max_epochs=3, max_steps=7, limit_train_batches=4)
    assert own.run.engine.plan.steps == own.run.engine.ledger.releases == made.global_step == 7


def test_a_module_that_is_the_model_itself_and_a_data_module():
    class Own(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            layers = Classifier().network
            self.guard, self.first, self.sort, self.second = layers
            self.loss = losses.CrossEntropy(tau=4.0)

        def forward(self, x):
            return self.second(self.sort(self.first(self.guard(x))))

        def training_step(self, batch, batch_idx):
            return {"loss": self.loss(self(batch[0]), batch[1]), "more": 1}

        configure_optimizers = Classifier.configure_optimizers

    class Data(lightning.LightningDataModule):
        def train_dataloader(self):
            return loader()

    own, module = callback(), Own()
    trainer(own).fit(module, datamodule=Data())
    expected = list(plain_loop(steps=12).values())
    assert all(a.equal(b) for a, b in zip(weights(module).values(), expected, strict=True))


def test_validation_changes_nothing_and_epsilon_is_logged():
    own = callback(insecure_seed=None, noise_multiplier=None, target_epsilon=2.0)
    module, made = Classifier(), trainer(own)
    made.fit(module, loader(), loader())
    assert 0 < made.progress_bar_metrics["epsilon"] <= 2.0
    assert made.callback_metrics["epsilon"] == made.progress_bar_metrics["epsilon"]
    assert 0 <= made.callback_metrics["accuracy"] <= 1
    assert own.run.engine.ledger.releases == 12  # the noise was found for that many steps
    assert 1.5 < own.run.engine.get_epsilon() <= 2.0


def test_any_network_with_enforced_bounds():
    """Arguments of `make_private` are passed through, and the options as well."""
    found = []
    for given in (
        {"bounds": EnforcedBounds(thresholds=0.3)},
        {"options": PrivacyOptions(bounds=EnforcedBounds(thresholds=0.3))},
    ):
        torch.manual_seed(0)
        module = Classifier()
        module.network = nn.Sequential(
            nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2)
        )  # fmt: skip
        begun, own = weights(module), callback(**given)
        fit(own, module)
        assert own.run.engine.ledger.releases == 12
        assert not any(begun[name].equal(weight) for name, weight in weights(module).items())
        found.append(weights(module))
    assert same(*found)


def test_afterwards_everything_is_ordinary():
    own = callback()
    module, made = fit(own, max_epochs=1)
    x, y = data()[:8]
    nn.functional.cross_entropy(module(x), y).backward()
    assert all(p.grad is not None for p in module.parameters())
    assert isinstance(made.fit_loop._data_source.instance, DataLoader)
    assert module.criterion(module(x), y).ndim == 0


def test_a_second_fit_is_counted_with_the_first():
    own = callback()
    module, _ = fit(own, max_epochs=1)
    fit(own, module, max_epochs=1)
    assert own.run.engine.ledger.releases == 12


# --- the end of the budget -----------------------------------------------------------------------


def test_training_ends_with_the_budget():
    own = callback(target_epsilon=1.0, noise_multiplier=1.5, insecure_seed=None)
    _, made = fit(own, max_epochs=100)
    engine = own.run.engine
    assert 0 < engine.ledger.releases < 600
    assert engine.get_epsilon() <= 1.0 < engine.get_epsilon(further_steps=1)
    assert made.global_step == engine.ledger.releases


# --- checkpoints ---------------------------------------------------------------------------------


class StopAfter(Callback):
    def __init__(self, steps):
        self.steps = steps

    def on_train_batch_end(self, trainer, *arguments):
        if trainer.global_step == self.steps:
            raise KeyboardInterrupt


@pytest.mark.parametrize("count", [1, 2])
def test_an_interrupted_run_repeats_for_free_what_it_has_paid_for(tmp_path, count):
    """A run is interrupted two steps after its last checkpoint."""
    given = {"accumulate_grad_batches": count, "enable_checkpointing": True}
    ledger = tmp_path / "ledger.jsonl"
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    cut = trainer(callback(ledger=ledger), callbacks=[saves, StopAfter(5)], **given)
    with pytest.raises(SystemExit):
        cut.fit(Classifier(), loader(BATCH // count))
    assert Ledger(ledger).releases == 5

    module, own = Classifier(seed=1), callback()  # the ledger is found by the checkpoint
    on = trainer(own, callbacks=[ModelCheckpoint(tmp_path / "on")], **given)
    on.fit(module, loader(BATCH // count), ckpt_path=tmp_path / "step=3.ckpt", weights_only=True)
    assert on.global_step == 12
    assert own.run.engine.ledger.releases == 12
    assert own.run.engine.ledger.path == str(ledger)


def test_the_repeated_steps_are_those_of_the_whole_run(tmp_path):
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    own = callback(ledger=tmp_path / "ledger.jsonl")
    module, _ = fit(own, callbacks=[saves], enable_checkpointing=True)
    repeated, again = Classifier(seed=1), callback()
    on = trainer(again, callbacks=[ModelCheckpoint(tmp_path / "on")], enable_checkpointing=True)
    on.fit(repeated, loader(), ckpt_path=tmp_path / "step=3.ckpt", weights_only=True)
    assert same(weights(module), weights(repeated))
    assert again.run.engine.ledger.releases == 12  # nothing is paid for twice


def test_a_checkpoint_without_its_ledger_or_without_a_run(tmp_path):
    saves = ModelCheckpoint(tmp_path, filename="saved")
    ledger = tmp_path / "ledger.jsonl"
    fit(callback(ledger=ledger), max_epochs=1, callbacks=[saves], enable_checkpointing=True)
    ledger.rename(tmp_path / "elsewhere.jsonl")
    on = trainer(callback())
    with pytest.raises(PrivacyError, match=r"ledger.*is not there.*Give ledger="):
        on.fit(Classifier(), loader(), ckpt_path=tmp_path / "saved.ckpt", weights_only=True)

    plain = trainer(None, max_epochs=1)
    plain.fit(Classifier(), loader())
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(PrivacyError, match="holds no state of a private run"):
        trainer(callback()).fit(
            Classifier(), loader(), ckpt_path=tmp_path / "plain.ckpt", weights_only=True
        )


def test_the_ledger_is_beside_the_logs(tmp_path):
    logger = lightning.pytorch.loggers.CSVLogger(tmp_path)
    own = callback()
    fit(own, max_epochs=1, logger=logger, log_every_n_steps=1)
    assert Ledger(tmp_path / "lightning_logs/version_0/clipless-ledger.jsonl").releases == 6
    assert "epsilon" in (tmp_path / "lightning_logs/version_0/metrics.csv").read_text()


# --- refusals ------------------------------------------------------------------------------------


class Manual(Classifier):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class TwoOptimizers(Classifier):
    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in self.network[1::2]]


class NoLoss(Classifier):
    def __init__(self):
        super().__init__()
        self.criterion = nn.CrossEntropyLoss()


class BatchNorm(Classifier):
    def __init__(self):
        super().__init__()
        self.network.append(nn.BatchNorm1d(2))


class SecondLoss(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + self.network[1].weight.square().sum()


class OutputLoss(Classifier):
    def training_step(self, batch, batch_idx):
        output = self(batch[0])
        return self.criterion(output, batch[1]) + output.mean()


class Norms(Classifier):
    def on_before_optimizer_step(self, optimizer):
        self.log_dict(lightning.pytorch.utilities.grad_norm(self, norm_type=2))


class Clips(Classifier):
    def configure_gradient_clipping(self, optimizer, *arguments, **named):
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)


class OldBatch(Classifier):
    def on_train_batch_start(self, batch, batch_idx):
        self.first = getattr(self, "first", batch)

    def training_step(self, batch, batch_idx):
        return super().training_step(self.first, batch_idx)


class HalfBatch(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step([part[::2] for part in batch], batch_idx)


def test_a_second_loss_is_refused():
    """Nothing of it is released: a term on weights alone adds to gradients that nobody made."""
    with pytest.raises(PrivacyError, match="gradient that did not come through"):
        fit(callback(), SecondLoss())


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Manual, "automatic_optimization=False"),
        (TwoOptimizers, "multiple optimizers"),
        (NoLoss, "holds 0 losses of clipless.losses"),
        (BatchNorm, "BatchNorm1d"),
        (OutputLoss, "differentiated by something besides the criterion"),
        (Norms, "clip_grad_norm_, logs of norms"),
        (Clips, "clip_grad_norm_, logs of norms"),
        (OldBatch, "through the criterion before|no new batch"),
        (HalfBatch, "Feed it whole and once"),
    ],
)
def test_a_module_that_would_void_the_proof(module, words):
    own, module = callback(), module()
    before = weights(module)
    with pytest.raises(Exception, match=words):
        fit(own, module)
    if module.__class__ is not OldBatch:
        assert same(before, weights(module))
        assert own.run is None or own.run.engine.ledger.releases == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gradient_clip_val": 1.0}, "gradient_clip_val=1.0 would clip"),
        ({"precision": "bf16-mixed"}, r"PrivacyOptions\(precision='bfloat16'\)"),
        ({"overfit_batches": 2}, "overfit_batches"),
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders"),
        ({"accumulate_grad_batches": 2, "limit_train_batches": 3}, "limit_train_batches"),
        ({"callbacks": [GradientAccumulationScheduler({0: 2})]}, "accumulate_grad_batches"),
    ],
)
def test_a_trainer_that_would_void_the_proof(settings, words):
    with pytest.raises(PrivacyError, match=words):
        fit(callback(), **settings)


def test_a_strategy_that_averages_gradients():
    with pytest.raises(Exception, match="PrivateStrategy"):
        fit(callback(), strategy="ddp_fork")


def test_foreign_samplers_and_data():
    weighted = WeightedRandomSampler(torch.ones(SIZE), SIZE)
    with pytest.raises(PrivacyError, match="WeightedRandomSampler"):
        fit(callback(), given=DataLoader(data(), batch_size=BATCH, sampler=weighted))
    with pytest.raises(PrivacyError, match="one torch DataLoader"):
        fit(callback(), given=[loader(), loader()])


class OtherLoader(Callback):
    def on_train_start(self, trainer, module):
        trainer.fit_loop._combined_loader.flattened = [loader()]


def test_another_callback_that_replaces_the_loader():
    own, other = callback(), OtherLoader()
    made = trainer(None, callbacks=[other, own])
    with pytest.raises(PrivacyError, match="does not read the private loader"):
        made.fit(Classifier(), loader())


def test_no_budget_and_a_length_in_two_places():
    with pytest.raises(ValueError, match="give target_epsilon, or noise_multiplier"):
        CliplessCallback()
    with pytest.raises(ValueError, match="given to the trainer"):
        callback(options=PrivacyOptions(epochs=3))
    with pytest.raises(ValueError, match="no end"):
        fit(callback(target_epsilon=1.0), max_epochs=-1)
    with pytest.raises(TypeError, match="unheard_of"):
        fit(callback(unheard_of=3))


def test_a_package_that_is_not_installed():
    code = (
        "import sys; sys.modules['lightning'] = None; "
        "from clipless.integrations import CliplessCallback"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "CliplessCallback needs lightning: pip install 'clipless[lightning]'" in done.stderr
