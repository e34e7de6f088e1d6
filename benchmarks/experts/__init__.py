"""bench experts"""
