"""Placement of stages on peers: the model of a plan's speed, the search, the changes."""
