"""One suite over (implementation, strategy, mesh, dtype)."""
