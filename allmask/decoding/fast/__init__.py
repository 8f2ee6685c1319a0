"""Fast decoding from packed weights; it writes what the writers of allmask.decoding write."""
