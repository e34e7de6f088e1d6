"""What is measured, and the report."""
