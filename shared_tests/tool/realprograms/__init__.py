"""Training steps as people write them, with libraries that know nothing of us; `make realprograms` reads them all."""
