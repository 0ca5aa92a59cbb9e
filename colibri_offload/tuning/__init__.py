"""Measuring a model on this machine."""
