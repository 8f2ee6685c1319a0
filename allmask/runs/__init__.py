"""A training run: its plan, its folder, how it starts, resumes and finishes."""
