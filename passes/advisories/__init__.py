"""What audits of the libraries have found: data, kept as text that a person can review. `passes.audit` finds it."""

from passes.advisories.known import known_table, own_tables, tables_in, unsafe_names
from passes.advisories.table import (
    KINDS,
    ROUND_TRIP,
    UNSAFE,
    AuditEntry,
    AuditFinding,
    AuditTable,
    parse,
    table_of,
    table_text,
)
