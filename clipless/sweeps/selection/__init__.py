"""The privacy cost of selecting the best of several runs."""
