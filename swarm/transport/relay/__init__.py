"""Relays: what one serves, and how its clients register and call."""
