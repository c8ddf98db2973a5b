"""Instruments that count bytes."""
