"""bench bubbles"""
