"""Adapters: other people's optimizers as steps."""
