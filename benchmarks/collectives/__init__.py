"""bench collectives"""
