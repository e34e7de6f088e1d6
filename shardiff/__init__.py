"""What a program communicates, and how two programs differ."""
