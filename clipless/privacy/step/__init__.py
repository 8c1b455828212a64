"""One private step, from the sample to the projection, and what keeps it in order."""
