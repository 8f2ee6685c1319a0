"""Kernels in C, each with its thin Python binding. All are optional: torch is the fallback."""
