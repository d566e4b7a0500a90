"""What must not happen to a model: passes to skip, structures to keep, and what passes are known to do."""
