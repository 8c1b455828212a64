"""Small runs with the Hugging Face trainer: models and data made on the spot."""

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import TrainingArguments

from clipless import PrivacyEngine, losses
from clipless.integrations import CliplessTrainer
from clipless.privacy import BatchOptions, PrivacyOptions
from tests.integrations.lightning_runs import BATCH, data, loader, network, weights

STEPS = 12


class Rows(Dataset):
    """Examples as dictionaries, as tokenized data sets are."""

    def __init__(self):
        self.data = data()

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        x, y = self.data[index]
        return {"features": x, "labels": y}


class Named(nn.Module):
    """A model of named inputs that returns its logits in a dictionary, or alone."""

    def __init__(self, seed=0, *, alone=False):
        super().__init__()
        self.network = network(seed)
        self.alone = alone

    def forward(self, features):
        logits = self.network(features)
        return logits if self.alone else {"logits": logits}


def arguments(folder, **given):
    settings = {
        "max_grad_norm": 0, "per_device_train_batch_size": BATCH, "num_train_epochs": 2,
        "use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 4,
        "save_strategy": "no", "learning_rate": 0.05, "optim": "adamw_torch",
    }  # fmt: skip
    return TrainingArguments(str(folder), **(settings | given))


def trainer(folder, model=None, *, privacy=None, extra=None, **given):
    return CliplessTrainer(
        Named() if model is None else model,
        arguments(folder, **given),
        criterion=losses.CrossEntropy(tau=4.0),
        privacy={"noise_multiplier": 1.0, "insecure_seed": 0} if privacy is None else privacy,
        **({"train_dataset": Rows()} | (extra or {})),
    )


def plain_loop(*, micro_batch_size=None):
    """Return the weights of the same training, written by hand."""
    model = Named()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    criterion, engine = losses.CrossEntropy(tau=4.0), PrivacyEngine(insecure_seed=0)
    _, _, private = engine.make_private(
        module=model.network, optimizer=optimizer, data_loader=loader(), criterion=criterion,
        noise_multiplier=1.0,
        options=PrivacyOptions(batches=BatchOptions(micro_batch_size=micro_batch_size)),
    )  # fmt: skip
    taken = 0
    while taken < STEPS:
        for x, y in private:
            criterion(model.network(x), y).backward()
            if private.current is not None and private.current.is_last:
                optimizer.step()
                scheduler.step()
                taken += 1
    engine.detach()
    return weights(model)
