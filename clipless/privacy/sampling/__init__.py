"""Which examples take part in which step, and the loader that hands them out."""
