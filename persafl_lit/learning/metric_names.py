"""What every evaluation measures, and which direction of a metric is better."""

MEASURED = ("accuracy", "loss")
"""What every evaluation measures."""
SIGNS = {"higher": 1, "lower": -1}
FURTHER_METRICS = {
    "f1": "F1 score, mean over the classes; higher is better",
    "precision": "Precision, mean over the classes; higher is better",
    "recall": "Recall, mean over the classes; higher is better",
    "auroc": "Area under the ROC curve, mean over the classes that a client has; higher is better",
    "ece": "Expected calibration error, 15 bins; lower is better",
    "top5": "Share of samples whose class is among the five of the highest scores; higher is better",
    "perplexity": "Exponential of the cross-entropy of samples or tokens; lower is better",
    "mae": "Mean absolute error; lower is better",
    "mse": "Mean squared error; lower is better",
}
"""What `eval.metrics` measures by name: functions of learning/metrics.py."""
