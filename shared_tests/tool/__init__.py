"""The package shardiff."""
