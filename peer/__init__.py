"""Software of a volunteer's machine: commands, sessions of training loops, state, recipes and data."""
