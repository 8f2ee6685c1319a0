"""The main job in minutes: a pretrained BERT learns to write summaries of docstrings, by its mask alone."""
