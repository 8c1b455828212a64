"""Data sets by name: where they are found, how they are read and checked."""
