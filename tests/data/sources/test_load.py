"""`load`: found wherever it may lie, checked, warned about, or asked for in exact words."""

import gzip
import math
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch

from clipless.data import (
    SOURCES,
    DataFileError,
    DataNotFoundError,
    data_root,
    datasets,
    load,
    split_rows,
)
from tests.data.files import (
    cifar_source,
    idx_bytes,
    idx_source,
    images,
    npz_bytes,
    table_source,
)


def store(folder, files):
    for name, raw in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)


@pytest.fixture
def digits(monkeypatch):
    source, files, arrays = idx_source()
    monkeypatch.setitem(SOURCES, "digits", source)
    return files, arrays


@pytest.fixture
def people(monkeypatch):
    source, files, arrays = table_source()
    monkeypatch.setitem(SOURCES, "people", source)
    return files, arrays


@pytest.fixture
def small_cifar(monkeypatch):
    source, files, batches = cifar_source()
    monkeypatch.setitem(SOURCES, "small-cifar", source)
    return files, batches


@pytest.mark.parametrize("folder", ["digits", "digits/raw"])
@pytest.mark.parametrize("plain", [False, True])
def test_images_are_read_as_published(tmp_path, digits, folder, plain):
    files, arrays = digits
    if plain:
        files = {name.removesuffix(".gz"): gzip.decompress(raw) for name, raw in files.items()}
    store(tmp_path / folder, files)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = load("digits", root=tmp_path, download=False)
    assert data.verified
    assert data.train[0].dtype == torch.float32
    assert data.train[0].shape == (7, 1, 4, 5)
    assert data.test[0].shape == (3, 1, 4, 5)
    assert torch.equal(data.train[0], torch.from_numpy(arrays[0])[:, None] / 255)
    assert torch.equal(data.test[1], torch.from_numpy(arrays[3]).long())
    assert {path.parent for path in data.paths} == {tmp_path / folder}


def test_other_copies_are_read_with_a_warning(tmp_path, digits):
    """Another compression is no difference; other pixels are, and are said to be."""
    files, _ = digits
    again = gzip.compress(gzip.decompress(files["train-images.gz"]), compresslevel=1, mtime=5)
    assert again != files["train-images.gz"]
    store(tmp_path / "digits", files | {"train-images.gz": again})
    assert load("digits", root=tmp_path).verified
    store(tmp_path / "digits", {"train-images.gz": gzip.compress(idx_bytes(images(7, (4, 5))[0]))})
    with pytest.warns(
        UserWarning, match=r"digits: train-images.gz in .* differ.* checksums"
    ) as seen:
        data = load("digits", root=tmp_path)
    assert not data.verified
    assert seen[0].filename == __file__


WRONG = {
    "rows": ("train-images.gz", images(6, (4, 5))[0], r"\(6, 4, 5\).* expected \(7, 4, 5\)"),
    "size": ("t10k-images.gz", images(3, (5, 4))[0], r"\(3, 5, 4\).* expected \(3, 4, 5\)"),
    "type": ("t10k-images.gz", np.zeros((3, 4, 5), np.int16), "type >?int16|type >i2"),
    "labels": ("t10k-labels.gz", np.array([1, 12, 3], np.uint8), "0 to 9: 12 in row 1, 1 such row"),
    "count": ("train-labels.gz", np.zeros(8, np.uint8), r"\(8,\).* expected \(7,\)"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_files_that_do_not_fit_are_refused_by_name(tmp_path, digits, wrong):
    name, array, message = WRONG[wrong]
    store(tmp_path / "digits", digits[0] | {name: gzip.compress(idx_bytes(array))})
    with pytest.raises(DataFileError, match=f"{name}.*({message})"):
        load("digits", root=tmp_path)


def test_a_file_of_another_data_set_is_refused(tmp_path, digits, monkeypatch):
    """MNIST's and Fashion-MNIST's files have the same names, shapes and labels."""
    source, files, _ = idx_source("clothes")
    monkeypatch.setitem(SOURCES, "clothes", source)
    store(tmp_path / "clothes", digits[0])
    with pytest.raises(DataFileError, match=r"train-images.gz is train-images.gz of digits, not"):
        load("clothes", root=tmp_path)
    store(tmp_path / "clothes", files)
    assert load("clothes", root=tmp_path).verified


def test_what_is_missing_is_asked_for_by_name(tmp_path, digits):
    with pytest.raises(DataNotFoundError) as nothing:
        load("digits", root=tmp_path, download=False)
    for name in digits[0]:
        assert f"  {name}    from http" in str(nothing.value)
    assert f"Put into {tmp_path / 'digits'}:" in str(nothing.value)
    assert "CLIPLESS_DATA" in str(nothing.value)
    raw = dict(list(digits[0].items())[1:])
    store(tmp_path / "digits" / "raw", raw)
    with pytest.raises(FileNotFoundError) as one:
        load("digits", root=tmp_path, download=False)
    assert f"Put into {tmp_path / 'digits' / 'raw'}:\n  train-images.gz    from" in str(one.value)
    assert "t10k" not in str(one.value)


def layout_files(files, kind):
    return {name: raw for name, raw in files.items() if kind in name}


@pytest.mark.parametrize("kind", ["batches-bin", "batches-py", "binary.tar.gz", "python.tar.gz"])
def test_cifar_layouts_agree(tmp_path, small_cifar, kind):
    files, batches = small_cifar
    store(tmp_path, layout_files(files, kind))
    data = load("small_cifar", root=tmp_path, download=False)
    assert data.verified
    pixels = np.concatenate([pixels for pixels, _ in batches[:5]]).reshape(10, 3, 32, 32)
    assert torch.equal(data.train[0], torch.from_numpy(pixels) / 255)
    assert data.test[1].tolist() == batches[5][1].tolist()


def test_cifar_troubles_are_named(tmp_path, small_cifar):
    files, _ = small_cifar
    store(tmp_path, layout_files(files, "batches-bin"))
    folder = tmp_path / "cifar-10-batches-bin"
    whole = (folder / "data_batch_3.bin").read_bytes()
    (folder / "data_batch_3.bin").write_bytes(bytes([77]) + whole[1:])
    with pytest.raises(
        DataFileError, match=r"data_batch_3.bin has labels outside 0 to 9: 77 in row 0"
    ):
        load("small-cifar", root=tmp_path)
    (folder / "data_batch_3.bin").unlink()
    with pytest.raises(DataNotFoundError, match=r"cifar-10-batches-bin lacks data_batch_3.bin\."):
        load("small-cifar", root=tmp_path, download=False)
    store(tmp_path, layout_files(files, "python.tar.gz"))
    assert load("small-cifar", root=tmp_path).paths[0].name == "cifar-10-python.tar.gz"
    broken = files["cifar-10-python.tar.gz"][:-40]
    store(tmp_path, {"cifar-10-python.tar.gz": broken})
    with pytest.raises(DataFileError, match=r"python.tar.gz is a truncated or corrupt"):
        load("small-cifar", root=tmp_path)


@pytest.mark.parametrize("folder", [".", "tables"])
def test_tables_are_split_by_the_seed_alone(tmp_path, people, folder):
    files, (x, y) = people
    store(tmp_path / folder, files)
    data = load("people", root=tmp_path, split_seed=3)
    train, test = split_rows(20, test_fraction=0.2, seed=3)
    assert torch.equal(data.train[0], torch.from_numpy(x).float()[train])
    assert torch.equal(data.test[1], torch.from_numpy(y)[test])
    assert not data.verified
    store(tmp_path / folder, {"people.npz": npz_bytes(X=-x, y=1 - y)})
    assert torch.equal(load("people", root=tmp_path, split_seed=3).train[0], -data.train[0])
    other = load("people", root=tmp_path, split_seed=4)
    assert not torch.equal(other.train[0], -data.train[0])


def test_tables_that_do_not_fit_are_refused(tmp_path, people):
    _, (x, y) = people
    infinite, overflow, third = x.copy(), x.copy(), y.copy()
    infinite[4, 1], overflow[3, 2], third[5] = math.inf, 1e300, 2
    cases = {
        "1 rows with values that are no finite": npz_bytes(X=infinite, y=y),
        "1 rows with values that are no finite float32": npz_bytes(X=overflow, y=y),
        "labels outside 0 to 1: 2 in row 5": npz_bytes(X=x, y=third),
        "labels outside 0 to 1: 0.5 in row 0": npz_bytes(X=x, y=np.full(20, 0.5)),
        r"X has shape \(19, 4\)": npz_bytes(X=x[1:], y=y[1:]),
    }
    for message, raw in cases.items():
        store(tmp_path, {"people.npz": raw})
        with pytest.raises(DataFileError, match=f"people.npz.*{message}"):
            load("people", root=tmp_path)


def test_a_stated_range_is_checked(tmp_path):
    """The norm bound rests on it."""
    raw = npz_bytes(X=np.full((202_599, 39), 2, np.int8), y=np.zeros(202_599, np.int8))
    store(tmp_path, {"8_celeba.npz": raw})
    with pytest.raises(DataFileError, match=r"values in \[2, 2\], expected \[0, 1\]"):
        load("celeba", root=tmp_path)


def test_the_root(tmp_path, digits, monkeypatch):
    store(tmp_path / "digits", digits[0])
    monkeypatch.setenv("CLIPLESS_DATA", str(tmp_path))
    assert load("digits", download=False).paths[0].parent == tmp_path / "digits"
    assert load("digits", root=tmp_path / "digits", download=False).verified  # named like it
    with pytest.raises(DataNotFoundError):
        load("digits", root=tmp_path / "elsewhere", download=False)
    monkeypatch.delenv("CLIPLESS_DATA")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_root(None) == tmp_path / "cache" / "clipless"


def test_names(tmp_path):
    for name in ("MNIST", "Fashion_MNIST", "aloi", "Magic.Gamma"):
        with pytest.raises(DataNotFoundError):
            load(name, root=tmp_path, download=False)
    with pytest.raises(ValueError, match=r"no data set 'cifar-10'. Did you mean 'cifar10'.*yeast"):
        load("cifar-10", root=tmp_path)
    with pytest.raises(ValueError, match="published test set"):
        load("mnist", root=tmp_path, split_seed=1)


def test_the_facts_of_the_table():
    """Sizes of the training sets as in the paper's table; bounds; addresses."""
    infos = datasets()
    sizes = {
        "ALOI": (39_704, 27),
        "campaign": (33_031, 62),
        "celeba": (162_022, 39),
        "census": (239_328, 500),
        "donors": (495_490, 10),
        "magic.gamma": (15_275, 10),
        "shuttle": (39_345, 9),
        "skin": (195_937, 3),
        "yeast": (1_190, 8),
    }
    assert set(infos) == {"mnist", "fashion-mnist", "cifar10", *sizes}
    for name, (rows, features) in sizes.items():
        info = infos[name]
        assert (info.train_size, info.example_shape) == (rows, (features,))
        whole = info.train_size + info.test_size
        assert [len(part) for part in split_rows(whole)] == [info.train_size, info.test_size]
    assert infos["mnist"].norm_bound == 28.0
    assert infos["cifar10"].norm_bound == pytest.approx(math.sqrt(3072), rel=1e-15)
    for info in infos.values():  # not a rounding error below it
        if info.norm_bound is not None:
            assert Fraction(info.norm_bound) ** 2 >= math.prod(info.example_shape)
    assert infos["magic.gamma"].norm_bound is None
    for source in SOURCES.values():
        assert source.info.files == source.published.files
        for file in (file for layout in source.layouts for file in layout.files):
            if file.checksum is None:  # nothing but the connection vouches for it
                assert file.urls
                assert all(url.startswith("https://") for url in file.urls)
            else:
                algorithm, _, digest = file.checksum.partition(":")
                assert len(digest) == {"sha256": 64, "md5": 32}[algorithm]


def test_split_rows():
    train, test = split_rows(1484, test_fraction=0.2, seed=7)
    assert sorted(torch.cat([train, test]).tolist()) == list(range(1484))
    assert torch.equal(train, split_rows(1484, test_fraction=0.2, seed=7)[0])
    assert not torch.equal(train, split_rows(1484, test_fraction=0.2, seed=8)[0])
    for fraction in (0.07, 0.2, 0.9):
        drawn = len(split_rows(100_000, test_fraction=fraction)[1])
        assert abs(drawn - 1e5 * fraction) < 5 * math.sqrt(1e5 * fraction * (1 - fraction))
    for count, fraction in ((1, 0.5), (0, 0.2), (10, 0.0), (10, 1.0)):
        with pytest.raises(ValueError, match=r"split|between"):
            split_rows(count, test_fraction=fraction)


@pytest.mark.parametrize("seed", range(5))
def test_a_row_that_is_appended_moves_no_other_row(seed):
    train, test = split_rows(8000, seed=seed)
    for count in (8001, 8002, 16_000):
        longer, tested = (set(part.tolist()) for part in split_rows(count, seed=seed))
        assert {row for row in longer if row < 8000} == set(train.tolist())
        assert {row for row in tested if row < 8000} == set(test.tolist())
