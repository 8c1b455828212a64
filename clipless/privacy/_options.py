"""`PrivacyOptions`: the options of a private run besides its objects and its budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from clipless.accounting import Relation, Sampling
from clipless.common import names_moved_arguments
from clipless.privacy._defaults import SamplingName
from clipless.privacy._precision import Precision
from clipless.privacy.enforced._options import BoundsChoice
from clipless.privacy.noise._correlated_options import Correlated
from clipless.privacy.noise._scales import NoiseStrategy
from clipless.privacy.sampling._batch_options import BatchOptions
from clipless.privacy.sampling._users import Users


@names_moved_arguments(batches=BatchOptions)
@dataclass(frozen=True, kw_only=True)
class PrivacyOptions:
    """Options of `PrivacyEngine.make_private`, `make_private_with_epsilon` and `Trainer`.

    Some of these fields are also arguments of those functions (`epochs`, `sampling`, `bounds`,
    `compile`): give each in one of the two places; a value in both is refused.

    Args:
        epochs: how long training is planned to last, in passes over the data of 1/rate steps each.
        steps: the same in steps; one of the two.
        sampling: how batches are drawn: `"poisson"`, `"fixed_size"`, `"full_batch"`; `"epochs"`,
            the batches of a loader in one order, the same in every epoch, without amplification; or
            a `Sampling`, such as a `FixedOrder` that is shuffled once, or that of a stream.
        unit: who is sampled and protected: single examples by default, or with
            `Users(ids, records=16)` people, each with all records; batch sizes, N and rates then
            count users.
        batches: how a step's sample is handed out: micro-batches, padding, augmentation.
        relation: which data sets are neighbours: `"zero_out"`, by default (one example is
            replaced by an empty record, which contributes nothing), except for fixed-size
            batches, whose guarantee is for `"replace_one"`.
        noise: how noise is shared out among parameters: `"global"`, `"per_layer"`, `"optimal"`;
            or relative weights by parameter name, for `per_layer` with these. `"correlated"`, for
            epochs: noise that takes back part of that of earlier steps (settings: `Correlated`).
        precision: what products of activations and weights are rounded to: `"float32"`,
            `"tf32"` (torch's flags decide where it is used; the CPU has none) or `"bfloat16"`
            (the model is run under autocast). Rounding is covered by a slack in the
            sensitivities, `plan.arithmetic_slack`: lower precision means more noise.
        compile: compile the forward and backward pass, by `torch.compile` with its default
            backend or the one named here; see `PrivacyEngine.compile`.
        grad_scaler: the `torch.amp.GradScaler` in use, if any.
        bounds: `"proved"` from the architecture of a Lipschitz network (`ProvedBounds` clips
            below them); `"enforced"` by the backward pass of every layer, in any network whose
            examples stay apart (with settings: `EnforcedBounds`); or `"none"`, with weights left
            unconstrained, which is allowed without noise only, for comparisons.
        replay: repeat the steps that followed `resume_from`, with the same samples and noise,
            as far as the ledger has digests of what they released. One that comes out bit for
            bit as it did is not counted again. At the first one that does not, and after the
            last digest, fresh samples and noise are drawn, and paid for. With False they are
            fresh from the start.

    Example:
        >>> options = PrivacyOptions(noise="global", batches=BatchOptions(micro_batch_size=64))
        >>> options.batches.micro_batch_size, options.precision
        (64, 'float32')
    """

    epochs: float | None = None
    steps: int | None = None
    sampling: SamplingName | Sampling = "poisson"
    unit: Users | None = None
    batches: BatchOptions = BatchOptions()
    relation: Relation | str | None = None
    noise: NoiseStrategy | Literal["correlated"] | Correlated | Mapping[str, float] = "optimal"
    precision: Precision = "float32"
    compile: bool | str = False
    grad_scaler: Any = None
    bounds: BoundsChoice = "proved"
    replay: bool = True


def merge_arguments(options: PrivacyOptions, given: Mapping[str, Any]) -> PrivacyOptions:
    """Return the options with the arguments that were given directly; None stands for not given.

    What is given in both places is refused: nobody should have to know which one wins.
    """
    if not isinstance(options, PrivacyOptions):
        raise TypeError(f"options must be PrivacyOptions, got {type(options).__name__}")
    given = {name: value for name, value in given.items() if value is not None}
    usual = {field.name: field.default for field in fields(PrivacyOptions)}
    for name in given:
        if getattr(options, name) != usual[name]:
            raise ValueError(f"{name} is given twice, as an argument and in options: give it once")
    return replace(options, **given)
