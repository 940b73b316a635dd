"""Measured ratios, each in one run on one machine. `make bench` writes results.json and a table."""
