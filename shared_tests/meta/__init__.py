"""The tests, tested."""
