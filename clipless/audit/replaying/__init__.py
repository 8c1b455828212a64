"""Replays of a run on a neighbouring data set, with the noisy results that it had."""
