"""shardiff plan"""
