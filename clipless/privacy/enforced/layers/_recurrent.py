"""Recurrent layers with thresholds, computed step by step.

Their weights multiply one input and one state after the other, and an example's gradient is the sum
over all steps. So a product with all inputs, and one with all states, is taken at once, as for a
linear layer on T positions. The states are found by a first run without gradients; in the second,
where gradients flow, the product with all of them is added and taken off again: it changes no value
and brings each step's cotangent to the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clipless.errors import UnsupportedOperationError
from clipless.privacy.enforced._passes import LayerPass
from clipless.privacy.enforced.layers._table import enforces, use_linear

State = tuple[Tensor, ...]


@enforces(nn.LSTM, nn.GRU, nn.RNN)
def recurrent(
    module: Any, of: LayerPass, exact: bool | None, input: Any, hx: Any = None
) -> tuple[Tensor, Any]:
    """As `torch.nn.LSTM`, `GRU` and `RNN` on (batch, T, in), or (T, batch, in) as it was made."""
    if not isinstance(input, Tensor) or input.ndim != 3:
        raise UnsupportedOperationError(
            f"{type(module).__name__} is bounded on tensors of shape (batch, T, features): pad "
            "sequences instead of packing them, which mixes them along one axis."
        )
    lstm = isinstance(module, nn.LSTM)
    x = input if module.batch_first else input.transpose(0, 1)
    ends: list[State] = []
    directions = 2 if module.bidirectional else 1
    given = None if hx is None else (tuple(hx) if lstm else (hx,))
    for layer in range(module.num_layers):
        found = []
        for direction in range(directions):
            suffix = f"_l{layer}" + ("_reverse" if direction else "")
            sizes = [module.proj_size or module.hidden_size, module.hidden_size][: 1 + lstm]
            place = layer * directions + direction
            begin = (
                tuple(x.new_zeros(x.shape[0], size) for size in sizes)
                if given is None else tuple(each[place] for each in given)
            )  # fmt: skip
            steps = x.flip(1) if direction else x
            outputs, end = _one_direction(module, of, exact, steps, begin, suffix)
            found.append(outputs.flip(1) if direction else outputs)
            ends.append(end)
        x = torch.cat(found, dim=-1) if directions == 2 else found[0]
        if module.dropout and module.training and layer + 1 < module.num_layers:
            x = F.dropout(x, module.dropout)
    last = tuple(torch.stack(parts) for parts in zip(*ends, strict=True))
    output = x if module.batch_first else x.transpose(0, 1)
    return output, (last if lstm else last[0])


def _one_direction(
    module: Any, of: LayerPass, exact: bool | None, x: Tensor, begin: State, suffix: str
) -> tuple[Tensor, State]:
    weight_ih, weight_hh = (getattr(module, name + suffix) for name in ("weight_ih", "weight_hh"))
    bias_ih = bias_hh = None
    if module.bias:
        bias_ih, bias_hh = (getattr(module, name + suffix) for name in ("bias_ih", "bias_hh"))
    weight_hr = getattr(module, "weight_hr" + suffix) if module.proj_size else None
    arriving = use_linear(of, x, weight_ih, bias_ih, exact)
    weight, bias = weight_hh.detach(), None if bias_hh is None else bias_hh.detach()
    projection = None if weight_hr is None else weight_hr.detach()
    with torch.no_grad():
        states, whole, _ = _run(module, arriving, (weight, bias, projection), begin)
        before = torch.cat((begin[0].unsqueeze(1), states[:, :-1]), dim=1)
    product = use_linear(of, before.detach(), weight_hh, bias_hh, exact)
    gradients = [product - product.detach()]
    if weight_hr is not None:
        product = use_linear(of, whole.detach(), weight_hr, None, exact)
        gradients.append(product - product.detach())
    outputs, _, end = _run(module, arriving, (weight, bias, projection), begin, gradients)
    return outputs, end


def _run(
    module: Any, arriving: Tensor, weights: Sequence[Any], state: State,
    gradients: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor, State]:  # fmt: skip
    """All steps: the outputs, what they are before a projection, and the end.

    `gradients` are zero, and what each step adds to the products with its state.
    """
    outputs, whole = [], []
    weight, bias, projection = weights
    for step in range(arriving.shape[1]):
        recurrent = F.linear(state[0], weight, bias)
        if gradients:
            recurrent = recurrent + gradients[0][:, step]
        state = _cell(module, arriving[:, step], recurrent, state)
        if projection is not None:
            whole.append(state[0])
            output = F.linear(state[0], projection)
            state = ((output + gradients[1][:, step]) if gradients else output, *state[1:])
        outputs.append(state[0])
    found = torch.stack(outputs, dim=1)
    return found, torch.stack(whole, dim=1) if whole else found, state


def _cell(module: Any, arriving: Tensor, recurrent: Tensor, state: State) -> State:
    if isinstance(module, nn.LSTM):
        entry, forget, new, out = (arriving + recurrent).chunk(4, dim=-1)
        memory = torch.sigmoid(forget) * state[1] + torch.sigmoid(entry) * torch.tanh(new)
        return torch.sigmoid(out) * torch.tanh(memory), memory
    if isinstance(module, nn.GRU):
        reset_x, update_x, new_x = arriving.chunk(3, dim=-1)
        reset_h, update_h, new_h = recurrent.chunk(3, dim=-1)
        update = torch.sigmoid(update_x + update_h)
        new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
        return ((1 - update) * new + update * state[0],)
    act = torch.tanh if module.nonlinearity == "tanh" else torch.relu
    return (act(arriving + recurrent),)
