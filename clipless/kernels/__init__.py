"""Fast operations: sorting, norms, row scaling, bounded gradients, CUDA graphs, compilation."""

from clipless.kernels._bounded_gradients import (
    GradientLimits,
    LimitKind,
    autocasts_to_bfloat16,
    bounded_convolution,
    bounded_embedding,
    bounded_linear,
    bounded_linear_layer,
    example_norm,
    per_example_parameter,
    precomputed_norm,
    to_bfloat16,
)
from clipless.kernels._dispatch import TRACING_LOCK, is_compiling
from clipless.kernels._exceedance import ExceedanceCount
from clipless.kernels._weight_sums import (
    SUM_SLACK,
    ConvolutionGeometry,
    convolution_weight,
    linear_weight,
    may_look_at,
    row_shares,
    row_sum,
    sum_slack,
)
from clipless.kernels.compilation._compiled import AnyFunction, CompiledFunction
from clipless.kernels.compilation._cuda_graphs import (
    LazyCudaGraph,
    RecordedGraph,
    all_are_close,
    clone_all,
    data_pointers,
    is_close,
)
from clipless.kernels.enforced._norms import Threshold, TracedCount
from clipless.kernels.enforced._products import enforced_convolution, enforced_linear
from clipless.kernels.enforced._small import (
    enforced_copies,
    enforced_embedding,
    enforced_scale_shift,
)
from clipless.kernels.exact._weights import (
    integer_convolution_weight,
    integer_linear_weight,
    prepare_integer_sums,
)
from clipless.kernels.layers._norms import euclidean_norms
from clipless.kernels.layers._row_scaling import make_finite_and_bounded, scale_into_ball
from clipless.kernels.layers._sorting import sort_pairs
from clipless.kernels.layers._window_norms import GlobalNorms, WindowNorms, safe_sqrt
from clipless.kernels.randomness import (
    GRID_STEPS,
    KEY_BYTES,
    STATE_NAME,
    GaussianNoise,
    KeyStream,
    WordSource,
    add_grid_noise_,
    grid_noise,
    joint_grid_factor,
    joint_multiplier,
    next_key,
    random_subset,
    standard_exponential,
)

__all__: list[str] = [
    "GRID_STEPS",
    "KEY_BYTES",
    "STATE_NAME",
    "GaussianNoise",
    "KeyStream",
    "WordSource",
    "add_grid_noise_",
    "grid_noise",
    "joint_grid_factor",
    "joint_multiplier",
    "next_key",
    "random_subset",
    "standard_exponential",
    "SUM_SLACK",
    "prepare_integer_sums",
    "integer_linear_weight",
    "integer_convolution_weight",
    "convolution_weight",
    "linear_weight",
    "may_look_at",
    "row_shares",
    "row_sum",
    "sum_slack",
    "TRACING_LOCK",
    "LimitKind",
    "Threshold",
    "TracedCount",
    "enforced_linear",
    "enforced_convolution",
    "enforced_embedding",
    "enforced_scale_shift",
    "enforced_copies",
    "CompiledFunction",
    "ExceedanceCount",
    "ConvolutionGeometry",
    "GlobalNorms",
    "LazyCudaGraph",
    "GradientLimits",
    "RecordedGraph",
    "AnyFunction",
    "WindowNorms",
    "data_pointers",
    "all_are_close",
    "is_close",
    "is_compiling",
    "bounded_convolution",
    "precomputed_norm",
    "bounded_embedding",
    "euclidean_norms",
    "example_norm",
    "clone_all",
    "make_finite_and_bounded",
    "bounded_linear",
    "bounded_linear_layer",
    "safe_sqrt",
    "to_bfloat16",
    "autocasts_to_bfloat16",
    "per_example_parameter",
    "scale_into_ball",
    "sort_pairs",
]
