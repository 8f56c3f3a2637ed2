"""Exchange between processes."""
