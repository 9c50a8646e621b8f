"""Measured efficiency of links: what payload reaches of the rate a link is sold at.

Headers and acknowledgements take some, and a sum in rounds leaves the link idle between
them. Pure.
"""

from __future__ import annotations

from elche.errors import ConfigError

LINK_EFFICIENCY = 0.8
"""Default where a rate is declared: reductions behind links shaped to 10 and 100 Mbit/s
take 1.1 to 1.4 times what their bytes ask for, if the cores keep up
(docs/benchmarks.md, "Behind a slow link").
"""


def check_efficiency(efficiency: float) -> None:
    """Refuses what no link can have.

    Raises:
        ConfigError: it is not above 0 and at most 1.
    """
    if not 0.0 < efficiency <= 1.0:
        raise ConfigError(
            f"efficiency must be above 0 and at most 1, got {efficiency!r}; it is the "
            "part of bytes_per_s that payload reaches"
        )
