"""Planned releases of a run, from its configuration."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from clipless.accounting import Accountant, require_supported_sampling
from clipless.common import not_set_error
from clipless.errors import PrivacyError
from clipless.privacy import (
    Mechanism,
    RenyiFilter,
    named_sampling,
    noise_multiplier_for,
    padded_sampling,
    relation_for,
    steps_of_one_pass,
)
from clipless.runs import (
    ConfigError,
    RunConfig,
    RunData,
    default_model,
    load_data,
    merge_config_layers,
    resolved_config,
    run_kind,
)
from clipless.sweeps._definition import Sweep
from clipless.sweeps._space import Choices, nested

_FREE = {
    f"training.{name}"
    for name in (
        "learning_rate", "momentum", "weight_decay", "optimizer", "schedule", "average",
        "product_clip", "clip_quantile", "precision", "augment", "views",
    )
}  # fmt: skip
"""Settings of training that change no mechanism; nor do those of models and losses."""
_MOST_COMBINATIONS = 64


def planned_run(config: RunConfig, data: RunData) -> tuple[Mechanism, int]:
    """Return the release of one step and how many are planned."""
    kind = run_kind(config.model.name or default_model(data))
    if kind != "network":
        raise ConfigError(
            f"runs of the kind {kind} choose their releases by a rule of their own, which a sweep "
            "cannot foresee: leave repetitions and scale out, or name a network (model.name)"
        )
    full = resolved_config(config, data)
    privacy, training = full.privacy, full.training
    if training.batch_size is None:
        raise not_set_error("batch size")
    if privacy.delta is None:
        raise not_set_error("delta")
    sampling = named_sampling(privacy.sampling, data.size, training.batch_size)
    if training.pad:
        sampling = padded_sampling(sampling)
    relation = relation_for(privacy.relation, sampling)
    steps = training.steps or round((training.epochs or 0) * steps_of_one_pass(sampling))
    sigma = privacy.noise_multiplier
    if sigma is None:
        if privacy.epsilon is None:
            raise not_set_error("epsilon")
        accountant: Accountant = privacy.accountant
        if accountant == "filter":
            accountant = RenyiFilter.for_run(
                epsilon=privacy.epsilon, delta=privacy.delta, sampling=sampling,
                relation=relation, steps=steps, noise_multiplier=None,
            ).meter  # fmt: skip
        sigma = noise_multiplier_for(
            target_epsilon=privacy.epsilon,
            target_delta=privacy.delta,
            steps=steps,
            sampling=sampling,
            relation=relation,
            accountant=accountant,
        )
    return Mechanism(noise_multiplier=sigma, sampling=sampling, relation=relation), steps


def shrunk(config: RunConfig, data: RunData, scale: float) -> RunConfig:
    """Return the run at a fraction of its batch size, with the same noise in its updates.

    See `clipless.sweeps.transfer`. The small run has the noise that it has, not a target epsilon:
    what it costs is for its ledger to say.
    """
    mechanism, steps = planned_run(config, data)
    large = mechanism.sampling.expected_batch_size
    small = max(1, round(scale * large))
    return replace(
        config,
        privacy=replace(
            config.privacy,
            epsilon=None,
            noise_multiplier=mechanism.noise_multiplier * small / large,
        ),
        training=replace(config.training, batch_size=small, steps=steps, epochs=None),
    )


def declared_runs(sweep: Sweep) -> list[tuple[Mechanism, int]]:
    """Return what every run that the space allows may release: a mechanism and a count for each.

    Only settings that a mechanism depends on are looked at; those must be choices, so that all
    combinations can be gone through.

    Raises:
        ConfigError: such a setting is searched over a range, there are too many combinations, or
            nothing is known about selecting among runs of this kind.
    """
    options: dict[str, tuple[Any, ...]] = {}
    for name, parameter in sweep.space.parameters.items():
        if name in _FREE or name.startswith(("model.", "loss.")):
            continue
        if not isinstance(parameter, Choices):
            raise ConfigError(
                f"{name} decides what a run releases, and the cost of selecting rests on the worst "
                f"value of it: give a list of values instead of a range, or fix it "
                f"(--set {name}=VALUE)"
            )
        options[name] = parameter.values
    _refuse_rules(sweep)
    combinations = list(itertools.product(*options.values()))
    if len(combinations) > _MOST_COMBINATIONS:
        raise ConfigError(
            f"{', '.join(options)} have {len(combinations)} combinations; at most "
            f"{_MOST_COMBINATIONS} are gone through"
        )
    found: dict[tuple[Mechanism, int], None] = {}
    for values in combinations:
        config = example_config(sweep, dict(zip(options, values, strict=True)))
        data = load_data(config.data)
        if sweep.scale != 1:
            config = shrunk(config, data, sweep.scale)
        found[planned_run(config, data)] = None
    try:  # now, and not when everything has been spent
        require_supported_sampling(tuple(found), "rdp")
    except PrivacyError as error:
        raise ConfigError(
            f"selecting among these runs has no known price: {error}. Poisson sampling "
            "under zero-out has one, and so has sampling of a fixed size."
        ) from error
    return list(found)


def example_config(sweep: Sweep, chosen: Mapping[str, Any]) -> RunConfig:
    """Return a run that the space allows: chosen values, and the first of everything else.

    Raises:
        ConfigError: there is no such run; the configuration says why.
    """
    values: dict[str, Any] = {}
    decided = sweep.decided
    for name, parameter in sweep.space.parameters.items():
        known = {**decided, **values}
        if all(known.get(other) == value for other, value in parameter.when.items()):
            if name in chosen:
                values[name] = chosen[name]
            elif isinstance(parameter, Choices):
                values[name] = parameter.values[0]
            else:
                values[name] = int(parameter.low) if parameter.integer else parameter.low
    return RunConfig.from_dict(merge_config_layers(sweep.base, nested(values)))


def _refuse_rules(sweep: Sweep) -> None:
    models = sweep.space.parameters.get("model.name")
    if not isinstance(models, Choices):
        return
    for name in models.values:
        if run_kind(name) != "network":
            raise ConfigError(f"model.name must not be {name} where repetitions are drawn")
