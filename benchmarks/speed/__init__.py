"""How fast the tool itself is."""
