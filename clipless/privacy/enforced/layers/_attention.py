"""Multi-head attention with thresholds, from projections and torch's own attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clipless.errors import UnsupportedOperationError
from clipless.privacy.enforced._passes import LayerPass
from clipless.privacy.enforced.layers._table import enforces, use_linear


@enforces(nn.MultiheadAttention)
def multihead_attention(
    module: nn.MultiheadAttention, of: LayerPass, exact: bool | None,
    query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
    need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """As `torch.nn.MultiheadAttention`, for (batch, T, E), or (T, batch, E) as it was made."""
    if query.ndim != 3:
        raise UnsupportedOperationError(
            "MultiheadAttention was called on one example: give it a batch, (batch, T, E)."
        )
    alike = query is key and key is value
    if not module.batch_first:
        query, key, value = (each.transpose(0, 1) for each in (query, key, value))
    heads, size = module.num_heads, module.embed_dim // module.num_heads
    q, k, v = _projections(module, of, exact, query, key, value, alike=alike)
    k, v, added = _with_more_keys(module, of, k, v)
    q, k, v = (each.unflatten(-1, (heads, size)).transpose(1, 2) for each in (q, k, v))
    mask = _mask(module, attn_mask, key_padding_mask, q)
    if mask is not None and added:
        mask = F.pad(mask, (0, added))
    dropout = module.dropout if module.training else 0.0
    weights: Tensor | None = None
    if need_weights:
        scores = q @ k.mT / math.sqrt(size)
        attention = torch.softmax(scores if mask is None else scores + mask, dim=-1)
        attention = F.dropout(attention, dropout) if dropout else attention
        output = attention @ v
        weights = attention.mean(dim=1) if average_attn_weights else attention
    else:
        output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
    output = output.transpose(1, 2).flatten(-2)
    output = use_linear(of, output, module.out_proj.weight, module.out_proj.bias, exact)
    return (output if module.batch_first else output.transpose(0, 1)), weights


def _with_more_keys(
    module: nn.MultiheadAttention, of: LayerPass, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, int]:
    """Keys and values with those that `add_bias_kv` and `add_zero_attn` put behind them."""
    added = 0
    if module.bias_k is not None and module.bias_v is not None:
        more = [of.copies(each).copies.flatten(1, 2) for each in (module.bias_k, module.bias_v)]
        k, v = torch.cat((k, more[0]), dim=1), torch.cat((v, more[1]), dim=1)
        added += 1
    if module.add_zero_attn:
        k, v = (torch.cat((each, torch.zeros_like(each[:, :1])), dim=1) for each in (k, v))
        added += 1
    return k, v, added


def _projections(
    module: nn.MultiheadAttention, of: LayerPass, exact: bool | None,
    query: Tensor, key: Tensor, value: Tensor, *, alike: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Queries, keys and values. One parameter holds all three matrices, and is used once."""
    weight, bias = module.in_proj_weight, module.in_proj_bias
    if weight is None:
        if bias is None:
            parts: tuple[Tensor | None, ...] = (None, None, None)
        else:
            # The bias of all three is one parameter: a copy of it meets each example.
            parts = tuple(of.copies(bias).copies.unsqueeze(1).chunk(3, dim=-1))
        matrices = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        found = [
            use_linear(of, x, w, None, exact)
            for x, w in zip((query, key, value), matrices, strict=True)
        ]
        return tuple(x if b is None else x + b for x, b in zip(found, parts, strict=True))
    if alike:
        return use_linear(of, query, weight, bias, exact).chunk(3, dim=-1)
    # On all positions of all three, so that the parameter is used once; each keeps its part.
    lengths = [query.shape[1], key.shape[1], value.shape[1]]
    every = use_linear(of, torch.cat((query, key, value), dim=1), weight, bias, exact)
    parts_of = every.split(lengths, dim=1)
    return tuple(each.chunk(3, dim=-1)[place] for place, each in enumerate(parts_of))


def _mask(
    module: nn.MultiheadAttention, attention: Tensor | None, padding: Tensor | None, q: Tensor
) -> Tensor | None:
    """Masks as numbers that are added to scores: (batch or 1, heads or 1, T, S)."""
    found: Tensor | None = None
    if attention is not None:
        found = _additive(attention, q)
        if attention.ndim == 3:
            found = found.unflatten(0, (-1, module.num_heads))
    if padding is not None:
        keys = _additive(padding, q).unsqueeze(1).unsqueeze(1)
        found = keys if found is None else found + keys
    return found


def _additive(mask: Tensor, q: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.where(mask, -math.inf, torch.zeros((), dtype=q.dtype, device=q.device))
    return mask.to(q.dtype)
