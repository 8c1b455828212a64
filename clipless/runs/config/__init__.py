"""Configurations of runs: sections, files, recipes."""
