"""Secure averaging: masked contributions, of which nobody sees more than a group's sum."""
