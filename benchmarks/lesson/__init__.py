"""`shardiff lesson`: one page for a strategy or a mesh, made from its code and from a run."""
