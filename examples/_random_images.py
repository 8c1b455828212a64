"""Images of random processes, and random views of them: made on the device, a batch at a time.

No image, and no statistic of images, went into these processes. What they share with photographs
is only what is known of any picture of a world: things hide one another, have edges and textures,
come in all sizes, and most energy is at low frequencies.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

RGB = torch.tensor([[1.0, 0.956, 0.621], [1.0, -0.272, -0.647], [1.0, -1.106, 1.703]])
"""From luminance and two colour differences (YIQ) to red, green, blue."""
YIQ = torch.linalg.inv(RGB)


def uniform(low: float, high: float, *shape: int, device: torch.device) -> Tensor:
    return torch.empty(shape, device=device).uniform_(low, high)


def random_images(count: int, *, size: int = 32, device: torch.device | str = "cpu") -> Tensor:
    """Return images, (count, 3, size, size) with pixels in [0, 1], of torch's own randomness.

    A sixth is noise with a random spectrum, a third comes from random networks, and half are dead
    leaves, cut from images of the first two kinds.
    """
    place = torch.device(device)
    noise = count // 3
    textures = torch.cat(
        [
            spectral_noise(noise, size=size, device=place),
            network_images(count - noise, size=size, device=place),
        ]
    )[torch.randperm(count, device=place)]
    return torch.cat([dead_leaves(textures[: count // 2]), textures[count // 2 :]])


def spectral_noise(count: int, *, size: int, device: torch.device) -> Tensor:
    """Noise whose amplitude falls like 1 / f^a, with its own a and direction in every image."""
    power = uniform(0.5, 2.5, count, 1, 1, 1, device=device)
    stretch = torch.exp(uniform(-1, 1, count, 1, 1, 1, device=device))
    rows = torch.fft.fftfreq(size, device=device)[:, None] * stretch
    columns = torch.fft.rfftfreq(size, device=device)[None, :] / stretch
    amplitude = (rows.square() + columns.square() + 1 / size**2).sqrt() ** -power
    white = torch.fft.rfft2(torch.randn(count, 3, size, size, device=device))
    return coloured(torch.fft.irfft2(white * amplitude, s=(size, size)))


def network_images(count: int, *, size: int, device: torch.device, width: int = 32) -> Tensor:
    """Noise through generators with random weights, from 4 x 4 pixels up: one network an image.

    Each resolution filters by oriented wavelets, shared by a batch, and mixes the channels by a
    matrix of the image's own: a batched product, which is what makes a network an image cheap.
    Colours are a soft choice among channels: sums over many would look like noise, as sums do.
    """
    x = torch.randn(count, width, 4, 4, device=device)
    while True:
        x = F.conv2d(F.pad(x, (2, 2, 2, 2), mode="reflect"), wavelets(width, device), groups=width)
        mixing = torch.randn(count, width, width, device=device)
        mixing = mixing * (torch.rand_like(mixing) < 3 / width)
        x = (mixing @ x.flatten(2)).view_as(x)
        x = x / x.square().mean(dim=(1, 2, 3), keepdim=True).sqrt().clamp(min=1e-6)
        # Fresh noise enters at every scale, each channel with its own strength, less at fine ones.
        strength = 4 / x.shape[-1] * uniform(0, 1, count, width, 1, 1, device=device) ** 4
        bias = 0.5 * torch.randn(count, width, 1, 1, device=device)
        x = F.leaky_relu(x + strength * torch.randn_like(x) + bias, 0.2)
        if x.shape[-1] >= size:
            break
        x = F.interpolate(x, scale_factor=2, mode="bilinear")
    x = x[..., :size, :size]
    sharpness = torch.exp(uniform(0, 2.5, count, 1, 1, 1, device=device))
    palette = torch.randn(count, 3, width, device=device)
    return coloured((palette @ (sharpness * x).softmax(dim=1).flatten(2)).view_as(x[:, :3]))


def wavelets(count: int, device: torch.device) -> Tensor:
    """Small waves of random direction, frequency and phase, (count, 1, 5, 5), of norm one."""
    at = torch.arange(-2.0, 3.0, device=device)
    angle, frequency, phase, spread = (
        uniform(low, high, count, 1, 1, device=device)
        for low, high in ((0, math.pi), (0, 2.0), (0, 2 * math.pi), (0.5, 1.5))
    )
    along = at[:, None] * angle.sin() + at[None, :] * angle.cos()
    decay = (-(at[:, None].square() + at[None, :].square()) / (2 * spread.square())).exp()
    waves = decay * (frequency * along + phase).cos() + 1e-3
    return (waves / waves.flatten(1).norm(dim=1)[:, None, None])[:, None]


def dead_leaves(textures: Tensor, *, leaves: int = 40) -> Tensor:
    """Ellipses and rectangles that fall on one another, on one of the textures.

    Their sizes follow a power law. A leaf has one colour, or shows a piece of another image's
    texture in its colour. Edges are smooth over one pixel, as a camera's are.
    """
    count, _, size, _ = textures.shape
    device = textures.device

    def each(low: float, high: float) -> Tensor:  # one number for each leaf of each image
        return uniform(low, high, leaves, count, 1, 1, device=device)

    power = uniform(-2.0, -0.2, count, 1, 1, device=device)
    smallest, largest = (size / 20) ** power, (size / 1.8) ** power
    radius = (smallest + each(0, 1) * (largest - smallest)) ** (1 / power)
    longer = torch.exp(each(0, 0.5))
    length, breadth, round_ = radius * longer, radius / longer, each(0, 1) < 0.5
    row, column, angle = each(0, size), each(0, size), each(0, math.pi)
    sine, cosine = angle.sin(), angle.cos()
    # Images have few colours in some cases and many in others.
    spread = uniform(0.05, 0.5, count, 1, 1, 1, device=device)
    middle = uniform(0.2, 0.8, count, 1, 1, 1, device=device)
    colour = vivid(leaves * count, device).view(leaves, count, 3, 1, 1) * spread + middle
    contrast = (each(-1, 1).clamp(min=0) * uniform(0, 2, count, 1, 1, device=device))[:, :, None]
    pixels = torch.arange(size, device=device) + 0.5
    image = textures
    for k, shift in enumerate(torch.randint(1, max(count, 2), (leaves,)).tolist()):
        down, right = pixels[:, None] - row[k], pixels[None, :] - column[k]
        u = ((cosine[k] * right + sine[k] * down) / length[k]).abs()
        v = ((cosine[k] * down - sine[k] * right) / breadth[k]).abs()
        edge = torch.where(round_[k], torch.hypot(u, v), torch.maximum(u, v))
        cover = ((1 - edge) * breadth[k] + 0.5).clamp(0, 1)[:, None]
        fill = colour[k] + contrast[k] * (textures.roll(shift, 0) - 0.5)
        image = image + cover * (fill - image)
    return image.clamp(0, 1)


def vivid(count: int, device: torch.device) -> Tensor:
    """Colours around zero, (count, 3): mostly light and dark, with some colour."""
    wide = torch.randn(count, 3, device=device)
    return wide * torch.tensor([1.0, 0.4, 0.4], device=device) @ RGB.to(device).T


def coloured(image: Tensor) -> Tensor:
    """Bring three random channels to a random mean colour, contrast and saturation in [0, 1]."""
    count, device = len(image), image.device
    image = image - image.mean(dim=(2, 3), keepdim=True)
    image = image / image.std(dim=(2, 3), keepdim=True).clamp(min=1e-6)
    image[:, 1:] *= uniform(0, 0.5, count, 1, 1, 1, device=device)
    image = (RGB.to(device) @ image.flatten(2)).view_as(image)
    contrast = uniform(0.08, 0.35, count, 1, 1, 1, device=device)
    mean = 0.5 + 0.15 * vivid(count, device)[:, :, None, None]
    return (mean + contrast * image).clamp(0, 1)


def views(images: Tensor, *, smallest: float = 0.15) -> Tensor:
    """Return a random view of each image: a crop of it, mirrored or not, recoloured, blurred.

    Everything is affine, in space or in colour, so that a batch takes one resampling and one
    product with a matrix for each image.
    """
    count, device = len(images), images.device
    area = uniform(smallest, 1, count, device=device)
    ratio = torch.exp(uniform(-0.3, 0.3, count, device=device))
    width, height = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
    place = torch.zeros(count, 2, 3, device=device)
    place[:, 0, 0] = width * (torch.rand_like(width) < 0.5).float().mul(2).sub(1)
    place[:, 1, 1] = height
    place[:, 0, 2] = uniform(-1, 1, count, device=device) * (1 - width)
    place[:, 1, 2] = uniform(-1, 1, count, device=device) * (1 - height)
    grid = F.affine_grid(place, list(images.shape), align_corners=False)
    x = F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)

    # Contrast of luminance; saturation and hue: a scaled rotation of the other two channels.
    jitter = torch.rand(count, device=device) < 0.8
    contrast = torch.where(jitter, uniform(0.6, 1.4, count, device=device), 1.0)
    saturation = torch.where(jitter, uniform(0.6, 1.4, count, device=device), 1.0) * contrast
    saturation = saturation * (torch.rand(count, device=device) >= 0.2)  # a fifth turns gray
    hue = torch.where(jitter, uniform(-0.6, 0.6, count, device=device), 0.0)
    change = torch.zeros(count, 3, 3, device=device)
    change[:, 0, 0] = contrast
    change[:, 1, 1] = change[:, 2, 2] = saturation * hue.cos()
    change[:, 1, 2], change[:, 2, 1] = -saturation * hue.sin(), saturation * hue.sin()
    middle = x.mean(dim=(1, 2, 3), keepdim=True)
    bright = torch.where(jitter, uniform(-0.2, 0.2, count, device=device), 0.0).view(-1, 1, 1, 1)
    x = (RGB.to(device) @ change @ YIQ.to(device) @ (x - middle).flatten(2)).view_as(x)
    x = x + middle + bright

    kernel = torch.tensor([1.0, 4.0, 6.0, 4.0, 1.0], device=device) / 16
    kernel = (kernel[:, None] * kernel[None, :]).expand(3, 1, 5, 5)
    blurred = F.conv2d(F.pad(x, (2, 2, 2, 2), mode="reflect"), kernel, groups=3)
    amount = uniform(-1, 1, count, 1, 1, 1, device=device).clamp(min=0)
    return torch.lerp(x, blurred, amount).clamp(0, 1)
