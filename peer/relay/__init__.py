"""Relays that run beside a host or a peer, and what a host names to its members."""
