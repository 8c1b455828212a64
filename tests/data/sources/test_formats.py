"""The file formats: what is written is read; what is damaged is refused by name."""

import gzip
import os
import pickle
import struct

import numpy as np
import pytest
import torch

from clipless.data import DataFileError, DataNotFoundError, read_idx
from clipless.data.sources._cifar import parse_binary_batch, parse_python_batch, read_members
from clipless.data.sources._idx import parse_idx
from clipless.data.sources._npz import parse_npz
from tests.data.files import (
    IDX_CODES,
    archive_bytes,
    binary_batch,
    idx_bytes,
    images,
    npz_bytes,
    python2_batch,
    python3_batch,
)


@pytest.mark.parametrize("code", IDX_CODES)
@pytest.mark.parametrize("compress", [gzip.compress, bytes], ids=["gz", "plain"])
def test_idx_is_read(tmp_path, code, compress):
    array = (np.arange(24) - 3).astype(code).reshape(2, 3, 4)
    path = tmp_path / "numbers"
    path.write_bytes(compress(idx_bytes(array)))
    read = read_idx(path)
    assert read.shape == (2, 3, 4)
    assert read.dtype == torch.from_numpy(array).dtype
    assert (read.numpy() == array).all()


WHOLE = idx_bytes(np.arange(60, dtype=np.uint8).reshape(5, 12))
ZIPPED = gzip.compress(WHOLE)
BROKEN_IDX = {
    "empty": (b"", "begins with nothing"),
    "magic": (b"\x89PNG" + WHOLE[4:], "begins with 89 50 4e 47"),
    "type": (b"\0\0\x0a" + WHOLE[3:], "begins with 00 00 0a 02"),
    "header": (WHOLE[:9], "ends within its header of 12 bytes"),
    "truncated": (WHOLE[:-1], "truncated: a header for shape .5, 12. makes 72 bytes.* are 71"),
    "too long": (WHOLE + b"\0", "too long: .* makes 72 bytes.* are 73"),
    "false header": (
        WHOLE[:4] + b"\xff" * 8 + WHOLE[12:],
        "makes 18,446,744,065,119,617,037 bytes",
    ),
    "truncated gzip": (ZIPPED[:-12], "truncated or corrupt gzip"),
    "corrupt gzip": (ZIPPED[:20] + b"\xff\xff" + ZIPPED[22:], "truncated or corrupt gzip"),
}


@pytest.mark.parametrize("broken", BROKEN_IDX)
def test_broken_idx_is_refused_by_name(tmp_path, broken):
    contents, message = BROKEN_IDX[broken]
    path = tmp_path / "train-images"
    path.write_bytes(contents)
    with pytest.raises(DataFileError, match=f"train-images.*{message}"):
        read_idx(path)


def test_missing_idx_is_an_ordinary_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_idx(tmp_path / "nowhere")
    assert issubclass(DataNotFoundError, FileNotFoundError)


@pytest.mark.parametrize(
    ("write", "read"),
    [
        (binary_batch, parse_binary_batch),
        (python2_batch, parse_python_batch),
        (python3_batch, parse_python_batch),
    ],
)
def test_cifar_batches_are_read(write, read):
    pixels, labels = images(4, (3072,))
    found_pixels, found_labels = read(write(pixels, labels), rows=4, where="batch")
    assert (found_pixels == pixels).all()
    assert (found_labels == labels).all()


def test_the_hand_written_pickle_is_what_python_reads():
    """Otherwise the layout would be tested against our own idea of it."""
    pixels, labels = images(4, (3072,))
    table = pickle.loads(python2_batch(pixels, labels), encoding="bytes")
    assert (table[b"data"] == pixels).all()
    assert table[b"labels"] == labels.tolist()


class Evil:
    """Pickles to a call of any function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def test_a_pickle_runs_nothing(tmp_path):
    pixels, labels = images(2, (3072,))
    mark = tmp_path / "it ran"
    for evil in (Evil(os.mkdir, str(mark)), Evil(eval, f"open({str(mark)!r}, 'w')")):
        batch = {"data": pixels, "labels": labels.tolist(), "extra": evil}
        raw = pickle.dumps(batch, protocol=2)
        with pytest.raises(DataFileError, match=r"asks for (posix\.mkdir|builtins\.eval|\w+\.)"):
            parse_python_batch(raw, rows=2, where="batch")
        assert not mark.exists()
        pickle.loads(raw)  # the same bytes, read by pickle, would have
        assert mark.exists()
        mark.rmdir() if mark.is_dir() else mark.unlink()


@pytest.mark.parametrize(
    "attribute", ["numpy.core.multiarray\nscalar", "numpy\nload", "numpy.lib.npyio\nload"]
)
def test_a_pickle_gets_nothing_else_of_numpy(attribute):
    raw = b"\x80\x02c" + attribute.encode() + b"\n."
    with pytest.raises(DataFileError, match="not allowed"):
        parse_python_batch(raw, rows=2, where="batch")


PIXELS, LABELS = images(2, (3072,))
BROKEN_PYTHON = {
    "no dictionary": (pickle.dumps([1]), "a list, not a dictionary"),
    "no data": (pickle.dumps({"labels": [1, 2]}), "no array `data`"),
    "other rows": (python2_batch(*images(3, (3072,))), "3 labels, expected 2"),
    "other width": (python2_batch(PIXELS[:, :3000].copy(), LABELS), "not an array of 2 x 3072"),
    "other type": (python3_batch(PIXELS.astype(np.int16), LABELS), "not an array of 2 x 3072"),
    "objects": (python3_batch(PIXELS.astype(object), LABELS), "not an array of 2 x 3072"),
    "transposed": (python3_batch(np.asfortranarray(PIXELS), LABELS), "not an array of 2 x 3072"),
    "truncated": (python2_batch(PIXELS, LABELS)[:3000], "truncated or corrupt"),
    "noise": (bytes(range(256)), "truncated or corrupt"),
}


@pytest.mark.parametrize("broken", BROKEN_PYTHON)
def test_broken_python_batches_are_refused(broken):
    contents, message = BROKEN_PYTHON[broken]
    with pytest.raises(DataFileError, match=f"batch_7.*{message}"):
        parse_python_batch(contents, rows=2, where="batch_7")


def test_every_damaged_byte_of_a_pickle_is_survived():
    """Damage is refused or reads as other pixels; nothing else is ever raised."""
    whole = python2_batch(PIXELS, LABELS)
    start = whole.index(PIXELS.tobytes())
    places = [*range(start), *range(start + PIXELS.size, len(whole))]
    refused = 0
    for place in places:
        for value in (0, 255, whole[place] ^ 1):
            damaged = whole[:place] + bytes([value]) + whole[place + 1 :]
            try:
                pixels, labels = parse_python_batch(damaged, rows=2, where="batch")
            except DataFileError:
                refused += 1
            else:
                assert pixels.shape == (2, 3072)
                assert labels.shape == (2,)
    assert refused > len(places)


def test_broken_binary_batches_are_refused():
    whole = binary_batch(PIXELS, LABELS)
    with pytest.raises(DataFileError, match=r"batch_7 is truncated.*6,146, and there are 6,145"):
        parse_binary_batch(whole[:-1], rows=2, where="batch_7")
    with pytest.raises(DataFileError, match=r"batch_7 is too long.*6,146, and there are 9,219"):
        parse_binary_batch(whole + whole[:3073], rows=2, where="batch_7")


def test_archives_are_read_without_writing_anything(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    raw = archive_bytes({"../../a.bin": b"1", "/etc/b.bin": b"2", "other": b"3"})
    assert read_members(raw, names=["a.bin", "b.bin"], where="it") == [b"1", b"2"]
    assert list(tmp_path.iterdir()) == []
    plain = archive_bytes({"x/a.bin": b"1"}, mode="w")
    assert read_members(plain, names=["a.bin"], where="it") == [b"1"]


def test_broken_archives_are_refused():
    whole = archive_bytes({"a.bin": os.urandom(5000), "b.bin": os.urandom(5000)})
    for broken in (whole[:4000], whole[:-30], b"", b"no archive"):
        with pytest.raises(DataFileError, match=r"cifar.tar.gz"):
            read_members(broken, names=["a.bin", "b.bin"], where="cifar.tar.gz")
    with pytest.raises(DataFileError, match=r"has no c.bin in it"):
        read_members(whole, names=["a.bin", "c.bin"], where="cifar.tar.gz")


def test_npz_is_read():
    x, y = np.arange(12.0).reshape(4, 3), np.array([0, 1, 1, 0])
    for labels in (y, y[:, None], y.astype(float)):
        found_x, found_y = parse_npz(npz_bytes(X=x, y=labels), shape=(4, 3), where="it")
        assert (found_x == x).all()
        assert (found_y == y).all()


def test_broken_npz_is_refused(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(40, 3)), np.zeros(40, int)
    whole = npz_bytes(X=x, y=y)
    middle = whole.index(b"X.npy") + 200
    flipped = whole[:middle] + bytes([whole[middle] ^ 16]) + whole[middle + 1 :]
    mark = tmp_path / "it ran"
    objects = npz_bytes(X=np.array([[Evil(os.mkdir, str(mark))] * 3] * 40, object), y=y)
    broken = {
        "corrupt": (flipped, "truncated or corrupt"),
        "truncated": (whole[:-50], "truncated or corrupt"),
        "html": (b"<html>not found</html>", "truncated or corrupt"),
        "keys": (npz_bytes(X=x), r"has \['X'\], not X and y"),
        "rows": (npz_bytes(X=x[:39], y=y), r"X has shape \(39, 3\), expected \(40, 3\)"),
        "labels": (npz_bytes(X=x, y=y[:39]), r"y has shape \(39,\), expected \(40,\)"),
        "objects": (objects, "X holds values of type object"),
        "text": (npz_bytes(X=x.astype(str), y=y), "X holds values of type <U"),
    }
    for contents, message in broken.values():
        with pytest.raises(DataFileError, match=f"5_people.npz.*{message}"):
            parse_npz(contents, shape=(40, 3), where="5_people.npz")
    assert not mark.exists()


def test_idx_headers_are_not_believed():
    """A header that promises terabytes is compared with the file, not allocated."""
    false = bytes([0, 0, 14, 4]) + struct.pack(">4I", *[60_000] * 4) + bytes(100)
    with pytest.raises(DataFileError, match="truncated"):
        parse_idx(false, where="it")
