"""shardiff plan --prove"""
