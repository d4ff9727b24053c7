"""Membership of a run: this peer's connection, its replica of the anchor, and the rounds it takes part in."""
