"""Limits: of callers by network, of traffic, of downloads, and of what waits unread."""
