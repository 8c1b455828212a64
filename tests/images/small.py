"""Tiny images of two kinds: stripes across and stripes along, of random phase and strength."""

import torch


def striped(count, *, seed, size=8, colours=1):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(2, (count,), generator=generator)
    phase = 6.3 * torch.rand(count, 1, generator=generator)
    wave = 0.5 + 0.4 * torch.sin(1.5 * torch.arange(size) + phase)
    across = wave[:, None, :].expand(count, size, size)
    x = torch.where(y[:, None, None] == 0, across, across.mT)[:, None]
    noise = 0.1 * torch.rand(count, colours, size, size, generator=generator)
    return (x + noise).clamp(0, 1), y
