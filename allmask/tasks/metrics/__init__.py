"""Metrics: arrays or texts in, plain numbers out."""
