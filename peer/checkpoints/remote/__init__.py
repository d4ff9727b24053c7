"""Copies of checkpoints at an ``fsspec`` URL."""
