"""The Hugging Face Trainer, with private training.

    python examples/hugging_face_trainer.py [--epsilon 3] [--epochs 20]

Data are scikit-learn's small digits, which need no download, as a data set of dictionaries; the
model is a Lipschitz network of named inputs. transformers, accelerate and scikit-learn come with
`pip install 'clipless[transformers,sklearn]'`.
"""

import argparse
import tempfile

import torch
from sklearn.datasets import load_digits
from transformers import TrainingArguments

from clipless import losses, models
from clipless.integrations import CliplessTrainer


class Rows(torch.utils.data.Dataset):
    """Examples as a tokenizer or an image processor makes them."""

    def __init__(self, first: int, last: int) -> None:
        digits = load_digits()
        self.images = torch.from_numpy(digits.images[first:last]).float()[:, None] / 16
        self.labels = digits.target[first:last]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict:
        return {"pixel_values": self.images[index], "labels": int(self.labels[index])}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = models.build("mlp", input_shape=(1, 8, 8), classes=10)

    def forward(self, pixel_values):
        return {"logits": self.network(pixel_values)}


def accuracy(found) -> dict:
    return {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        trainer = CliplessTrainer(
            Model(),
            TrainingArguments(
                folder, num_train_epochs=options.epochs, learning_rate=0.02, report_to="none",
                per_device_train_batch_size=35, gradient_accumulation_steps=2, logging_steps=100,
                max_grad_norm=0,  # each example's gradient is bounded already
            ),
            train_dataset=Rows(0, 1400),
            eval_dataset=Rows(1400, 1797),
            compute_metrics=accuracy,
            criterion=losses.CrossEntropy(tau=32.0),
            privacy={"target_epsilon": options.epsilon},
        )  # fmt: skip
        trainer.train()
        print(f"accuracy on others: {trainer.evaluate()['eval_accuracy']:.1%}")
        print(trainer.engine.report())


if __name__ == "__main__":
    main()
