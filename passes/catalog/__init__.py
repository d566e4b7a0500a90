"""Every pass that this installation can run: what it does, what it reads, what it may destroy, and a picture of it."""

from __future__ import annotations

from passes.catalog.listing import CatalogEntry, catalog, pass_names, rows_of

__all__ = ["CatalogEntry", "catalog", "pass_names", "rows_of"]
