"""Planted mistakes, each caught by the test that it names: `make mutants` prints the table.

training   mistakes in how a model is trained, and the claims of a run that each must fail; `judge` runs them
planted    mistakes everywhere else, each with the one test that must fail; `in_copy` runs it
"""
