"""The engine: paged, continuously batched, role-free."""
