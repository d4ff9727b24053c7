"""Committed history of a run: the verdict chain, the rounds' records, and catching up with both."""
