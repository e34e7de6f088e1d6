"""Tests of the package shardiff."""
