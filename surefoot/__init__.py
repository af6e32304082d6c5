"""Surefoot post-trains language models and never loses the run."""
