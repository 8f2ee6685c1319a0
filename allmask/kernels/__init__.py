"""What is written in C, each file with its thin Python binding. All of it is optional: torch is the fallback."""
