"""One file a task: read, encode, predict, score. What a task needs to know is saved beside the model."""
