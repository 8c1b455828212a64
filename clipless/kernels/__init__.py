"""What is fast: sorting, norms, row scaling, bounded weight gradients, CUDA graphs, compilation."""

from clipless.kernels.compilation._cuda_graphs import all_are_close, is_close
from clipless.kernels._bounded_gradients import (
    LimitKind,
    GradientLimits,
    bounded_convolution,
    precomputed_norm,
    bounded_embedding,
    example_norm,
    bounded_linear,
    to_bfloat16,
    autocasts_to_bfloat16,
    per_example_parameter,
)
from clipless.kernels.compilation._tracing import TRACING_LOCK
from clipless.kernels.compilation._compiled import CompiledFunction, AnyFunction
from clipless.kernels.compilation._cuda_graphs import LazyCudaGraph, RecordedGraph, data_pointers, clone_all
from clipless.kernels._dispatch import is_compiling
from clipless.kernels._exceedance import ExceedanceCount
from clipless.kernels.layers._norms import euclidean_norms
from clipless.kernels.layers._row_scaling import make_finite_and_bounded, scale_into_ball
from clipless.kernels.layers._sorting import sort_pairs
from clipless.kernels._weight_sums import ConvolutionGeometry
from clipless.kernels.layers._window_norms import GlobalNorms, WindowNorms, safe_sqrt

__all__: list[str] = [
    "TRACING_LOCK",
    "LimitKind",
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
    "safe_sqrt",
    "to_bfloat16",
    "autocasts_to_bfloat16",
    "per_example_parameter",
    "scale_into_ball",
    "sort_pairs",
]
