"""Rank processes: started, watched and ended."""
