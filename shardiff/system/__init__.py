"""The machine, streams, interrupts and files; knows no record."""
