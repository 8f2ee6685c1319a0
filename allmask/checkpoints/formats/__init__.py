"""Formats of weight files, read without running anything in them."""
