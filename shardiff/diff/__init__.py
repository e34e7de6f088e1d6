"""shardiff/diff"""
