"""Losses: pure functions of a model's outputs and the rows' columns."""
