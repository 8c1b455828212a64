"""The data of runs: reading them, and digests to recognise them by."""
