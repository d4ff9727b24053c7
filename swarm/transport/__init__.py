"""Connections between machines: encrypted control messages and sealed bulk frames."""
