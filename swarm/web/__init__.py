"""The run's page for browsers: read-only, without an invite or a volunteer's address in it."""
