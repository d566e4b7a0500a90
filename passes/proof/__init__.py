"""Numeric proof: models against references, in a process of its own, and no more of a model than has to be run."""
