"""Crops and flips: one draw for each example, norms never increased."""

import pytest
import torch

from clipless.data import Augmentation, Compose, RandomCrop, RandomFlip

ALL = [RandomCrop(padding=2), RandomFlip(), Compose(RandomFlip(), RandomCrop(padding=3))]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("augment", ALL, ids=repr)
def test_norms_are_never_increased(augment):
    x = torch.randn(500, 2, 5, 6, dtype=torch.float64)
    y = augment(x, generator=seeded())
    assert y.shape == x.shape
    assert not torch.equal(x, y)
    before, after = (t.flatten(1).norm(dim=1) for t in (x, y))
    assert (after <= before * (1 + 1e-15)).all()
    assert augment.lipschitz == 1.0


@pytest.mark.parametrize("augment", ALL, ids=repr)
def test_every_draw_is_linear_with_norm_at_most_one(augment):
    """The Jacobian of whole draws, by its singular values."""
    norms = []
    for seed in range(30):
        matrix = torch.stack(
            [
                augment(unit.view(1, 1, 4, 4), generator=seeded(seed)).flatten()
                for unit in torch.eye(16, dtype=torch.float64)
            ]
        )
        x = torch.randn(1, 1, 4, 4, dtype=torch.float64)
        assert torch.equal(augment(x, generator=seeded(seed)).flatten(), x.flatten() @ matrix)
        norms.append(torch.linalg.matrix_norm(matrix, 2).item())
    assert max(norms) == 1.0


@pytest.mark.parametrize("augment", ALL, ids=repr)
def test_examples_do_not_touch_each_other(augment):
    x = torch.rand(20, 1, 8, 8)
    other = x.clone()
    other[7] = 100.0
    first, second = augment(x, generator=seeded(3)), augment(other, generator=seeded(3))
    rest = torch.arange(20) != 7
    assert torch.equal(first[rest], second[rest])
    assert not torch.equal(first[7], second[7])


def test_crops_are_shifts_each_as_likely_as_the_other():
    image = torch.zeros(1, 1, 7, 7)
    image[0, 0, 3, 3] = 1.0
    rows = 9000
    crops = RandomCrop(padding=1)(image.expand(rows, -1, -1, -1), generator=seeded())
    assert (crops.sum(dim=(1, 2, 3)) == 1).all()
    counts = crops.sum(dim=(0, 1))[2:5, 2:5]
    assert counts.sum() == rows
    # Chi-square, 8 degrees of freedom: 26.1 is exceeded once in a thousand times.
    assert ((counts - rows / 9) ** 2 / (rows / 9)).sum() < 26.1
    one = RandomCrop(padding=2)(torch.arange(9.0).view(1, 1, 3, 3), generator=seeded(5))[0, 0]
    padded = torch.nn.functional.pad(torch.arange(9.0).view(3, 3), (2, 2, 2, 2))
    windows = [padded[i : i + 3, j : j + 3] for i in range(5) for j in range(5)]
    assert sum(torch.equal(one, window) for window in windows) >= 1


@pytest.mark.parametrize("augment", ALL[:2], ids=repr)
def test_draws_do_not_depend_on_how_many_follow(augment):
    x = torch.rand(50, 1, 8, 8)
    assert torch.equal(augment(x[:20], seeded()), augment(x, seeded())[:20])


def test_flips_mirror_half_of_the_images():
    x = torch.rand(4000, 2, 3, 5)
    y = RandomFlip()(x, generator=seeded())
    flipped = (y == x.flip(3)).flatten(1).all(dim=1)
    assert ((y == x).flatten(1).all(dim=1) ^ flipped).all()
    assert abs(flipped.sum().item() - 2000) < 4 * 1000**0.5  # four standard deviations


@pytest.mark.parametrize("augment", ALL, ids=repr)
def test_the_generator_decides(augment):
    x = torch.rand(64, 3, 8, 8)
    state = torch.get_rng_state()
    assert torch.equal(augment(x, seeded(1)), augment(x, seeded(1)))
    assert not torch.equal(augment(x, seeded(1)), augment(x, seeded(2)))
    assert torch.equal(torch.get_rng_state(), state)
    generator = seeded(1)
    assert not torch.equal(augment(x, generator), augment(x, generator))


@pytest.mark.parametrize("augment", ALL, ids=repr)
def test_empty_and_single_batches(augment):
    assert augment(torch.rand(0, 3, 8, 8), generator=seeded()).shape == (0, 3, 8, 8)
    assert augment(torch.rand(1, 3, 8, 8), generator=seeded()).shape == (1, 3, 8, 8)
    with pytest.raises(ValueError, match=r"\(batch, channels, height, width\), got \(8, 8\)"):
        augment(torch.rand(8, 8), generator=seeded())


def test_compose_multiplies_factors_and_refuses_strangers():
    class Double:
        lipschitz = 2.0

        def __call__(self, x, generator):
            return 2 * x

    assert isinstance(Double(), Augmentation)
    assert Compose(Double(), RandomFlip(), Double()).lipschitz == 4.0
    assert Compose().lipschitz == 1.0
    with pytest.raises(TypeError, match="is no augmentation"):
        Compose(torch.flip)
    for padding in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="padding"):
            RandomCrop(padding)
