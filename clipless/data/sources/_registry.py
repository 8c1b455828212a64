"""The data sets that are known by name: sizes, checksums, addresses, licences."""

from __future__ import annotations

from clipless.data._split import split_sizes
from clipless.data.sources._info import DatasetInfo, FileInfo
from clipless.data.sources._layout import Layout, Source
from clipless.data.sources._readers import (
    read_cifar_archive,
    read_cifar_binary,
    read_cifar_python,
    read_idx_images,
    read_table_arrays,
)

_IDX_NAMES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)


def _idx_source(
    *,
    name: str,
    title: str,
    classes: tuple[str, ...],
    mirrors: tuple[str, ...],
    sizes: tuple[int, ...],
    checksums: tuple[str, ...],
    folders: tuple[str, ...],
    homepage: str,
    licence: str,
) -> Source:
    files = tuple(
        FileInfo(
            name=file,
            urls=tuple(mirror + file for mirror in mirrors),
            size=size,
            checksum=f"sha256:{checksum}",
        )
        for file, size, checksum in zip(_IDX_NAMES, sizes, checksums, strict=True)
    )
    info = DatasetInfo(
        name=name,
        title=title,
        task="multiclass",
        train_size=60_000,
        test_size=10_000,
        example_shape=(1, 28, 28),
        classes=classes,
        value_range=(0.0, 1.0),
        files=files,
        homepage=homepage,
        licence=licence,
    )
    layout = Layout(files=files, folders=(name, *folders), read=read_idx_images)
    return Source(info=info, layouts=(layout,))


_MNIST = _idx_source(
    name="mnist",
    title="MNIST, handwritten digits",
    classes=tuple("0123456789"),
    mirrors=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    sizes=(9_912_422, 28_881, 1_648_877, 4_542),
    checksums=(
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
    folders=("MNIST/raw", "MNIST"),
    homepage="http://yann.lecun.com/exdb/mnist/",
    licence="CC BY-SA 3.0",
)

_FASHION_MNIST = _idx_source(
    name="fashion-mnist",
    title="Fashion-MNIST, pictures of clothing",
    classes=(
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
    mirrors=(
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ),
    sizes=(26_421_880, 29_515, 4_422_102, 5_148),
    checksums=(
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
    folders=("fashion_mnist", "FashionMNIST/raw", "FashionMNIST"),
    homepage="https://github.com/zalandoresearch/fashion-mnist",
    licence="MIT",
)


def _cifar10() -> Source:
    binary = FileInfo(
        name="cifar-10-binary.tar.gz",
        urls=(
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            "https://storage.googleapis.com/s4tf-hosted-binaries/datasets/CIFAR10/"
            "cifar-10-binary.tar.gz",
        ),
        size=170_052_171,
        checksum="sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    )
    python = FileInfo(
        name="cifar-10-python.tar.gz",
        urls=(),
        size=170_498_071,
        checksum="sha256:6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
    )
    binary_batches = {
        "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
        "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    }
    python_batches = {
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    }
    info = DatasetInfo(
        name="cifar10",
        title="CIFAR-10, small colour photographs",
        task="multiclass",
        train_size=50_000,
        test_size=10_000,
        example_shape=(3, 32, 32),
        classes=(
            "airplane",
            "automobile",
            "bird",
            "cat",
            "deer",
            "dog",
            "frog",
            "horse",
            "ship",
            "truck",
        ),
        value_range=(0.0, 1.0),
        files=(binary,),
        homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
    )
    homes = ("", "cifar10/", "CIFAR10/", "cifar-10/")
    return Source(
        info=info,
        layouts=(
            Layout(
                files=_unpublished("sha256", binary_batches),
                folders=(*(f"{home}cifar-10-batches-bin" for home in homes), "cifar10"),
                read=read_cifar_binary,
            ),
            Layout(
                files=_unpublished("md5", python_batches),
                folders=(*(f"{home}cifar-10-batches-py" for home in homes), "cifar10"),
                read=read_cifar_python,
            ),
            Layout(files=(python,), folders=("cifar10", ".", "CIFAR10"), read=read_cifar_archive),
            Layout(files=(binary,), folders=("cifar10", ".", "CIFAR10"), read=read_cifar_archive),
        ),
    )


def _unpublished(algorithm: str, checksums: dict[str, str]) -> tuple[FileInfo, ...]:
    """Files that come out of an archive and have no address of their own."""
    return tuple(
        FileInfo(name=name, urls=(), checksum=f"{algorithm}:{digest}")
        for name, digest in checksums.items()
    )


def _adbench(
    number: int,
    name: str,
    title: str,
    rows: int,
    features: int,
    value_range: tuple[float, float] | None = None,
) -> Source:
    # No checksums are published, and copies are compressed differently: structure is checked.
    file = FileInfo(
        name=f"{number}_{name}.npz",
        urls=(
            "https://github.com/Minqi824/ADBench/raw/main/adbench/datasets/Classical/"
            f"{number}_{name}.npz",
            "https://jihulab.com/BraudoCC/ADBench_datasets/-/raw/"
            f"339d2ab2d53416854f6535442a67393634d1a778/Classical/{number}_{name}.npz",
        ),
    )
    train_size, test_size = split_sizes(rows)  # of the default seed; others differ a little
    info = DatasetInfo(
        name=name,
        title=title,
        task="binary",
        train_size=train_size,
        test_size=test_size,
        example_shape=(features,),
        classes=("normal", "anomaly"),
        value_range=value_range,
        files=(file,),
        homepage="https://github.com/Minqi824/ADBench",
        published_split=False,
    )
    folders = ("adbench", ".", "Classical", "datasets/Classical", "adbench/datasets/Classical")
    layout = Layout(files=(file,), folders=folders, read=read_table_arrays)
    return Source(info=info, layouts=(layout,))


SOURCES: dict[str, Source] = {
    source.info.name: source
    for source in (
        _MNIST,
        _FASHION_MNIST,
        _cifar10(),
        _adbench(1, "ALOI", "ALOI, pictures of objects as histograms", 49_534, 27),
        _adbench(5, "campaign", "campaign, telephone marketing of a bank", 41_188, 62),
        # Attributes that are there or not: 0 or 1 by definition.
        _adbench(8, "celeba", "celeba, attributes of faces", 202_599, 39, (0.0, 1.0)),
        _adbench(9, "census", "census, income of persons", 299_285, 500),
        _adbench(11, "donors", "donors, projects of teachers", 619_326, 10),
        _adbench(22, "magic.gamma", "magic.gamma, showers in a telescope", 19_020, 10),
        _adbench(32, "shuttle", "shuttle, sensors of a space shuttle", 49_097, 9),
        _adbench(33, "skin", "skin, colours of skin and of other things", 245_057, 3),
        _adbench(47, "yeast", "yeast, places of proteins in a cell", 1_484, 8),
    )
}
