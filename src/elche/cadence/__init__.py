"""The amount of work per rank between two synchronisations, from timings.

Pure: timings in, counts and sizes out. No torch, no clock, no threads.

* ``throughput``: the smoothed time that a unit of work costs a rank.
* ``el_che``: batch counts per window, for the policies with windows.
* ``balancer``: shares of a global batch, for the policy ``sync``.
* ``window``: at which batch boundary a window ends.
"""

from elche.cadence.el_che import ElChe as ElChe
from elche.cadence.el_che import ElCheConfig as ElCheConfig
