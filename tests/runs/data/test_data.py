"""Data of one's own: arrays, tables, colour spaces, limits, splits; and what is wrong with them."""

import numpy as np
import pytest
import torch

from clipless.data import DataFileError, DataNotFoundError
from clipless.runs import ConfigError, DataConfig, load_data

RANDOM = np.random.default_rng(0)
GREY = RANDOM.integers(0, 256, (40, 6, 6), dtype=np.uint8)
LABELS = np.arange(40) % 3


def saved(tmp_path, **arrays):
    np.savez(tmp_path / "data.npz", **arrays)
    return DataConfig(file=str(tmp_path / "data.npz"), class_count=3)


def test_pixels_become_images(tmp_path):
    data = load_data(saved(tmp_path, x=GREY, y=LABELS))
    assert data.kind == "images"
    assert data.input_shape == (1, 6, 6)
    assert data.classes == 3
    assert data.unit == "pixels from 0 to 1"
    assert len(data.train[0]) + len(data.test[0]) == 40
    assert 2 <= len(data.test[0]) <= 16
    assert data.train[0].max() <= 1.0
    assert data.train[0].dtype == torch.float32


def test_features_and_a_test_set(tmp_path):
    x = RANDOM.normal(size=(20, 5))
    config = saved(tmp_path, x=x, y=LABELS[:20], x_test=x[:9], y_test=LABELS[:9])
    data = load_data(config)
    assert (data.kind, data.input_shape) == ("vectors", (5,))
    assert torch.equal(data.test[0], torch.from_numpy(x[:9]).float())
    assert data.unit == "the numbers of the file"


def test_the_split_depends_on_its_seed_alone(tmp_path):
    from dataclasses import replace

    config = saved(tmp_path, x=GREY, y=LABELS)
    first, again = load_data(config), load_data(config)
    assert torch.equal(first.train[0], again.train[0])
    other = load_data(replace(config, split_seed=1))
    assert not torch.equal(first.train[0], other.train[0])
    limited = load_data(replace(config, limit=10))
    assert torch.equal(limited.train[0], first.train[0][:10])
    assert torch.equal(limited.test[0], first.test[0])


def test_colour_spaces_carry_their_constant(tmp_path):
    from dataclasses import replace

    x = RANDOM.integers(0, 256, (16, 3, 4, 4), dtype=np.uint8)
    config = saved(tmp_path, x=x, y=LABELS[:16])
    data = load_data(replace(config, colour="grayscale"))
    assert data.input_shape == (1, 4, 4)
    assert 0.66 < data.input_lipschitz < 0.67
    with pytest.raises(ConfigError, match="RGB"):
        load_data(replace(saved(tmp_path, x=GREY, y=LABELS), colour="yuv"))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": GREY}, "must hold x and y"),
        ({"x": GREY, "y": LABELS, "z": LABELS}, "must hold x and y"),
        ({"x": GREY, "y": LABELS, "x_test": GREY}, "must hold x and y"),
        ({"x": GREY, "y": LABELS[:9]}, "40 class numbers"),
        ({"x": GREY, "y": LABELS.astype(float)}, "class numbers"),
        ({"x": GREY[:3], "y": LABELS[:3]}, "at least 8 rows"),
        ({"x": LABELS, "y": LABELS}, "shape"),
        ({"x": GREY.astype(str), "y": LABELS}, "numbers"),
        ({"x": GREY, "y": LABELS, "x_test": GREY[:, :5], "y_test": LABELS}, "differ in type"),
    ],
)
def test_bad_arrays(tmp_path, arrays, message):
    with pytest.raises(DataFileError, match=message):
        load_data(saved(tmp_path, **arrays))


def test_the_number_of_classes_is_not_read_off_private_labels(tmp_path):
    config = saved(tmp_path, x=GREY, y=LABELS)
    with pytest.raises(ConfigError, match="class_count"):
        load_data(DataConfig(file=config.file))
    with pytest.raises(ConfigError, match="at least 2"):
        DataConfig(file=config.file, class_count=1)
    odd = LABELS.copy()
    odd[7], odd[8] = 1000, -1
    plain, found = load_data(config), load_data(saved(tmp_path, x=GREY, y=odd))
    assert found.classes == plain.classes == 3
    # Examples of other labels keep their place, and hold nothing.
    for (x, y), (plain_x, plain_y) in ((found.train, plain.train), (found.test, plain.test)):
        changed = (x != plain_x).flatten(1).any(1)
        assert (x[changed] == 0).all()
        assert (y[changed] == 0).all()
        assert torch.equal(y[~changed], plain_y[~changed])
    assert (found.train[0] == 0).flatten(1).all(1).sum() + (found.test[0] == 0).flatten(1).all(
        1
    ).sum() == 2


def test_nothing_is_unpickled(tmp_path):
    with pytest.raises(DataFileError, match=r"readable \.npz"):
        load_data(saved(tmp_path, x=np.array([{}] * 10, dtype=object), y=LABELS[:10]))


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(DataNotFoundError, match=r"none\.npz"):
        load_data(DataConfig(file=str(tmp_path / "none.npz")))
    (tmp_path / "bad.npz").write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(DataFileError, match=r"bad\.npz"):
        load_data(DataConfig(file=str(tmp_path / "bad.npz")))


def test_tables(tmp_path):
    path = tmp_path / "people.csv"
    rows = "".join(f"{20 + k % 50},{'ab'[k % 2]},{k % 2}\n" for k in range(50))
    path.write_text("age,job,income\n" + rows)
    data = load_data(DataConfig(file=str(path), target="income"))
    assert (data.kind, data.input_shape) == ("table", (2,))
    assert len(data.train[0]) + len(data.test[0]) == 50
    assert 3 <= len(data.test[0]) <= 20
    assert list(data.train[0].columns) == ["age", "job"]
    with pytest.raises(DataFileError, match="Did you mean 'income'"):
        load_data(DataConfig(file=str(path), target="incom"))
