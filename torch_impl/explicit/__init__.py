"""The strategies with every collective written."""
