"""Ranks behind links of limited rate and with a delay, on one Linux machine."""
