"""Your transformer, and your LoRA adapter: Hugging Face models, trained privately as they are.

    python examples/any_transformer.py --steps 200
    python examples/any_transformer.py --adapter

A tiny BERT is made on the spot, and so are its sentences: their class is which of two tokens is
more frequent. Sentences are padded to one length, which is public, and come with masks.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification

from clipless import PrivacyEngine, losses

LENGTH = 16


class Sentences(Dataset[dict[str, Tensor]]):
    """Tokens, masks and labels of sentences of several lengths."""

    def __init__(self, count: int) -> None:
        lengths = torch.randint(8, LENGTH + 1, (count, 1))
        self.mask = (torch.arange(LENGTH) < lengths).long()
        self.ids = torch.randint(3, 20, (count, LENGTH))
        likes = torch.randint(2, (count, 1))
        chosen = torch.rand(count, LENGTH) < 0.4
        self.ids = torch.where(chosen, 1 + likes, self.ids) * self.mask
        self.labels = likes.squeeze(1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "input_ids": self.ids[index], "attention_mask": self.mask[index],
            "labels": self.labels[index],
        }  # fmt: skip


def network(*, adapter: bool) -> torch.nn.Module:
    """A BERT, or a frozen one with low-rank adapters in its attention."""
    config = BertConfig(
        vocab_size=20, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=LENGTH, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    if not adapter:
        return model
    from peft import LoraConfig, get_peft_model

    wanted = LoraConfig(r=4, target_modules=["query", "key", "value"], task_type="SEQ_CLS")
    return get_peft_model(model, wanted)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--adapter", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    train, test = Sentences(4000), Sentences(1000)

    model, criterion, engine = (
        network(adapter=options.adapter),
        losses.CrossEntropy(),
        PrivacyEngine(),
    )
    trained = [each for each in model.parameters() if each.requires_grad]
    _, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.Adam(trained, lr=3e-3), criterion=criterion,
        data_loader=DataLoader(train, batch_size=200), target_epsilon=options.epsilon,
        epochs=options.steps / 20, bounds="enforced",
    )  # fmt: skip
    taken = 0
    while taken < engine.plan.steps:
        for batch in loader:
            if taken == engine.plan.steps:
                break
            optimizer.zero_grad()
            output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
            criterion(output.logits, batch["labels"]).backward()
            optimizer.step()
            taken += 1
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=test.ids, attention_mask=test.mask).logits
    accuracy = float((logits.argmax(1) == test.labels).float().mean())
    print(engine.report())
    print(f"test accuracy {accuracy:.3f} at epsilon {engine.get_epsilon():.2f}")


if __name__ == "__main__":
    main()
