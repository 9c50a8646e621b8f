"""Runs on a cluster of Ray: one actor per rank, on nodes of any kind.

`elche.ray.run` starts a function or a script, as `elche.launch` and `elche run` do on
one machine. It needs ``pip install "elche[ray]"``.
"""

from elche.errors import ConfigError

try:
    import ray as _ray  # noqa: F401
except ImportError as error:
    raise ConfigError(
        f"elche.ray needs Ray; install it with pip install 'elche[ray]' ({error})"
    ) from error
from elche.ray.rank_specs import PerNode as PerNode
from elche.ray.rank_specs import RankSpec as RankSpec
from elche.ray.running import run as run

per_node = PerNode

__all__ = ["RankSpec", "per_node", "run"]
