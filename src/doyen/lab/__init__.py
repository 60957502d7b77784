"""Simulated clusters: the same cores and drivers that run on real machines, from one seed."""
