"""Rows that floats are bad at: empty, not finite, denormal, huge, of one entry, at a clamp."""

import torch


def unusual_rows(rows):
    """Ten rows are made unusual, the others stay."""
    rows = rows.clone()
    flat = rows.flatten(1)
    flat[0] = 0.0
    flat[1, 0] = torch.nan
    flat[2, -1] = torch.inf
    flat[3] *= 1e-42
    flat[4] *= 1e35
    flat[5], flat[5, 0] = 0.0, 3.0
    flat[6] = 1.0
    flat[7], flat[7, 0] = 1e-6, 1.0
    flat[8] = torch.finfo(torch.float32).max
    flat[9] = -0.0
    return rows
