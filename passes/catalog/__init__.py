"""Every pass that this installation can run: what it does, reads and may destroy, with an example."""

from passes.catalog.listing import CatalogEntry, catalog, rows_of
