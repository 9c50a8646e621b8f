"""``python -m elche``: the command line."""

from elche.cli.main import main

main()
