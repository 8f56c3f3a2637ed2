"""``python -m semel.cli``: the command without its installed script; the demo starts its server this way."""

from semel.cli import main

main()
