"""Private names of torch: every one that elche uses, and its fallback.

torch may rename what begins with an underscore in any release, so no other room of
elche names it. Each name is looked up here once, when this room is imported, so that a
call costs what it costs torch itself. Where torch has it no more, one warning says what
elche does instead: the same by public means, more work for the same gradient, or an
error as soon as something needs it.

``since`` is the oldest torch that was found to have the name; 2.0 is as far back as was
looked, and elche itself needs 2.9.
"""
