"""The experiments, one file each, found by file name."""
