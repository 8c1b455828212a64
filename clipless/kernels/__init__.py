"""What is fast: sorting, norms, row scaling, bounded weight gradients, CUDA graphs, compilation."""
