"""A caller's module stays as it was: what a run of it sets, adds or removes is undone.

`untouched.py` is the way in, and keeps the attributes of modules; `reach.py` finds what is in reach of them, and
`entries.py` knows how each kind of object is read and written back. `tables.py` keeps what classes and files share.
"""

from pipeline.importers.from_torch.untouched.untouched import untouched

__all__ = ["untouched"]
