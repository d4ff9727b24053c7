"""A member's side of the coordinator."""
