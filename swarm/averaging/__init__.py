"""The butterfly all-reduce of one round by the coordinator's plan: transport and sums of chunks, stand-ins."""
