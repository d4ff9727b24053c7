"""Finding a run: signed cards of runs, directories that list them, and what of it this machine can join."""
