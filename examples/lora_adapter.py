"""Your LoRA adapter on a transformer, trained privately by the Hugging Face Trainer.

    python examples/lora_adapter.py [--epsilon 8] [--steps 300]

The model is a tiny BERT with random weights and the sentences are made on the spot, so that
nothing is downloaded: take `from_pretrained` and a tokenizer that pads to one length instead.
transformers and peft come with `pip install 'clipless[peft]'`.
"""

import argparse
import tempfile

import peft
import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from clipless import losses
from clipless.integrations import CliplessTrainer
from clipless.privacy import EnforcedBounds

WORDS, LENGTH = 40, 9


def sentences(count: int, seed: int) -> list[dict]:
    """Sentences of random words, half of which are kind; the label says whether most are."""
    ids = torch.randint(0, WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    kind = (ids < WORDS // 2).float().mean(1) > 0.5
    return [{"input_ids": row, "labels": int(label)} for row, label in zip(ids, kind, strict=True)]


def adapted_model() -> torch.nn.Module:
    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=64, max_position_embeddings=LENGTH, num_labels=2,
        )
    )  # fmt: skip
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"])
    return peft.get_peft_model(model, lora)


def accuracy(found) -> dict:
    return {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        trainer = CliplessTrainer(
            adapted_model(),
            TrainingArguments(
                folder, max_steps=options.steps, learning_rate=0.03, report_to="none",
                per_device_train_batch_size=250, logging_steps=100, save_strategy="no",
                max_grad_norm=0,  # each example's gradient is bounded already
            ),
            train_dataset=sentences(4000, seed=0),
            eval_dataset=sentences(1000, seed=1),
            compute_metrics=accuracy,
            criterion=losses.CrossEntropy(),
            privacy={"target_epsilon": options.epsilon, "bounds": EnforcedBounds(thresholds=0.5)},
        )  # fmt: skip
        trainer.train()
        print(f"accuracy on others: {trainer.evaluate()['eval_accuracy']:.1%}")
        print(trainer.engine.report())


if __name__ == "__main__":
    main()
