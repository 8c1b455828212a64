"""The sections of a report, each computed from the files of a run."""
