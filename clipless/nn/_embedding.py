"""Embeddings with bounded rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clipless.common import require_positive
from clipless.kernels import GradientLimits, bounded_embedding
from clipless.nn._base import ConstrainedModule
from clipless.spectral import Constraint, RowBall


class Embedding(ConstrainedModule):
    """A table of vectors, each of norm at most `norm`, looked up by token.

    For T tokens the output (T, embedding_dim) has norm at most `sqrt(T) * norm`; the gradient of
    the table has norm at most `sqrt(T)` times the cotangent's, reached when all tokens are equal.

    Example:
        >>> Embedding(100, 16)(torch.zeros(2, 5, dtype=torch.long)).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        norm: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_embeddings < 1 or embedding_dim < 1:
            raise ValueError(f"sizes must be positive, got {num_embeddings} x {embedding_dim}")
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.norm = require_positive("norm", norm)
        self.weight = nn.Parameter(
            torch.empty(num_embeddings, embedding_dim, device=device, dtype=dtype)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw rows of uniformly random direction and of norm `norm`."""
        with torch.no_grad():
            nn.init.normal_(self.weight)
            self.weight.mul_(self.norm / torch.linalg.vector_norm(self.weight, dim=1, keepdim=True))
        self.project()

    def constraints(self) -> Mapping[str, Constraint]:
        """Every row in a ball."""
        return {"weight": RowBall(self.norm)}

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, ...) integers below `num_embeddings` -> (batch, ..., embedding_dim)."""
        return F.embedding(tokens, self.weight)

    def forward_bounded(
        self, x: Tensor, parameters: Mapping[str, Tensor], limits: GradientLimits
    ) -> Tensor:
        """Compute what `forward` does, with limits: see `BoundedModule`."""
        return bounded_embedding(x, parameters["weight"], limits, self.weight.dtype)

    def to_torch(self) -> nn.Module:
        """Return an `nn.Embedding` with the same table."""
        plain = nn.Embedding(
            self.num_embeddings,
            self.embedding_dim,
            device=self.weight.device,
            dtype=self.weight.dtype,
        )
        plain.load_state_dict(self.state_dict())
        return plain

    def extra_repr(self) -> str:
        """The arguments, for printing."""
        return f"{self.num_embeddings}, {self.embedding_dim}, norm={self.norm:g}"
