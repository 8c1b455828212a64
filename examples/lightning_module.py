"""Your Lightning module, trained privately: one more callback.

    python examples/lightning_module.py [--epsilon 3] [--epochs 40]

Data are scikit-learn's small digits, which need no download. Loggers, checkpoints and
`trainer.fit(ckpt_path=...)` work as ever; lightning and scikit-learn come with
`pip install 'clipless[lightning,sklearn]'`.
"""

import argparse
import tempfile

import lightning
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import clipless
from clipless import losses
from clipless import nn as lip
from clipless.integrations import CliplessCallback
from clipless.training import LayerAdam


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(
            lip.BoundedInput(norm=3.0), torch.nn.Flatten(),
            lip.SpectralLinear(64, 32, constraint="ball"), lip.GroupSort(2),
            lip.SpectralLinear(32, 10, constraint="ball"),
        )  # fmt: skip
        self.criterion = losses.CrossEntropy(tau=10.0)
        clipless.clip_products(
            self.model, fraction=0.3, loss=self.criterion, input_shape=(1, 8, 8)
        )  # fmt: skip

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return self.criterion(self.model(images), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        accuracy = (self.model(images).argmax(1) == labels).float().mean()
        self.log("accuracy", accuracy, prog_bar=True)

    def configure_optimizers(self):
        optimizer = LayerAdam(self.parameters())
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--epochs", type=int, default=40)
    options = parser.parse_args()

    digits = load_digits()
    images = torch.from_numpy(digits.images).float()[:, None] / 16
    data = TensorDataset(images, torch.from_numpy(digits.target))
    private = DataLoader(torch.utils.data.Subset(data, range(1400)), batch_size=350)
    public = DataLoader(torch.utils.data.Subset(data, range(1400, len(data))), batch_size=200)

    with tempfile.TemporaryDirectory() as folder:
        callback = CliplessCallback(target_epsilon=options.epsilon)
        trainer = lightning.Trainer(
            max_epochs=options.epochs, callbacks=[callback], default_root_dir=folder,
            accelerator="auto", devices=1, enable_model_summary=False, log_every_n_steps=20,
        )  # fmt: skip
        trainer.fit(Digits(), private, public)
    print(f"accuracy on others: {trainer.callback_metrics['accuracy']:.1%}")
    print(callback.run.engine.report())


if __name__ == "__main__":
    main()
