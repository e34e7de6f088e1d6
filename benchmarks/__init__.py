"""What people run: check, diff, bench, and the command line around them."""
