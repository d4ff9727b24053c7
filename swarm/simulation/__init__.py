"""Simulated runs: the real deciders of the coordinator, with models of devices, links and churn."""
