"""Stores that several hosts share: etcd and Postgres behind one port, for the journal of a run that any may lead."""
