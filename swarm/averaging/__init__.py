"""The butterfly all-reduce of one round: who reduces what, how chunks are summed, how they travel."""
