"""Output for people and machines: events in words, the live panel, JSON lines."""
