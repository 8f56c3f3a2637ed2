"""The read-optimized tier: array files, and a generation made of them."""
