"""No collective written: sharding rules are stated and XLA derives the communication."""
