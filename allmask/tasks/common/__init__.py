"""What several tasks share."""
