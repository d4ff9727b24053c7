"""What runs on a volunteer's machine: the daemon, the training loop's session, recipes and data."""
