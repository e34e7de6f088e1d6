"""What both sides must agree on: NumPy and the standard library only, neither torch nor jax."""
