"""Models of Hugging Face, as they are: classifiers, language models, adapters."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from clipless import PrivacyEngine, losses
from clipless.errors import PrivacyError
from clipless.privacy import EnforcedBounds
from tests.privacy.enforced.runs import plain_gradients

transformers = pytest.importorskip("transformers")
LENGTH, CLASSES = 6, 2
SMALL = {
    "vocab_size": 40, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 16, "max_position_embeddings": 16, "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
PLAIN = {key: value for key, value in SMALL.items() if "prob" not in key}


def bert(**options):
    torch.manual_seed(0)
    config = transformers.BertConfig(**{**SMALL, **options})
    return transformers.BertForSequenceClassification(config)


def gpt():
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=40, n_positions=16, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, pad_token_id=0,
        )
    )  # fmt: skip


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**PLAIN, num_key_value_heads=1, pad_token_id=0)
    )


def adapted():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS")
    return peft.get_peft_model(bert(), config)


class Records(torch.utils.data.Dataset):
    def __init__(self, count=40):
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(1, 40, (count, LENGTH), generator=generator)
        lengths = torch.randint(2, LENGTH + 1, (count, 1), generator=generator)
        self.mask = (torch.arange(LENGTH) < lengths).long()
        self.ids *= self.mask

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {
            "input_ids": self.ids[index], "attention_mask": self.mask[index],
            "labels": self.ids[index, 0] % 2,
        }  # fmt: skip


def private(model, criterion, **options):
    engine = PrivacyEngine(insecure_seed=0)
    trained = [each for each in model.parameters() if each.requires_grad]
    _, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(trained, lr=0.1), criterion=criterion,
        data_loader=DataLoader(Records(), batch_size=10),
        **{"noise_multiplier": 0.1, "bounds": "enforced", **options},
    )  # fmt: skip
    return engine, optimizer, loader


def target_of(batch, criterion):
    if isinstance(criterion, losses.TokenCrossEntropy):
        return torch.where(batch["attention_mask"] > 0, batch["input_ids"], -100)
    return batch["labels"]


MODELS = [
    (bert, losses.CrossEntropy), (adapted, losses.CrossEntropy), (gpt, losses.TokenCrossEntropy),
    (llama, losses.TokenCrossEntropy),
]  # fmt: skip


@pytest.mark.parametrize(("make", "loss"), MODELS, ids=lambda each: each.__name__)
def test_a_model_trains_as_it_is(make, loss):
    model, criterion = make(), loss()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    _, optimizer, loader = private(model, criterion, bounds=EnforcedBounds(thresholds=1e-2))
    for epoch in range(3):
        for batch in loader:
            target = target_of(batch, criterion)
            optimizer.zero_grad()
            output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
            assert type(output).__module__.startswith("transformers")
            (criterion(output, target) if epoch else criterion(output.logits, target)).backward()
            optimizer.step()
    moved = [not torch.equal(start[name], p) for name, p in model.named_parameters()]
    trained = [p.requires_grad for p in model.parameters()]
    assert sum(moved) >= 0.8 * sum(trained)
    assert sum(moved) <= sum(trained)
    model.eval()
    output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    assert criterion(output, target).isfinite()


@pytest.mark.parametrize("make", [bert, gpt, llama], ids=lambda each: each.__name__)
def test_each_example_keeps_its_thresholds(make):
    model = make(**({"hidden_dropout_prob": 0.0} if make is bert else {}))
    criterion = losses.CrossEntropy() if make is bert else losses.TokenCrossEntropy()
    engine, _, _ = private(
        model, criterion, noise_multiplier=0.0, bounds=EnforcedBounds(thresholds=0.02)
    )
    session, records = engine.session, Records(4)
    session.loader.first_batch()
    inputs = [records.ids, records.mask]
    if session.report.proof.spec.names != ("input_ids", "attention_mask"):
        raise AssertionError(session.report.proof.spec)
    enforcement, bounds = session.enforcement, session.plan.sensitivities
    size = (4, CLASSES) if make is bert else (4, LENGTH, 40)
    cotangents = torch.randn(size) * 0.1
    clipped = 0
    for row in range(4):
        alone = torch.zeros_like(cotangents)
        alone[row] = cotangents[row]
        with enforcement.stand_in():
            enforcement.begin_pass(inputs)
            found = enforcement.gradients(session.run_eagerly(inputs), alone)
        for parameter, gradient in zip(session.plan.parameters, found, strict=True):
            if gradient is not None:
                norm = float(torch.linalg.vector_norm(gradient.double()))
                assert norm <= bounds[parameter.name], parameter.name
                clipped += norm > 0.97 * bounds[parameter.name]
    assert clipped > 10


def test_masks_are_used_whatever_other_examples_have():
    """Hugging Face leaves masks out if no example of the batch needs one."""
    model = bert(hidden_dropout_prob=0.0)
    engine, _, _ = private(model, losses.CrossEntropy())
    ids = torch.randint(1, 40, (3, LENGTH))
    padded = torch.ones(3, LENGTH).long()
    padded[2, 3:] = 0
    outputs = []
    for mask in (torch.ones(3, LENGTH).long(), padded):
        with engine.session.enforcement.stand_in():
            engine.session.enforcement.begin_pass([ids])
            outputs.append(engine.session.run_eagerly([ids, mask]))
    assert torch.equal(outputs[0][:2], outputs[1][:2])
    assert not torch.equal(outputs[0][2], outputs[1][2])


def test_labels_stay_with_the_criterion_and_lengths_stay_the_same():
    model, criterion = bert(), losses.CrossEntropy()
    _, optimizer, loader = private(model, criterion)
    batch = next(iter(loader))
    with pytest.raises(PrivacyError, match="given labels, to compute its own loss"):
        model(**batch)
    optimizer.zero_grad()
    criterion(model(batch["input_ids"], batch["attention_mask"]), batch["labels"]).backward()
    optimizer.step()
    for batch in loader:
        with pytest.raises(PrivacyError, match="pad sequences to one length"):
            model(batch["input_ids"][:, :4], batch["attention_mask"][:, :4])
        break


def test_references_are_those_of_single_examples():
    """Of a model without dropout, one example's clipped gradient is its own, scaled."""
    model = bert(hidden_dropout_prob=0.0)
    engine, _, _ = private(
        model, losses.CrossEntropy(), noise_multiplier=0.0,
        bounds=EnforcedBounds(thresholds=1e3),
    )  # fmt: skip
    session, ids = engine.session, torch.randint(1, 40, (3, LENGTH))
    mask = torch.ones(3, LENGTH).long()
    cotangents = torch.randn(3, CLASSES)

    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids):
            return model.forward(ids, torch.ones_like(ids)).logits

    expected = plain_gradients(Logits(), ids, cotangents)
    with session.enforcement.stand_in():
        session.enforcement.begin_pass([ids, mask])
        output = session.run_eagerly([ids, mask])
        found = session.enforcement.gradients(output, cotangents)
    for parameter, gradient in zip(session.plan.parameters, found, strict=True):
        if gradient is not None:
            wanted = expected[f"model.{parameter.name}"].sum(0)
            torch.testing.assert_close(gradient, wanted.double(), rtol=1e-3, atol=1e-5)
