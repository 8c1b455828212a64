"""The configuration of a run: frozen, typed, checked when it is made, and plain data outside.

    [data]      name = "mnist"
    [model]     name = "lenet", and the settings of that model
    [loss]      name = "cross_entropy", and the settings of that loss
    [privacy]   epsilon = 3.0
    [training]  steps = 450

No torch here: a mistake in a configuration is reported before anything heavy is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Self

from clipless.accounting import LargeDelta
from clipless.common import MALFORMED_ERRORS, error_text
from clipless.folders import RunFile, RunFolder, RunFolderError
from clipless.runs.config._fields import NOTHING, check_setting, read_section, refuse_unknown
from clipless.runs.config._files import read_config_file

Task = Literal["classification", "regression"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which examples: a data set by `name`, or a `file` of one's own.

    Args:
        name: one of `clipless.data.datasets()`, or `digits`, which comes with scikit-learn.
        file: a table (.csv, .tsv, .parquet), or arrays (.npz with `x`, `y`, and perhaps `x_test`,
            `y_test`).
        target: the column of a table that is to be predicted.
        text: the column of texts to predict from; the other columns are left out.
        unit: the column of a table that says whose each row is, if people may have several. They
            are what is protected and counted, each with all rows; the column is no feature, and
            people are drawn as a whole for the test set.
        unit_records: of how many of a person's rows a step takes the average at most.
        encoder: the folder of a transformers model that makes vectors of texts; by default, hashed
            n-grams.
        pieces: whether a table is read in pieces and kept on the disk; by default if its file is
            larger than 1 GiB. Folders, patterns of files (part-*.parquet) and Arrow files always
            are.
        separator: of a text table, if it is not the usual one.
        task: what a table's target is.
        classes: the labels of a table's target, if they are public; by default those that a noisy
            count finds in many rows. Rows of other labels contribute nothing.
        class_count: how many classes the labels of arrays have: 0, 1, ... up to one less.
        root: the folder of data sets by name; see `clipless.data.load`.
        download: whether a data set may be downloaded.
        test_fraction, split_seed: how a test set is drawn where none is published.
        colour: the colour space that RGB images are brought to.
        limit: train on the first so many examples only.
    """

    name: str | None = None
    file: str | None = None
    target: str | None = None
    text: str | None = None
    unit: str | None = None
    unit_records: int | None = None
    encoder: str | None = None
    pieces: bool | None = None
    separator: str | None = None
    task: Task = "classification"
    classes: tuple[Any, ...] | None = None
    class_count: int | None = None
    root: str | None = None
    download: bool = True
    test_fraction: float = 0.2
    split_seed: int = 0
    colour: Literal["rgb", "hsv", "yiq", "yuv", "grayscale"] = "rgb"
    limit: int | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        check_setting(
            (self.name is None) != (self.file is None),
            "give the data by name (data.name) or as a file (data.file), one of the two",
        )
        check_setting(
            0 < self.test_fraction < 1,
            f"data.test_fraction must lie between 0 and 1, got {self.test_fraction}",
        )
        check_setting(
            self.limit is None or self.limit >= 8,
            f"data.limit must be at least 8 examples, got {self.limit}",
        )
        table = self.is_table
        check_setting(
            not table or self.target is not None,
            f"{self.file} is a table: name the column to predict (data.target, --target)",
        )
        check_setting(
            table or self.target is None,
            f"data.target={self.target!r} is for tables (.csv, .tsv, .parquet)",
        )
        check_setting(
            self.text is None or (table and self.text != self.target),
            f"data.text={self.text!r} must be a column of a table other than the target",
        )
        check_setting(
            self.unit is None or (table and self.unit not in (self.target, self.text)),
            f"data.unit={self.unit!r} must be a column of a table that says whose each row is, and "
            "is neither target nor text",
        )
        check_setting(
            self.unit_records is None or (self.unit is not None and self.unit_records >= 1),
            "data.unit_records says how many rows of a person a step takes at most: at least 1, "
            "and with the column of people (data.unit, --unit)",
        )
        check_setting(
            self.encoder is None or self.text is not None,
            "data.encoder makes vectors of texts: name their column (data.text, --text)",
        )
        check_setting(table or self.pieces is None, "data.pieces is for tables")
        check_setting(table or self.task == "classification", "regression is for tables")
        check_setting(
            self.classes is None or (table and self.task == "classification"),
            "data.classes names the labels of a table; for arrays, give data.class_count",
        )
        check_setting(
            self.class_count is None or (self.file is not None and not table),
            "data.class_count is for arrays of one's own (.npz); data sets by name have theirs, "
            "and for tables there is data.classes",
        )
        check_setting(
            self.class_count is None or self.class_count >= 2,
            f"data.class_count must be at least 2, got {self.class_count}",
        )

    @property
    def is_table(self) -> bool:
        """Whether the data are a table of one's own."""
        return self.file is not None and not self.file.lower().endswith(".npz")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Something by name, a model or a loss, with its settings. Without a name, the usual one."""

    name: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: Any, *, where: str) -> Self:
        """Return a choice from its table of settings, of which `name` is one."""
        check_setting(
            isinstance(data, Mapping), f"[{where}] must be a table of settings, got {data!r}"
        )
        settings = {key: value for key, value in data.items() if key != "name" and value != NOTHING}
        name = data.get("name")
        check_setting(
            name is None or isinstance(name, str), f"{where}.name must be text, got {name!r}"
        )
        return cls(name=name, settings=settings)

    def to_dict(self) -> dict[str, Any]:
        """Return the name and the settings as one table."""
        return {**({} if self.name is None else {"name": self.name}), **self.settings}


@dataclass(frozen=True, kw_only=True)
class PrivacyConfig:
    """The budget and how it is kept; see `clipless.training.Trainer` for each."""

    epsilon: float | None = None
    delta: float | None = None
    large_delta: bool = False
    """Whether a delta above 0.1/N is meant; above 1/N it is refused in any case."""
    noise_multiplier: float | None = None
    sampling: Literal["poisson", "fixed_size", "full_batch", "epochs"] = "poisson"
    relation: Literal["zero_out", "replace_one", "add_remove"] | None = None
    """`add_remove` is in configurations of earlier versions; a new run refuses it."""
    noise: Literal["optimal", "global", "per_layer", "correlated"] = "optimal"
    accountant: Literal["pld", "rdp", "filter"] = "pld"

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        check_setting(
            self.epsilon is not None or self.noise_multiplier is not None,
            "give privacy.epsilon (--epsilon), or privacy.noise_multiplier (--noise-multiplier)",
        )
        for name in ("epsilon", "noise_multiplier"):
            value = getattr(self, name)
            check_setting(
                value is None or value > 0, f"privacy.{name} must be above 0, got {value}"
            )
        check_setting(
            self.delta is None or 0 < self.delta < 1,
            f"privacy.delta must lie between 0 and 1, got {self.delta}",
        )
        check_setting(
            self.noise != "correlated" or self.sampling == "epochs",
            "privacy.noise='correlated' needs privacy.sampling='epochs'",
        )
        if self.large_delta and self.delta is not None:
            object.__setattr__(self, "delta", LargeDelta(self.delta))


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How to train; see `clipless.training.Trainer` for what is not explained here.

    Args:
        batch_size: by default a sixteenth of the examples, at least 256.
        epochs, steps: one of the two; by default 400 steps.
        momentum: of `sgd`.
        schedule: of the learning rate.
        clip_quantile: clip the gradients of the loss at a threshold that follows this quantile of
            them, privately, within the budget. It begins at `model.clip_gradient`, if given.
        precision: of products: `float32`, `tf32` (on a GPU) or `bfloat16`; less means more noise.
        compile: compile the forward and backward pass.
        pad: give all batches one of a few sizes; by default if training is compiled.
        augment: any of `flip` and `crop:N`, in order.
        validate: measure loss and accuracy on the test set after every epoch.
        check_bounds: compare the gradients of so many examples with their bounds, at every
            checkpoint; 0 for none.
        checkpoint_every: by default every epoch, or every twentieth of the run if that is longer.
        seed: of the initial weights. Samples and noise have none.
        device: by default a GPU if there is one.
    """

    batch_size: int | None = None
    epochs: float | None = None
    steps: int | None = None
    optimizer: Literal["layer_adam", "adam", "sgd"] = "layer_adam"
    learning_rate: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    schedule: Literal["cosine", "constant"] = "cosine"
    average: float | None = 0.98
    product_clip: float | None = None
    clip_quantile: float | None = None
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    compile: bool = False
    micro_batch_size: int | None = None
    pad: bool | None = None
    augment: tuple[str, ...] = ()
    views: int | None = None
    validate: bool = True
    check_bounds: int = 64
    checkpoint_every: int | None = None
    keep_checkpoints: int = 2
    seed: int | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        check_setting(
            self.epochs is None or self.steps is None,
            "give training.epochs or training.steps, not both",
        )
        for name in (
            "batch_size", "epochs", "steps", "learning_rate", "product_clip", "micro_batch_size",
            "views", "checkpoint_every", "keep_checkpoints",
        ):  # fmt: skip
            value = getattr(self, name)
            check_setting(
                value is None or value > 0, f"training.{name} must be above 0, got {value}"
            )
        for name in ("momentum", "weight_decay", "check_bounds"):
            value = getattr(self, name)
            check_setting(value >= 0, f"training.{name} must not be negative, got {value}")
        check_setting(self.momentum < 1, f"training.momentum must be below 1, got {self.momentum}")
        check_setting(
            self.optimizer == "sgd" or self.momentum == 0,
            f"training.momentum is for sgd, not for {self.optimizer}",
        )
        check_setting(
            self.average is None or 0 <= self.average <= 1,
            f"training.average must lie in [0, 1], or be none, got {self.average}",
        )
        check_setting(
            self.clip_quantile is None or 0 < self.clip_quantile < 1,
            f"training.clip_quantile must lie between 0 and 1, got {self.clip_quantile}",
        )
        check_setting(
            self.clip_quantile is None or not self.compile,
            "training.compile needs a fixed threshold: leave training.clip_quantile out, and clip "
            "at model.clip_gradient",
        )


_SECTIONS = ("data", "model", "loss", "privacy", "training")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that a training run is determined by, but for chance.

    Example:
        >>> config = RunConfig.from_dict({
        ...     "data": {"name": "mnist"}, "model": {"name": "mlp", "hidden": 64},
        ...     "privacy": {"epsilon": 3.0}, "training": {"epochs": 5}})
        >>> config.model.name, config.privacy.epsilon, config.training.average
        ('mlp', 3.0, 0.98)
        >>> RunConfig.from_dict(config.to_dict()) == config
        True
    """

    data: DataConfig
    privacy: PrivacyConfig
    training: TrainingConfig = field(default_factory=TrainingConfig)
    model: Choice = field(default_factory=Choice)
    loss: Choice = field(default_factory=Choice)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the configuration that nested plain data describe; unknown keys are refused."""
        refuse_unknown(data, _SECTIONS, where="a configuration")
        return cls(
            data=read_section(DataConfig, data.get("data", {}), where="data"),
            privacy=read_section(PrivacyConfig, data.get("privacy", {}), where="privacy"),
            training=read_section(TrainingConfig, data.get("training", {}), where="training"),
            model=Choice.from_dict(data.get("model", {}), where="model"),
            loss=Choice.from_dict(data.get("loss", {}), where="loss"),
        )

    @classmethod
    def from_file(cls, path: Any) -> Self:
        """Read a configuration from a TOML, YAML or JSON file, known by its ending."""
        return cls.from_dict(read_config_file(path))

    def to_dict(self) -> dict[str, Any]:
        """Return nested plain data, ready for JSON; what is not given is null."""
        return {
            "data": _plain(self.data),
            "model": self.model.to_dict(),
            "loss": self.loss.to_dict(),
            "privacy": _plain(self.privacy),
            "training": _plain(self.training),
        }


def _plain(section: Any) -> dict[str, Any]:
    data = asdict(section)
    return {
        each.name: list(data[each.name]) if isinstance(data[each.name], tuple) else data[each.name]
        for each in fields(section)
    }


def stored_config(folder: RunFolder) -> RunConfig:
    """Return the configuration that a run folder was made with."""
    fields = folder.read_json(RunFile.CONFIG)
    try:
        return RunConfig.from_dict(fields)
    except MALFORMED_ERRORS as error:
        path = folder.file(RunFile.CONFIG)
        raise RunFolderError(f"{path} was damaged: {error_text(error)}") from error
