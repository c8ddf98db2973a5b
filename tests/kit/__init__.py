"""Instruments: the memory ruler, answer loading, checks that explain themselves, toy models."""
