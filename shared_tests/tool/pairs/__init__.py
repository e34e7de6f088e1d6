"""One small GPT written twice, in torch and in flax nnx: what does `shardiff diff` say of the same training?"""
