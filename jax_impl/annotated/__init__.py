"""The strategies as sharding rules. No collective is written; XLA derives the communication."""
