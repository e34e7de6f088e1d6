"""Strategies and implementations against the reference."""
