"""Small Lightning runs, and the plain loop that they must equal."""

import logging
import warnings

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from clipless import PrivacyEngine, losses
from clipless import nn as lip
from clipless.integrations import CliplessCallback
from clipless.privacy import PrivacyOptions

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")

SIZE, BATCH = 120, 20


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        lip.BoundedInput(2.0),
        lip.SpectralLinear(4, 8, bias=True),
        lip.GroupSort(2),
        lip.SpectralLinear(8, 2),
    )


def data(size=SIZE):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, 4, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long())


def loader(batch_size=BATCH, **options):
    return DataLoader(data(), batch_size=batch_size, shuffle=True, **options)


class Classifier(lightning.LightningModule):
    def __init__(self, seed=0):
        super().__init__()
        self.network = network(seed)
        self.criterion = losses.CrossEntropy(tau=4.0)

    def forward(self, x):
        return self.network(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.criterion(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("accuracy", (self(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def callback(**given):
    given.setdefault("insecure_seed", 0)
    if "target_epsilon" not in given:
        given.setdefault("noise_multiplier", 1.0)
    return CliplessCallback(**given)


def trainer(own, **given):
    settings = {
        "max_epochs": 2, "accelerator": "cpu", "devices": 1, "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    others = given.pop("callbacks", [])
    return lightning.Trainer(
        **settings | given, callbacks=[*([] if own is None else [own]), *others]
    )  # fmt: skip


def weights(module):
    return {name: each.detach().clone() for name, each in module.state_dict().items()}


def same(first, second):
    return first.keys() == second.keys() and all(first[k].equal(second[k]) for k in first)


def plain_loop(*, steps, options=PrivacyOptions(), noise_multiplier=1.0):
    """Return the weights of the same training, written by hand."""
    module = Classifier()
    configured = module.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    engine = PrivacyEngine(insecure_seed=0)
    _, _, private = engine.make_private(
        module=module.network, optimizer=optimizer, data_loader=loader(),
        criterion=module.criterion, noise_multiplier=noise_multiplier, options=options,
    )  # fmt: skip
    taken = 0
    while taken < steps:
        for x, y in private:
            module.criterion(module.network(x), y).backward()
            if private.current is not None and private.current.is_last:
                optimizer.step()
                scheduler.step()
                taken += 1
                if taken == steps:
                    break
    engine.detach()
    return weights(module)
