"""Everything that holds peers together: identities, encrypted links, the coordinator, and averaging."""
