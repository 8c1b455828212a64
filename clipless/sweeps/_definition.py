"""`Sweep`: search space, search method and selection rule of a sweep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from clipless.runs import (
    ConfigError,
    check_setting,
    merge_config_layers,
    read_config_file,
    read_section,
    refuse_unknown,
)
from clipless.sweeps._presets import preset as read_preset
from clipless.sweeps._space import Space, flat
from clipless.sweeps.selection._repetitions import Repetitions, optional_repetitions

_Sampler = Literal["tpe", "gp", "random"]
_Pruner = Literal["hyperband", "none"]
_SECTIONS = ("data", "model", "loss", "privacy", "training")


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Options of the section [sweep] of a file; what they mean is said at `Sweep`."""

    preset: str | None = None
    trials: int = 20
    sampler: Literal["usual", "tpe", "gp", "random"] = "usual"
    pruner: Literal["usual", "hyperband", "none"] = "usual"
    metric: str = "accuracy"
    radius: float | None = None
    scale: float = 1.0
    public_data: bool = False
    seed: int | None = None


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A search over runs. `run_sweep` does the work; any number of workers can share it.

    Args:
        base: the settings of every run, nested as in `clipless.runs.RunConfig`.
        space: the settings that are searched.
        trials: how many runs; left out where `repetitions` draws their number.
        sampler: `tpe` (tree-structured Parzen estimator), `gp` (Gaussian process), or `random`.
        pruner: `hyperband` stops runs early that fall behind, by the metric after each epoch.
        metric: of the test data, which are taken to be public; the larger the better.
        radius: also measure the accuracy that is certified at this radius.
        scale: search at this fraction of the batch size, at constant noise in the updates; see
            `transfer`. The best settings are then those of the large run.
        public_data: the training data are public, such as a stand-in for the private ones:
            selecting costs nobody anything.
        repetitions: draw the number of runs at random, so that selecting the best has a known
            price. Requires the random sampler and no pruning: runs must not depend on each other.
        seed: of the sampler, for experiments with one worker.

    Example:
        >>> sweep = Sweep.from_dict({
        ...     "sweep": {"preset": "mnist", "trials": 50}, "privacy": {"epsilon": 3.0},
        ...     "loss": {"name": "cross_entropy"}})
        >>> sorted(sweep.space.parameters)  # doctest: +NORMALIZE_WHITESPACE
        ['loss.alpha', 'loss.tau', 'model.input_norm', 'model.name', 'training.batch_size']
        >>> Sweep.from_dict(sweep.to_dict()) == sweep
        True
    """

    base: Mapping[str, Mapping[str, Any]]
    space: Space
    trials: int = 20
    sampler: _Sampler = "tpe"
    pruner: _Pruner = "hyperband"
    metric: str = "accuracy"
    radius: float | None = None
    scale: float = 1.0
    public_data: bool = False
    repetitions: Repetitions | None = None
    seed: int | None = None
    decided: Mapping[str, Any] = field(init=False, repr=False, compare=False)
    """The settings in `base`, by dotted names."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant, and what would void the price of a selection."""
        refuse_unknown(self.base, _SECTIONS, where="the base of a sweep")
        object.__setattr__(self, "decided", flat(self.base))
        twice = sorted(set(self.decided) & set(self.space.parameters))
        check_setting(not twice, f"{', '.join(twice)}: both fixed and searched; do one of the two")
        check_setting(self.trials >= 1, f"trials must be at least 1, got {self.trials}")
        check_setting(0 < self.scale <= 1, f"scale must lie in (0, 1], got {self.scale}")
        check_setting(
            self.radius is None or self.radius >= 0,
            f"radius must not be negative, got {self.radius}",
        )
        if self.repetitions is not None:
            self._check_independence()

    @property
    def looks_at_scores(self) -> bool:
        """Whether earlier runs decide on the settings of later ones, or on when they end."""
        return self.sampler != "random" or self.pruner != "none"

    def _check_independence(self) -> None:
        """The price of a selection holds for independent runs, and for nothing else."""
        check_setting(
            self.sampler == "random" and self.pruner == "none",
            "repetitions need sampler='random' and pruner='none': what a run is must not depend "
            "on how others went",
        )
        check_setting(
            self.seed is None and self.decided.get("training.seed") is None,
            "repetitions need fresh randomness in every run: leave the seeds out",
        )
        check_setting(
            "training.seed" not in self.space.parameters,
            "repetitions need fresh randomness in every run: do not search training.seed",
        )
        check_setting(self.scale == 1, "repetitions select a run, not settings: leave scale out")
        check_setting(
            not self.public_data, "selecting is free on public data: leave repetitions out"
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read nested data: sections `sweep`, `space`, `repetitions`, and those of a run.

        A setting that a run's section fixes leaves the space of a preset. Without a `sampler`,
        it is `tpe` with `hyperband`; with repetitions, `random` without pruning.
        """
        refuse_unknown(data, ("sweep", "space", "repetitions", *_SECTIONS), where="a sweep")
        options = read_section(SweepOptions, data.get("sweep", {}), where="sweep")
        base = {name: dict(data[name]) for name in _SECTIONS if name in data}
        given = data.get("space")
        space = None if given is None else Space.from_dict(given)
        if options.preset is not None:
            known = read_preset(options.preset)
            usual = Space.from_dict(known.pop("space"))
            base = merge_config_layers(known, base)
            mine = {} if space is None else space.parameters
            decided = {*flat(base), *mine}
            left = {name: each for name, each in usual.parameters.items() if name not in decided}
            space = Space(parameters={**left, **mine})
        if space is None:
            raise ConfigError("a sweep needs a space: a section [space], or sweep.preset")
        repetitions = optional_repetitions(data.get("repetitions"))
        usual_sampler: _Sampler = "tpe" if repetitions is None else "random"
        usual_pruner: _Pruner = "hyperband" if repetitions is None else "none"
        return cls(
            base=base,
            space=space,
            trials=options.trials,
            sampler=usual_sampler if options.sampler == "usual" else options.sampler,
            pruner=usual_pruner if options.pruner == "usual" else options.pruner,
            metric=options.metric,
            radius=options.radius,
            scale=options.scale,
            public_data=options.public_data,
            repetitions=repetitions,
            seed=options.seed,
        )

    @classmethod
    def from_file(cls, path: Any) -> Self:
        """Read a sweep from a TOML, YAML or JSON file."""
        return cls.from_dict(read_config_file(path))

    def to_dict(self) -> dict[str, Any]:
        """Return nested plain data, which `from_dict` reads."""
        names = ("trials", "sampler", "pruner", "metric", "radius", "scale", "public_data", "seed")
        found: dict[str, Any] = {
            "sweep": {name: getattr(self, name) for name in names},
            "space": self.space.to_dict(),
            **{name: dict(section) for name, section in self.base.items()},
        }
        if self.repetitions is not None:
            found["repetitions"] = self.repetitions.to_dict()
        return found
