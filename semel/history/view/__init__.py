"""What a handle sees at a moment: a generation, a tail, and deletions that the generation does not know."""
