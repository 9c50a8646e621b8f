"""Computes the work per rank between two synchronisations, from timings.

Pure: timings in, counts and sizes out. No torch, no clock, no threads.

* ``throughput``: the smoothed time per unit of work on a rank.
* ``el_che``: batch counts per window, for the policies with windows.
* ``balancer``: shares of a global batch, for the policy ``sync``.
* ``window``: the batch boundary at which a window ends.
"""

from elche.cadence.el_che import ElChe as ElChe
from elche.cadence.el_che import ElCheConfig as ElCheConfig
