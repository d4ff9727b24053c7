"""Checkpoints: what a peer keeps on disk of a run, as folders that are whole or not there."""
