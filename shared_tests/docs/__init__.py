"""What the documents claim."""
