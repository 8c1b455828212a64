"""What is fast: sorting, norms, row scaling, bounded weight gradients, CUDA graphs, compilation."""

from clipless.kernels._agreement import all_close, close
from clipless.kernels._bounded_gradients import (
    Clip,
    Limits,
    convolution,
    early_norm,
    embedding,
    example_norm,
    linear,
    rounded,
    rounds_products,
    row_parameter,
)
from clipless.kernels._capture import CAPTURING
from clipless.kernels._compiled import Compiled, Run
from clipless.kernels._cuda_graphs import Habit, Recording, addresses_of, fresh
from clipless.kernels._exceedance import ExceedanceCount
from clipless.kernels._norms import euclidean_norms
from clipless.kernels._row_scaling import guarded, scale_into_ball
from clipless.kernels._sorting import sort_pairs
from clipless.kernels._tracing import compiled
from clipless.kernels._weight_sums import Geometry
from clipless.kernels._window_norms import GlobalNorms, WindowNorms, root

__all__: list[str] = [
    "CAPTURING",
    "Clip",
    "Compiled",
    "ExceedanceCount",
    "Geometry",
    "GlobalNorms",
    "Habit",
    "Limits",
    "Recording",
    "Run",
    "WindowNorms",
    "addresses_of",
    "all_close",
    "close",
    "compiled",
    "convolution",
    "early_norm",
    "embedding",
    "euclidean_norms",
    "example_norm",
    "fresh",
    "guarded",
    "linear",
    "root",
    "rounded",
    "rounds_products",
    "row_parameter",
    "scale_into_ball",
    "sort_pairs",
]
