"""Private names of torch: every one that elche uses.

torch may rename what begins with an underscore in any release, so no other room of
elche names it. Each name is looked up here once, when this room is imported, so that a
call costs what it costs torch itself. Where torch lacks it, one warning says so, and
what needs it is refused by name.
"""
