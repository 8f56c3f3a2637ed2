"""Where a store lives: a folder or object storage, its manifest, who may append, who still reads."""
