"""The JAX side: strategies, collectives, targets and the HLO reader."""
