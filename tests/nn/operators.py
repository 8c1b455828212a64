"""Exact linear algebra for tests: the matrix of a linear map, the Jacobian of any other."""

import torch


def matrix_of(function, shape):
    """The matrix, in float64, of a linear map of examples of the given shape."""
    count = torch.Size(shape).numel()
    basis = torch.eye(count, dtype=torch.float64).reshape(count, *shape)
    with torch.no_grad():
        zero = function(torch.zeros(1, *shape, dtype=torch.float64))
        return (function(basis) - zero).flatten(1).T


def norm_of(function, shape):
    """The operator norm of a linear map, by singular values."""
    return torch.linalg.matrix_norm(matrix_of(function, shape), ord=2).item()


def jacobian_norm(module, example):
    """The spectral norm of a module's Jacobian at one example (without a batch axis)."""
    jacobian = torch.func.jacrev(lambda x: module(x[None])[0].flatten())(example)
    return torch.linalg.matrix_norm(jacobian.flatten(1).double(), ord=2).item()


def singular_values(matrix):
    """Singular values in float64."""
    return torch.linalg.svdvals(matrix.detach().double())
