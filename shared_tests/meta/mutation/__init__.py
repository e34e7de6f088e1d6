"""A general mutation run over the contract, the HLO reader and the diff: `make mutation`.

mutmut makes every small edit that it knows of in every function, and runs the tests that reach it; its settings are in
pyproject.toml. `equivalent` says of those that survive which change nothing that could be seen, and why.
"""
