"""bench steps"""
