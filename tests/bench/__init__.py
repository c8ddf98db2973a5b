"""Experiments and their figures; nothing here is part of the tests."""
