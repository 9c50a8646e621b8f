"""What a run looks like from outside: traces, tables, curves and progress."""
