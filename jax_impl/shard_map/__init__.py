"""The strategies with the forward collectives written under shard_map; the backward ones follow by transposition."""
