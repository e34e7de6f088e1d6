"""Starts processes, one per rank, watches them and ends them: one supervisor for torch and JAX. Uses system only."""
