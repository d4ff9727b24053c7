"""The coordinator: membership, leases, rounds and verdicts of a run, journaled before they are announced."""
