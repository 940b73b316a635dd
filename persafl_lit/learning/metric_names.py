"""What every evaluation measures, and which direction of a metric is better."""

MEASURED = ("accuracy", "loss")
"""What every evaluation measures."""
SIGNS = {"higher": 1, "lower": -1}
