"""Ranks in network namespaces of their own, on links of stated rates."""
