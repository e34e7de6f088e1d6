"""What a torch program communicates, seen from outside."""
