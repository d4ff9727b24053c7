"""Kernels compiled by numba; each has a torch or numpy counterpart that gives the same bytes."""
