"""Small files in the published formats, and small data sets made of them."""

import gzip
import io
import pickle
import struct
import tarfile

import numpy as np

from clipless.data import DatasetInfo, FileInfo
from clipless.data.sources._contents import checksum
from clipless.data.sources._layout import Layout, Source
from clipless.data.sources._readers import (
    read_cifar_archive,
    read_cifar_binary,
    read_cifar_python,
    read_idx_images,
    read_table_arrays,
)

IDX_CODES = {"u1": 8, "i1": 9, "i2": 11, "i4": 12, "f4": 13, "f8": 14}
RANDOM = np.random.default_rng(0)


def idx_bytes(array):
    code = IDX_CODES[array.dtype.str[1:]]
    header = bytes([0, 0, code, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def npz_bytes(**arrays):
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    return stream.getvalue()


def binary_batch(pixels, labels):
    return b"".join(bytes([k]) + row.tobytes() for k, row in zip(labels, pixels, strict=True))


def python2_batch(pixels, labels):
    """The bytes that Python 2 wrote, opcode by opcode: strings are byte strings, no encodings."""

    def text(value):
        return b"U" + bytes([len(value)]) + value

    def number(value):
        return b"J" + struct.pack("<i", value)

    raw = pixels.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
    )
    dtype = b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R"
    dtype += b"(K\x03" + text(b"|") + b"NNN" + number(-1) * 2 + b"K\x00tb"
    shape = number(pixels.shape[0]) + number(pixels.shape[1]) + b"\x86"
    state = b"(K\x01" + shape + dtype + b"\x89T" + struct.pack("<i", len(raw)) + raw + b"t"
    listed = b"](" + b"".join(b"K" + bytes([int(k)]) for k in labels) + b"e"
    items = text(b"batch_label") + text(b"training batch 1 of 5")
    items += text(b"labels") + listed + text(b"data") + array + state + b"b"
    return b"\x80\x02}(" + items + b"u."


def python3_batch(pixels, labels):
    return pickle.dumps({"data": pixels, "labels": [int(k) for k in labels]}, protocol=2)


def archive_bytes(members, *, mode="w:gz"):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode) as archive:
        for name, contents in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(contents)
            archive.addfile(member, io.BytesIO(contents))
    return stream.getvalue()


def images(rows, shape, classes=10):
    pixels = RANDOM.integers(0, 256, (rows, *shape), dtype=np.uint8)
    return pixels, RANDOM.integers(0, classes, rows, dtype=np.uint8)


def published(name, contents, urls=(), *, checked=True):
    """A file's facts as a publisher would state them, and its bytes on the server."""
    found = checksum(contents, like="sha256:") if checked else None
    raw = gzip.compress(contents) if name.endswith(".gz") and ".tar" not in name else contents
    return FileInfo(name=name, urls=urls, size=len(raw) + 64, checksum=found), raw


def info_of(name, files, shape, sizes, **others):
    facts = {"task": "multiclass", "classes": tuple("0123456789"), "value_range": (0.0, 1.0)}
    return DatasetInfo(
        name=name,
        title=name,
        train_size=sizes[0],
        test_size=sizes[1],
        example_shape=shape,
        files=tuple(files),
        homepage="",
        **(facts | others),
    )


def idx_source(name="digits", url=None):
    """A data set of 7 + 3 images of 4 x 5 pixels; also its files' bytes and its arrays."""
    arrays = [*images(7, (4, 5)), *images(3, (4, 5))]
    names = [f"{part}-{kind}.gz" for part in ("train", "t10k") for kind in ("images", "labels")]
    pairs = [
        published(file, idx_bytes(array), (f"{url}/{file}",) if url else ("http://localhost:9/x",))
        for file, array in zip(names, arrays, strict=True)
    ]
    files = tuple(file for file, _ in pairs)
    layout = Layout(files=files, folders=(name, f"{name}/raw"), read=read_idx_images)
    source = Source(info=info_of(name, files, (1, 4, 5), (7, 3)), layouts=(layout,))
    return source, {file.name: raw for file, raw in pairs}, arrays


def cifar_source():
    """A data set of 10 + 3 images in all of CIFAR-10's layouts; its batches."""
    batches = [images(2, (3072,)) for _ in range(5)] + [images(3, (3072,))]
    names = [f"data_batch_{k}" for k in range(1, 6)] + ["test_batch"]
    kinds = {"binary": (binary_batch, ".bin", "bin"), "python": (python2_batch, "", "py")}
    layouts: list[Layout] = []
    stored: dict[str, bytes] = {}
    for kind, (write, ending, folder) in kinds.items():
        members = {f"{n}{ending}": write(*b) for n, b in zip(names, batches, strict=True)}
        files = tuple(published(name, raw)[0] for name, raw in members.items())
        read = read_cifar_binary if kind == "binary" else read_cifar_python
        layouts.append(Layout(files=files, folders=(f"cifar-10-batches-{folder}",), read=read))
        stored |= {f"cifar-10-batches-{folder}/{name}": raw for name, raw in members.items()}
        name = f"cifar-10-{kind}.tar.gz"
        raw = archive_bytes({f"cifar-10-batches-{folder}/{n}": c for n, c in members.items()})
        file, _ = published(name, raw)
        layouts.append(Layout(files=(file,), folders=("small-cifar", "."), read=read_cifar_archive))
        stored[name] = raw
    info = info_of("small-cifar", layouts[-1].files, (3, 32, 32), (10, 3))
    return Source(info=info, layouts=tuple(layouts)), stored, batches


def table_source(name="people", urls=(), rows=20):
    x = RANDOM.normal(size=(rows, 4))
    y = RANDOM.integers(0, 2, rows)
    raw = npz_bytes(X=x, y=y)
    file, _ = published(f"{name}.npz", raw, urls, checked=False)
    test = -(-rows // 5)
    info = info_of(
        name,
        [file],
        (4,),
        (rows - test, test),
        task="binary",
        classes=("normal", "anomaly"),
        value_range=None,
        published_split=False,
    )
    layout = Layout(files=(file,), folders=("tables", "."), read=read_table_arrays)
    return Source(info=info, layouts=(layout,)), {file.name: raw}, (x, y)
