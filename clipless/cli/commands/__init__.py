"""The commands of `clipless`, one a file."""
