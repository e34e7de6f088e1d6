"""`make mutation`: a general mutation run over the contract, the HLO reader and the diff.

mutmut makes every small edit that it knows in every function, and runs the tests that reach it; its settings are in
pyproject.toml. `equivalent` lists the surviving mutants that change nothing observable, and says why.
"""
