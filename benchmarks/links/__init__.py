"""Ranks behind links of limited rate, on one Linux machine."""
