"""Bulk data between peers: sealed frames on plain sockets, in a thread of their own."""
