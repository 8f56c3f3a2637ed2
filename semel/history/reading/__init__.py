"""From pointers to histories."""
