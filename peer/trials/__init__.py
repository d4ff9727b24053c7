"""Trials: a study asks which settings are best, by short runs on the peers of one swarm."""
