"""``python -m elche``: the command line."""

from elche.cli import main

main()
