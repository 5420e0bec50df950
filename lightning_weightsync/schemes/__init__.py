"""What a push means: which leaves, and how they are staged, committed, rolled back. Knows no collector or Lightning."""
