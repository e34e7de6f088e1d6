"""The machine, its processes and network, files, streams and interrupts. Knows no record."""
