"""Commands on what a run has left behind: verify, replay, export."""
