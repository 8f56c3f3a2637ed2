"""From a generation and a tail to the next generation."""
