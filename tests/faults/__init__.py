"""Faults and hostile input: what a run survives, and what never gets in."""
