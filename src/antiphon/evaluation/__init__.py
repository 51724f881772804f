"""Measuring answers: metrics, the evaluation data, the log of trials and its summary."""
