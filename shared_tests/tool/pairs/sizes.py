"""The sizes of both models, and how long they are trained."""

D, LAYERS, HEADS, VOCABULARY, TOKENS, BATCH = 32, 2, 4, 64, 16, 8
RANKS, STEPS = 4, 3
