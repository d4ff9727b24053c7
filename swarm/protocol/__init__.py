"""Contents that both sides agree on: run files, invites, identities, messages and their bytes."""
