"""The Hugging Face trainer: what is released is what a plain private loop releases."""

import itertools
import math
import types

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import DataCollatorWithPadding, TrainerCallback

from clipless import losses
from clipless.errors import PrivacyError
from clipless.integrations import CliplessTrainer, TensorModel
from clipless.ledger import Ledger
from clipless.privacy import BatchOptions, PrivacyOptions
from tests.integrations.hugging_face_runs import (
    STEPS,
    Named,
    Rows,
    arguments,
    plain_loop,
    trainer,
)
from tests.integrations.lightning_runs import BATCH, SIZE, same, weights


def accuracy(found):
    assert found.predictions.shape == (SIZE, 2)
    return {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())}


# --- the same releases as a plain loop -----------------------------------------------------------


@pytest.mark.parametrize("count", [1, 4])
def test_the_weights_of_a_plain_private_loop(tmp_path, count):
    model = Named(alone=count == 4)
    made = trainer(
        tmp_path, model, per_device_train_batch_size=BATCH // count,
        gradient_accumulation_steps=count,
    )  # fmt: skip
    done = made.train()
    assert done.global_step == made.engine.ledger.releases == made.engine.plan.steps == STEPS
    assert made.engine.plan.sampling.rate == BATCH / SIZE
    assert same(weights(model), plain_loop(micro_batch_size=None if count == 1 else BATCH // 4))
    assert Ledger(tmp_path / "clipless-ledger.jsonl").releases == STEPS


def test_evaluation_changes_nothing_and_epsilon_is_logged(tmp_path):
    made = trainer(
        tmp_path, privacy={"target_epsilon": 2.0}, eval_strategy="steps", eval_steps=5,
        extra={"eval_dataset": Rows(), "compute_metrics": accuracy},
    )  # fmt: skip
    made.train()
    logged = [line["epsilon"] for line in made.state.log_history if "loss" in line]
    assert len(logged) == 3
    assert 0 < logged[0] <= logged[-1] <= 2.0
    assert made.engine.ledger.releases == STEPS
    assert 1.5 < made.engine.get_epsilon() <= 2.0
    assert {"eval_loss", "eval_accuracy"} <= made.evaluate().keys()
    made.save_model(tmp_path / "public")
    assert not list((tmp_path / "public").glob("clipless*"))
    assert made.engine.ledger.releases == STEPS


def test_a_gradient_norm_is_not_logged(tmp_path):
    made = trainer(tmp_path)
    made.train()
    assert not any("grad_norm" in line for line in made.state.log_history)


def test_training_ends_with_the_budget(tmp_path):
    privacy = {"target_epsilon": 1.0, "noise_multiplier": 1.5}
    made = trainer(tmp_path, privacy=privacy, num_train_epochs=100)
    done, engine = made.train(), made.engine
    assert 0 < done.global_step == engine.ledger.releases < 600
    assert engine.get_epsilon() <= 1.0 < engine.get_epsilon(further_steps=1)


def test_a_second_training_is_counted_with_the_first(tmp_path):
    trainer(tmp_path, num_train_epochs=1).train()
    made = trainer(tmp_path, num_train_epochs=1)
    made.train()
    assert made.engine.ledger.releases == STEPS
    assert made.engine.get_epsilon() == math.inf  # of seeds that were chosen


# --- checkpoints ---------------------------------------------------------------------------------


class StopAfter(TrainerCallback):
    def on_step_end(self, args, state, control, **given):
        if state.global_step == 8:
            raise RuntimeError("killed")


@pytest.mark.parametrize("count", [1, 2])
def test_a_resumed_run_repeats_what_it_has_paid_for(tmp_path, count):
    settings = {
        "save_strategy": "steps", "save_steps": 5, "gradient_accumulation_steps": count,
        "per_device_train_batch_size": BATCH // count,
    }  # fmt: skip
    killed = Named()
    with pytest.raises(RuntimeError, match="killed"):
        trainer(tmp_path, killed, extra={"callbacks": [StopAfter()]}, **settings).train()
    model = Named(seed=1)
    made = trainer(tmp_path, model, **settings)
    done = made.train(resume_from_checkpoint=True)
    assert done.global_step == made.engine.ledger.releases == STEPS


def test_the_repeated_steps_are_those_of_the_whole_run(tmp_path):
    model = Named()
    trainer(tmp_path, model, save_strategy="steps", save_steps=5).train()
    repeated = Named(seed=1)
    again = trainer(tmp_path, repeated)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert same(weights(model), weights(repeated))
    assert again.engine.ledger.releases == STEPS


def test_a_checkpoint_without_a_run_or_without_its_ledger(tmp_path):
    made = trainer(tmp_path, save_strategy="steps", save_steps=5)
    made.train()
    place = tmp_path / "checkpoint-5"
    ledger = tmp_path / "clipless-ledger.jsonl"
    ledger.rename(tmp_path / "kept.jsonl")
    with pytest.raises(PrivacyError, match=r"its ledger at .* which is not there"):
        trainer(tmp_path).train(resume_from_checkpoint=str(place))
    (tmp_path / "kept.jsonl").rename(ledger)
    (place / "clipless.json").unlink()
    with pytest.raises(PrivacyError, match="holds no state of a private run"):
        trainer(tmp_path).train(resume_from_checkpoint=str(place))
    assert Ledger(ledger).releases == STEPS


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_grad_norm": 1.0}, "Set max_grad_norm=0"),
        ({"bf16": True}, r"PrivacyOptions\(precision='bfloat16'\)"),
        ({"gradient_checkpointing": True}, "runs layers a second time"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        ({"torch_compile": True}, r"PrivacyOptions\(compile=True\)"),
        ({"auto_find_batch_size": True}, "parts of constant size"),
        ({"label_smoothing_factor": 0.1}, "criterion="),
        ({"train_sampling_strategy": "group_by_length"}, "drawn by chance alone"),
        ({"hub_strategy": "checkpoint", "push_to_hub": True}, "state of the noise"),
    ],
)
def test_arguments_that_would_void_the_proof(tmp_path, settings, words):
    with pytest.raises(PrivacyError, match=words):
        trainer(tmp_path, **settings)


def test_the_usual_clipping_is_explained():
    """The default of `max_grad_norm` is 1."""
    with pytest.raises(PrivacyError, match=r"max_grad_norm=1 \(1 by default\).*whole batch"):
        CliplessTrainer(
            Named(), arguments("unused", max_grad_norm=1.0), criterion=losses.CrossEntropy(),
            privacy={"target_epsilon": 1.0},
        )  # fmt: skip


def test_a_loss_of_ones_own_and_a_collator_that_mixes_examples(tmp_path):
    with pytest.raises(PrivacyError, match="criterion="):
        trainer(tmp_path, extra={"compute_loss_func": lambda *_: None})
    collator = DataCollatorWithPadding(types.SimpleNamespace())
    with pytest.raises(PrivacyError, match="how long the others are"):
        trainer(tmp_path, extra={"data_collator": collator})


class Stream(IterableDataset):
    def __iter__(self):
        return itertools.repeat(Rows()[0])


class OwnLoader(CliplessTrainer):
    def get_train_dataloader(self):
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=BATCH)


class OwnLoss(CliplessTrainer):
    def compute_loss(self, model, inputs, *further, **named):
        logits = model(inputs["features"])["logits"]
        return torch.nn.functional.cross_entropy(logits, inputs["labels"])


class AddedLoss(CliplessTrainer):
    def compute_loss(self, model, inputs, *further, **named):
        penalty = sum(weight.square().sum() for weight in model.parameters())
        return super().compute_loss(model, inputs) + penalty


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (OwnLoader, "sampler of private training is its own"),
        (OwnLoss, "outside the model|did not come through|without a batch"),
        (AddedLoss, "did not come through the private criterion"),
    ],
)
def test_overridden_methods_release_nothing(tmp_path, kind, words):
    model = Named()
    before = weights(model)
    made = kind(
        model, arguments(tmp_path), criterion=losses.CrossEntropy(), train_dataset=Rows(),
        privacy={"noise_multiplier": 1.0},
    )  # fmt: skip
    with pytest.raises(PrivacyError, match=words):
        made.train()
    assert same(before, weights(model))
    assert made._run is None or made.engine.ledger.releases == 0


def test_streams_trials_and_two_places_for_micro_batches(tmp_path):
    with pytest.raises(PrivacyError, match="is a stream"):
        trainer(tmp_path, max_steps=3, extra={"train_dataset": Stream()}).train()
    with pytest.raises(PrivacyError, match=r"clipless\.sweeps"):
        trainer(tmp_path).train(trial={"learning_rate": 0.1})
    with pytest.raises(PrivacyError, match="nothing is private yet"):
        _ = trainer(tmp_path).engine
    options = PrivacyOptions(batches=BatchOptions(micro_batch_size=5))
    privacy = {"noise_multiplier": 1.0, "options": options}
    with pytest.raises(PrivacyError, match="give one of them"):
        trainer(tmp_path, privacy=privacy, gradient_accumulation_steps=2).train()


def test_a_model_of_many_inputs():
    class Sum(torch.nn.Module):
        def forward(self, **named):
            return (sum(named.values()), "more")

    names = ["a", "b", "c", "d"]
    assert TensorModel(Sum(), inputs=names)(*torch.ones(4, 1)).item() == 4
    with pytest.raises(PrivacyError, match="called with 5 tensors"):
        TensorModel(Sum(), inputs=[*names, "e"])
