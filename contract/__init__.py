"""What both frameworks share: problem, reference, layouts, closed forms. It imports neither torch nor jax."""
