"""Features of examples for membership attacks, from a model's outputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clipless.losses import Loss

_ROWS = 1024
_LARGEST = 10


@dataclass(frozen=True)
class Features:
    """Scores that threshold attacks use (high ones speak for a member), and a table of features.

    `scores[name]` is (n,), `table` is (n, d).
    """

    scores: dict[str, Tensor]
    table: Tensor

    def __len__(self) -> int:
        return len(self.table)


@torch.no_grad()
def attack_features(model: nn.Module, inputs: Tensor, targets: Tensor, *, loss: Loss) -> Features:
    """Evaluate a model on examples, as an attacker who knows their labels would.

    Any loss gives the score `loss`. Where outputs are class scores (B, K >= 2) with class indices
    as targets, or one logit with labels of two values, there are also, with p the softmax of the
    outputs at the loss's temperature and y the label:

    - `confidence`: log odds of the label, `log p_y / (1 - p_y)`;
    - `margin`: output of the label less the largest other output;
    - `entropy`: negative entropy of p, which needs no label;
    - `modified entropy`: that of Song and Mittal (2021), which does.
    """
    training = model.training
    model.eval()
    parameter = next(model.parameters(), torch.zeros(()))
    outputs, losses = [], []
    try:
        for start in range(0, len(inputs), _ROWS):
            rows, labels = (
                part[start : start + _ROWS].to(parameter.device) for part in (inputs, targets)
            )
            output = model(rows)
            losses.append(loss.per_example(output, labels).double().cpu())
            outputs.append(output.double().cpu())
    finally:
        model.train(training)
    loss_values = torch.cat(losses)
    scores = {"loss": -loss_values}
    found = _class_scores(torch.cat(outputs), targets.cpu())
    if found is None:
        return Features(scores, loss_values[:, None])
    logits, label = found
    logits = logits * float(getattr(loss, "tau", 1.0))
    scores |= _threshold_scores(logits, label)
    largest = logits.log_softmax(dim=1).sort(dim=1, descending=True).values[:, :_LARGEST]
    correct = (logits.argmax(dim=1) == label).double()
    table = torch.stack([*scores.values(), correct], dim=1)
    return Features(scores, torch.cat([table, largest.clamp_min(-50)], dim=1))


def _class_scores(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor] | None:
    """Logits (n, K) and class indices (n,), if that is what there is."""
    if outputs.ndim == 2 and outputs.shape[1] >= 2:
        indices = targets.ndim == 1 and not targets.is_floating_point()
        return (outputs, targets.long()) if indices else None
    if outputs.ndim <= 2 and outputs.numel() == len(outputs) == targets.numel():
        values = set(targets.flatten().tolist())
        if values <= {0, 1} or values <= {-1, 1}:
            logit = outputs.flatten()
            label = targets.flatten().gt(0).long()
            return torch.stack([torch.zeros_like(logit), logit], dim=1), label
    return None


def _threshold_scores(logits: Tensor, label: Tensor) -> dict[str, Tensor]:
    log_p = logits.log_softmax(dim=1)
    mine = torch.zeros_like(log_p, dtype=torch.bool).scatter_(1, label[:, None], True)
    others = log_p.masked_fill(mine, -torch.inf)
    log_rest = torch.logsumexp(others, dim=1)  # log(1 - p_y), without cancellation
    log_mine = log_p.gather(1, label[:, None]).squeeze(1)
    p = log_p.exp()
    # log(1 - p_k) for the other classes; p_k = 1 leaves a finite, very negative number.
    log_not = torch.log1p(-p.clamp(max=1 - 1e-15))
    modified = -log_rest.exp() * log_mine - torch.where(mine, 0.0, p * log_not).sum(dim=1)
    return {
        "confidence": log_mine - log_rest,
        "margin": logits.gather(1, label[:, None]).squeeze(1)
        - logits.masked_fill(mine, -torch.inf).amax(dim=1),
        "entropy": (p * log_p).sum(dim=1),
        "modified entropy": -modified,
    }
