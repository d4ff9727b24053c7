"""Demonstration runs with several peers on this machine."""
