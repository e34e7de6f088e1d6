"""The JAX side: the strategies under shard_map and as sharding annotations, and what they share."""
