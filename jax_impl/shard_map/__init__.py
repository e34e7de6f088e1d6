"""Forward collectives written with shard_map; backward ones follow by transposition."""
