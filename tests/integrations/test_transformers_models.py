"""Models of transformers as they are, and with adapters: a tiny BERT made on the spot."""

import peft
import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification

from clipless import PrivacyEngine, losses
from clipless.errors import PrivacyError
from clipless.integrations import CliplessTrainer
from clipless.privacy import EnforcedBounds
from tests.integrations.hugging_face_runs import arguments
from tests.integrations.lightning_runs import BATCH, same, weights

TOKENS, LENGTH, SIZE, STEPS = 30, 6, 120, 6
BOUNDS = EnforcedBounds(thresholds=0.5)


class Tokens(Dataset):
    """Sequences of one length, the last token of each of them padding."""

    def __init__(self):
        self.ids = torch.randint(0, TOKENS, (SIZE, LENGTH), generator=torch.manual_seed(0))
        self.mask = torch.ones_like(self.ids).index_fill(1, torch.tensor([LENGTH - 1]), 0)
        self.labels = (self.ids[:, 0] > TOKENS // 2).long()

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return {
            "input_ids": self.ids[index], "attention_mask": self.mask[index],
            "labels": self.labels[index],
        }  # fmt: skip


def bert(seed=0, *, adapters=False, dropout=0.0):
    torch.manual_seed(seed)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=TOKENS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=32, max_position_embeddings=LENGTH, num_labels=2,
            hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        )
    )  # fmt: skip
    if not adapters:
        return model
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    return peft.get_peft_model(model, lora)


def trainer(folder, model, *, privacy=None, **given):
    settings = {"max_steps": STEPS, "num_train_epochs": 1, "learning_rate": 0.01}
    usual = {"noise_multiplier": 1.0, "insecure_seed": 0, "bounds": BOUNDS}
    return CliplessTrainer(
        model, arguments(folder, **settings | given), criterion=losses.CrossEntropy(),
        privacy=usual if privacy is None else privacy, train_dataset=Tokens(),
        eval_dataset=Tokens(),
    )  # fmt: skip


def plain_loop(model):
    """Train by a loop of one's own; the optimizer and its schedule are the trainer's."""
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    engine, criterion = PrivacyEngine(insecure_seed=0), losses.CrossEntropy()
    model, optimizer, batches = engine.make_private(
        module=model.train(), optimizer=optimizer, criterion=criterion, noise_multiplier=1.0,
        data_loader=DataLoader(Tokens(), batch_size=BATCH), bounds=BOUNDS,
    )  # fmt: skip
    for batch in batches:
        labels = batch.pop("labels")
        criterion(model(**batch).logits, labels).backward()
        optimizer.step()
        scheduler.step()
    engine.detach()


@pytest.mark.parametrize("adapters", [False, True])
def test_the_weights_of_a_plain_private_loop(tmp_path, adapters):
    model, plain = bert(adapters=adapters), bert(adapters=adapters)
    begun = weights(model)
    made = trainer(tmp_path, model)
    made.train()
    plain_loop(plain)
    assert same(weights(model), weights(plain))
    assert made.engine.ledger.releases == STEPS
    moved = {name for name, weight in weights(model).items() if not weight.equal(begun[name])}
    assert moved == {name for name, each in model.named_parameters() if each.requires_grad}
    assert all("lora" in name or "classifier" in name for name in moved) is adapters


def test_adapters_are_saved_alone_and_a_run_with_them_is_resumed(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 4}
    model, again = bert(adapters=True), bert(adapters=True)
    trainer(tmp_path, model, **settings).train()
    assert (tmp_path / "checkpoint-4" / "adapter_model.safetensors").exists()
    assert not (tmp_path / "checkpoint-4" / "model.safetensors").exists()
    resumed = trainer(tmp_path, again)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert same(weights(model), weights(again))
    assert resumed.engine.ledger.releases == STEPS


def test_dropout_and_accumulated_gradients(tmp_path):
    privacy = {"target_epsilon": 3.0, "bounds": "enforced"}
    made = trainer(
        tmp_path, bert(dropout=0.1), privacy=privacy, gradient_accumulation_steps=4,
        per_device_train_batch_size=5,
    )  # fmt: skip
    assert made.train().global_step == made.engine.ledger.releases == STEPS
    assert made.engine.get_epsilon() <= 3.0
    assert "eval_loss" in made.evaluate()


def test_what_is_to_be_said_of_a_transformer(tmp_path):
    """That its bounds are enforced, and that layers run once."""
    privacy = {"target_epsilon": 3.0}
    with pytest.raises(PrivacyError, match=r"privacy=\{'bounds': 'enforced'"):
        trainer(tmp_path, bert(), privacy=privacy).train()
    model = bert()
    model.gradient_checkpointing_enable()
    with pytest.raises(PrivacyError, match="second time in the backward pass"):
        trainer(tmp_path, model).train()
