"""The explicit side: torch.distributed, every collective written out."""
