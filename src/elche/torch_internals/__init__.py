"""All private names of torch that elche uses.

torch may rename private names in any release, so no other package of elche uses them.
Each name is looked up once at import, so that a call has no overhead. If torch lacks a
name, one warning is logged, and features that need it raise an error that names it.
"""
