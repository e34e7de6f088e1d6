"""One test suite over all implementations, strategies, meshes and dtypes."""
