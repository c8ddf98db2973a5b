"""Answers: loading them, stubs, and torch as it was before them."""
