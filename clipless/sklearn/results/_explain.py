"""Importances of columns and parts of a prediction: computed from what was released, for free."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clipless.sklearn.tables._encoder import Encoder
from clipless.sklearn.tables._table import HASH_BUCKETS, Schema

Numbers = NDArray[np.float64]

_ROWS = 2048
_DEPENDENCE_ROWS, _DEPENDENCE_POINTS = 256, 21
_ORDERS = 4  # of columns, and as many reversed ones


def importances(network: torch.nn.Module, encoder: Encoder, schema: Schema) -> Numbers:
    """Return how much each column moves the output, adding up to 1: (columns,).

    Rows are drawn from the released statistics, columns apart: numbers from a Gaussian of their
    centre and spread, categories by their noisy frequency. A column's importance is by how much
    the output moves, on average, when it alone is drawn anew.
    """
    generator = _simulation()
    first, other = _sample(encoder, generator), _sample(encoder, generator)
    base = _outputs(network, encoder, first)
    moved = [
        float((_outputs(network, encoder, _with(first, other, place)) - base).abs().mean())
        for place in _places(schema)
    ]
    total = sum(moved)
    return _by_column(np.array(moved) / total if total > 0 else np.array(moved), schema)


def dependence(
    network: torch.nn.Module, encoder: Encoder, schema: Schema
) -> dict[int, tuple[Numbers, Numbers]]:
    """Return, by position, the mean output over a grid of each numeric column's values.

    The grid, (points,), reaches two and a half spreads from the centre; the other columns are drawn
    from the released statistics as in `importances`. Outputs are (points, outputs).
    """
    rows = tuple(part[:_DEPENDENCE_ROWS] for part in _sample(encoder, _simulation()))
    used = [at for at, kind in enumerate(schema.kinds) if kind != "ignored"]
    steps = torch.linspace(-2.5, 2.5, _DEPENDENCE_POINTS, dtype=torch.float64)
    found = {}
    for at, (part, column) in zip(used, _places(schema), strict=True):
        if part == 1:  # of categories, hashes are known and no names
            continue
        grid = encoder.center[column] + steps * encoder.spread[column]
        outputs = []
        for value in grid:
            numbers = rows[0].clone()
            numbers[:, column] = value
            outputs.append(_outputs(network, encoder, (numbers, rows[1])).mean(0))
        found[at] = (grid.numpy(), torch.stack(outputs).numpy())
    return found


def _simulation() -> torch.Generator:
    return torch.Generator().manual_seed(0)  # of a simulation: it reads no data


def contributions(
    network: torch.nn.Module, encoder: Encoder, schema: Schema, numbers: Tensor, codes: Tensor
) -> Numbers:
    """Return each column's part in the outputs of rows: (n, outputs, columns).

    Parts add up to the output minus that of a reference row: numbers at their centres, no category
    that is frequent, no gaps. Each is the change of the output when the column's value joins those
    of the columns before it, averaged over a few orders of the columns and their reverses.
    """
    reference = (
        encoder.center.expand_as(numbers).clone(),
        torch.full_like(codes, HASH_BUCKETS + 1),
    )
    rows, places = (numbers, codes), _places(schema)
    begin = _outputs(network, encoder, reference)
    found = torch.zeros(*begin.shape, len(places), dtype=torch.float64)
    random = np.random.default_rng(0)
    for _ in range(_ORDERS):
        order = random.permutation(len(places))
        for each in (order, order[::-1]):
            current, before = reference, begin
            for index in each.tolist():
                current = _with(current, rows, places[index])
                after = _outputs(network, encoder, current)
                found[..., index] += (after - before) / (2 * _ORDERS)
                before = after
    columns = np.zeros((*begin.shape, len(schema.kinds)))
    columns[..., [at for at, kind in enumerate(schema.kinds) if kind != "ignored"]] = found.numpy()
    return columns


Row = tuple[Tensor, Tensor]


def _places(schema: Schema) -> list[tuple[int, int]]:
    """For each used column: 0 and its place among the numbers, or 1 and that among the codes."""
    seen, places = [0, 0], []
    for kind in schema.kinds:
        if kind == "ignored":
            continue
        part = 1 if kind == "category" else 0
        places.append((part, seen[part]))
        seen[part] += 1
    return places


def _with(rows: Row, other: Row, place: tuple[int, int]) -> Row:
    """Rows with one column of others."""
    changed = [part.clone() for part in rows]
    part, column = place
    changed[part][:, column] = other[part][:, column]
    return changed[0], changed[1]


@torch.no_grad()
def _outputs(network: torch.nn.Module, encoder: Encoder, rows: Row) -> Tensor:
    outputs: Tensor = network(encoder(*rows)).double()
    return outputs


def _sample(encoder: Encoder, generator: torch.Generator) -> Row:
    normal = torch.randn(_ROWS, len(encoder.center), generator=generator, dtype=torch.float64)
    numbers = encoder.center + normal * encoder.spread
    rates = encoder.rates[len(encoder.indicators) :].split([len(b) + 1 for b in encoder.buckets])
    codes = torch.zeros(_ROWS, len(encoder.buckets), dtype=torch.long)
    for column, (buckets, rate) in enumerate(zip(encoder.buckets, rates, strict=True)):
        drawn = torch.multinomial(rate, _ROWS, replacement=True, generator=generator)
        none = torch.tensor([HASH_BUCKETS + 1])
        codes[:, column] = torch.cat([buckets, none])[drawn]
    return numbers, codes


def _by_column(values: Numbers, schema: Schema) -> Numbers:
    """One value for each column of the table, 0 for those that are not used."""
    found = np.zeros(len(schema.kinds))
    found[[at for at, kind in enumerate(schema.kinds) if kind != "ignored"]] = values
    return found
