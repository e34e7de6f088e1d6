"""The command line: options, refusals and exit status; nothing is computed here."""
