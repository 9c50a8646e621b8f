"""Views of a run: traces, tables, curves and progress."""
