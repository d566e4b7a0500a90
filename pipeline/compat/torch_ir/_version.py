"""The release of pytorch-ir whose surface this is."""

__version__ = "0.2.3"
