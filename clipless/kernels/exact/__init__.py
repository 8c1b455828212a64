"""Sums of weights' gradients as sums of integers: exact, whatever the order and the other rows."""
