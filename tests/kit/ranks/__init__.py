"""Ranks: real processes, and one process that stands for many."""
