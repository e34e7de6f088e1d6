"""The torch side: every collective is written with torch.distributed."""
