"""The scattering transform: its values, what it is known for, and its place in models."""

import io
import math

import pytest
import torch
from torch import nn

import clipless
from clipless import losses
from clipless import nn as lip
from clipless.audit import attack_bounds, gaussian_targets
from clipless.errors import UnsupportedOperationError
from tests.bounds.architectures import linear_functional
from tests.nn.test_export import foreign_parts

PADDINGS = ["zero", "symmetric"]
DOUBLE = {"dtype": torch.float64}


# --- values: a second implementation, in space, without a single Fourier transform ---------------


RANGE = range(-4, 5)


def morlet_in_space(size, resolution, scale, angle, angles):
    """A Morlet wavelet at the samples of a periodic grid, (n, n), summed over its periods."""
    width, centre, slant = 0.8 * 2**scale, 0.75 * math.pi / 2**scale, 4 / angles
    turn = math.pi * angle / angles
    step = 2**resolution
    t = step * torch.arange(size // step, dtype=torch.float64)
    wave = torch.zeros(len(t), len(t), dtype=torch.complex128)
    envelope = torch.zeros_like(wave)
    for k in RANGE:
        for m in RANGE:
            first, second = (t + k * size)[:, None], (t + m * size)[None, :]
            along = math.cos(turn) * first + math.sin(turn) * second
            across = math.cos(turn) * second - math.sin(turn) * first
            bump = torch.exp(-(along**2 + (slant * across) ** 2) / (2 * width**2))
            wave += bump * torch.exp(1j * centre * along)
            envelope += bump
    kappa = wave.sum() / envelope.sum()
    return (wave - kappa * envelope) * slant / (2 * math.pi * width**2) * step**2


def convolve_directly(u, filter_):
    """Circular convolution by its definition."""
    n = len(u)
    index = (torch.arange(n)[:, None] - torch.arange(n)[None, :]) % n
    return torch.einsum("ijab,ab->ij", filter_[index[:, None, :, None], index[None, :, None, :]], u)


def move(u, shift):
    """Trigonometric interpolation at n + shift on both axes, without the highest frequency."""
    n = len(u)
    at = torch.arange(n, dtype=torch.float64)
    distance = at[:, None] + shift - at[None, :]
    k = torch.arange(-(n // 2) + 1, n // 2)
    matrix = torch.cos(2 * math.pi * distance[..., None] * k / n).sum(-1).to(u.dtype) / n
    return matrix @ u @ matrix.T


def scatter_slowly(layer, image):
    """S x of one image (H, W), path by path. Only the steps' scalar factors come from the layer."""
    size, last, angles = layer.grid[0], layer.scales, layer.angles
    if layer.padding == "zero":
        before = (size - layer.shape[0]) // 2
        x = torch.zeros(size, size, dtype=torch.float64)
        x[before : before + layer.shape[0], before : before + layer.shape[1]] = image
    else:
        wide = torch.cat([image, image.flip(1)], 1)
        x = torch.cat([wide, wide.flip(0)])
    tree = layer.design()
    first = 1 if layer.padding == "zero" else 0

    width = 0.8 * 2 ** (last - 1)

    def weights(place, resolution):
        samples = 2**resolution * torch.arange(size >> resolution).double()
        samples += (2**resolution - 1) / 2
        periods = (torch.exp(-((place - samples + m * size) ** 2) / (2 * width**2)) for m in RANGE)
        scale = 2**resolution * 2 ** ((last - resolution) / 2) / (math.sqrt(2 * math.pi) * width)
        return scale * sum(periods)

    def factor(step, resolution):
        """One over the norm of the step, read off its lowpass."""
        plain = weights((2**last - 1) / 2, resolution).sum() ** 2
        return step.low_rows[0].sum() * step.low_columns[0].sum() / plain

    def smooth(u, resolution, step):
        places = [2**last * (n + first) + (2**last - 1) / 2 for n in range(layer.output_size[0])]
        rows = [weights(place, resolution) for place in places]
        values = torch.stack([torch.stack([a @ u @ b for b in rows]) for a in rows])
        return values * factor(step, resolution)

    def modulus(u, resolution, scale, angle, step):
        y = convolve_directly(u + 0j, morlet_in_space(size, resolution, scale, angle, angles))
        t = 2 ** (scale - resolution)
        y = y if t == 1 else move(y, (t - 1) / 2)[::t, ::t]
        return t * y.abs() * factor(step, resolution)

    kept, deeper = [smooth(x, 0, tree.root)], []
    for j in range(last):
        once = [modulus(x, 0, j, a, tree.root) for a in range(angles)]
        kept += [smooth(u, j, tree.first[j]) for u in once]
        for k in range(j + 1, last) if layer.order == 2 else ():
            deeper += [
                smooth(modulus(u, j, k, b, tree.first[j]), k, tree.last[k - 1])
                for u in once
                for b in range(angles)
            ]
    return torch.stack(kept + deeper)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (8, {"angles": 3}),
        (8, {"angles": 2, "padding": "symmetric"}),
        (6, {"angles": 2, "scales": 1, "order": 1}),
        (8, {"angles": 1, "scales": 3}),
        (7, {"angles": 2}),
    ],
    ids=str,
)
def test_values_agree_with_direct_convolutions(size, options):
    layer = lip.Scattering2d((size, size), **DOUBLE, **options)
    image = torch.randn(size, size, dtype=torch.float64)
    slow = scatter_slowly(layer, image)
    fast = layer(image[None, None])[0]
    assert fast.shape == slow.shape
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-11)


def test_shapes_and_numbers_of_paths():
    layer = lip.Scattering2d((32, 32))
    assert layer.paths == 81
    assert layer(torch.rand(2, 3, 32, 32)).shape == (2, 243, 8, 8)
    assert lip.Scattering2d(28)(torch.rand(1, 1, 28, 28)).shape == (1, 81, 7, 7)
    wide = lip.Scattering2d((16, 24), scales=3, angles=4)
    assert wide.paths == 1 + 12 + 3 * 16
    assert wide(torch.rand(1, 2, 16, 24)).shape == (1, 2 * wide.paths, 2, 3)
    first = lip.Scattering2d((9, 16), order=1, angles=5)
    assert first(torch.rand(1, 1, 9, 16)).shape == (1, 11, 3, 4)
    assert lip.Scattering2d(8)(torch.rand(0, 1, 8, 8)).shape == (0, 81, 2, 2)


def test_colours_and_examples_stay_apart():
    layer = lip.Scattering2d(8, angles=2)
    x = torch.rand(3, 2, 8, 8)
    bad = x.clone()
    bad[1] = math.nan
    bad[2] = math.inf
    torch.testing.assert_close(layer(bad)[0], layer(x)[0], rtol=0, atol=1e-6)
    by_colour = torch.cat([layer(x[:, :1]), layer(x[:, 1:])], dim=1)
    torch.testing.assert_close(layer(x), by_colour, rtol=0, atol=1e-6)


def test_large_batches_are_computed_in_parts():
    layer = lip.Scattering2d(16, **DOUBLE)
    x = torch.randn(40, 2, 16, 16, dtype=torch.float64)
    assert 2 * 40 * layer._largest() > 1 << 18
    torch.testing.assert_close(layer(x), torch.cat([layer(one) for one in x.split(1)]))


# --- what scattering is known for ----------------------------------------------------------------


def natural(count, size, seed=0):
    """Images with the spectrum of natural ones, 1 / frequency, of mean zero."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.fft.fft2(torch.randn(count, 1, size, size, generator=generator).double())
    f = torch.fft.fftfreq(size).double()
    radius = (f[:, None] ** 2 + f[None, :] ** 2).sqrt()
    radius[0, 0] = math.inf
    return torch.fft.ifft2(noise * (1 / radius)).real


def shares(layer, x):
    """The fractions of the energy of images that coefficients of order 0, 1, 2 hold."""
    y = layer(x).square().unflatten(1, (x.shape[1], -1)).sum(dim=(0, 1, 3, 4)) / x.square().sum()
    first = 1 + layer.scales * layer.angles
    return y[0].item(), y[1:first].sum().item(), y[first:].sum().item()


def test_most_energy_is_kept_and_goes_deeper_with_the_scale():
    """Published of natural images: the first orders hold nearly all energy; the larger the scale,
    the less of it the smoothed image, the more the others. (Morlet wavelets do not cover high
    frequencies evenly: what is missing here is missing in their Littlewood-Paley sum.)"""
    x = natural(6, 32)
    layers = [lip.Scattering2d(32, scales=j, padding="symmetric", **DOUBLE) for j in (1, 2, 3)]
    found = [shares(layer, x) for layer in layers]
    for of_scale in found:
        assert 0.6 <= sum(of_scale) <= 1
        assert of_scale[2] < of_scale[1] < 4 * of_scale[0]
    zero, one, two = zip(*found, strict=True)
    assert zero[0] > zero[1] > zero[2]
    assert one[0] < one[1] < one[2]
    assert 0 == two[0] < two[1] < two[2]


def test_translations_matter_less_the_larger_the_scale():
    x = torch.zeros(4, 1, 32, 32, dtype=torch.float64)
    x[..., 8:24, 8:24] = natural(4, 16)
    moved = x.roll((1, 1), (-2, -1))
    layers = [lip.Scattering2d(32, scales=j, angles=4, **DOUBLE) for j in (1, 2, 3)]
    found = [((s(moved) - s(x)).norm() / s(x).norm()).item() for s in layers]
    raw = ((moved - x).norm() / x.norm()).item()
    assert raw > found[0] > found[1] > found[2]
    assert found[2] < raw / 4


def test_deformations_move_coefficients_little():
    """A wave packet of high frequency, stretched by 10%: its Fourier modulus hardly overlaps with
    that of the packet itself, its scattering coefficients are close to what they were."""

    def packet(stretch):
        t = (torch.arange(64, dtype=torch.float64) - 31.5) / stretch
        bump = torch.exp(-(t[:, None] ** 2 + t[None, :] ** 2) / (2 * 10**2))
        return (bump * torch.cos(2.2 * t)[:, None])[None, None]

    x, stretched = packet(1.0), packet(1.1)
    modulus = [torch.fft.fft2(image).abs() for image in (x, stretched)]
    fourier = (modulus[0] - modulus[1]).norm() / modulus[0].norm()
    layer = lip.Scattering2d(64, scales=3, **DOUBLE)
    scattered = (layer(x) - layer(stretched)).norm() / layer(x).norm()
    assert fourier > 1.0
    assert scattered < 0.25


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize(("axis", "angles"), [(-2, 6), (-1, 6), (-2, 3)])
def test_mirrored_images_have_mirrored_coefficients(padding, axis, angles):
    """Exactly, with angle a for angle pi - a: this is what symmetric padding rests on."""
    layer = lip.Scattering2d(16, angles=angles, padding=padding, **DOUBLE)
    x = torch.randn(1, 1, 16, 16, dtype=torch.float64)
    mirrored = layer(x.flip(axis))[0].flip(axis)
    turned = -torch.arange(angles) % angles
    first = 1 + torch.cat([j * angles + turned for j in range(2)])
    second = 1 + 2 * angles + (angles * turned[:, None] + turned[None, :]).flatten()
    order = torch.cat([torch.zeros(1, dtype=torch.long), first, second])
    torch.testing.assert_close(mirrored[order], layer(x)[0], rtol=0, atol=1e-12)


# --- in models -----------------------------------------------------------------------------------


def model_behind(*front, features=64 * 33):
    return nn.Sequential(*front, nn.Flatten(), lip.SpectralLinear(features, 3))


def test_the_rule_hands_the_constant_on():
    model = model_behind(
        lip.BoundedInput(2.0), lip.Scattering2d(8, angles=4, scales=1), features=16 * 5
    )
    report = clipless.sensitivity(model, loss=losses.CrossEntropy(), input_shape=(1, 8, 8))
    constant = model[1].lipschitz
    assert report.lipschitz == pytest.approx(constant)
    assert report.gradient_bounds["3.weight"] == pytest.approx(math.sqrt(2) * 2 * constant)


def test_layers_in_front_of_it_are_bounded():
    """A convolution before the transform: its gradients flow through the moduli."""
    model = nn.Sequential(
        lip.BoundedInput(1.0),
        lip.SpectralConv2d(1, 1, 3, padding="same"),
        lip.Scattering2d(8, angles=2, scales=1, padding="symmetric"),
        nn.Flatten(),
        lip.SpectralLinear(16 * 3, 4),
    )
    result = attack_bounds(
        model,
        loss=linear_functional(),
        input_shape=(1, 8, 8),
        targets=gaussian_targets(4),
        restarts=2,
        steps=25,
    )
    assert not result.violations()
    assert min(result.ratios.values()) >= 0.8, result.ratios


def test_a_guard_behind_it_is_enough_for_training():
    """Nothing in front of the guard is trained, so unbounded inputs and the sphere do no harm."""
    model = model_behind(
        lip.Scattering2d(8, angles=2, scales=1),
        lip.BoundedInput(1.0, mode="sphere"),
        features=16 * 3,
    )
    report = clipless.sensitivity(model, loss=losses.CrossEntropy(), input_shape=(1, 8, 8))
    assert report.gradient_bounds["3.weight"] == pytest.approx(math.sqrt(2))
    assert report.lipschitz == math.inf
    x = torch.rand(2, 1, 8, 8)
    x[1, 0, 0, 0] = math.nan
    assert torch.isfinite(model(x)).all()


def test_other_filters_are_refused():
    layer = lip.Scattering2d(8, angles=4, scales=1)
    model = model_behind(lip.BoundedInput(1.0), layer, features=80)
    with torch.no_grad():
        layer.root.wavelets_0.mul_(1.01)
    with pytest.raises(UnsupportedOperationError, match=r"1: its filters are not the ones"):
        clipless.sensitivity(model, loss=1.0, input_shape=(1, 8, 8))


def test_a_conversion_keeps_the_filters_or_is_refused():
    layer = lip.Scattering2d(8, angles=2)
    assert layer.is_intact()
    assert layer.double().is_intact()
    assert layer.float().is_intact()
    assert not layer.half().is_intact()


def test_other_sizes_are_refused():
    layer = lip.Scattering2d(8)
    for shape in [(1, 1, 8, 12), (1, 8, 8), (1, 1, 1, 8, 8)]:
        with pytest.raises(ValueError, match="made for images"):
            layer(torch.zeros(shape))
    model = nn.Sequential(lip.BoundedInput(1.0), layer)
    with pytest.raises(UnsupportedOperationError, match="made for images"):
        clipless.sensitivity(model, loss=1.0, input_shape=(1, 12, 12))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0, 8), {}, "shape"),
        ((8,), {}, "shape"),
        ((8.0, 8), {}, "shape"),
        ((8, 8), {"scales": 0}, "scales"),
        ((8, 8), {"angles": 0}, "angles"),
        ((8, 8), {"order": 3}, "order"),
        ((8, 8), {"padding": "reflect"}, "padding"),
        ((10, 8), {"padding": "symmetric"}, "multiples of 4"),
    ],
)
def test_arguments_are_checked(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        lip.Scattering2d(arguments, **options)


def test_nothing_is_trained_or_saved():
    layer = lip.Scattering2d((8, 12))
    assert not list(layer.parameters())
    assert not layer.state_dict()
    assert "Scattering2d(\n  (8, 12), scales=2, angles=8, order=2, padding='zero'" in repr(layer)


@pytest.mark.parametrize("options", [{}, {"padding": "symmetric"}, {"order": 1}], ids=str)
def test_exported_transforms_are_plain_torch(options):
    layer = lip.Scattering2d(8, angles=2, **options)
    exported = lip.to_torch(layer)
    assert not foreign_parts(exported)
    x = torch.rand(3, 2, 8, 8)
    torch.testing.assert_close(exported(x), layer(x), rtol=0, atol=1e-6)
    buffer = io.BytesIO()
    torch.save(exported, buffer)
    assert b"clipless" not in buffer.getvalue()
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert torch.equal(loaded(x), exported(x))
