"""Checkpoints on other machines' storage: copied there in the background, and restored from there."""
