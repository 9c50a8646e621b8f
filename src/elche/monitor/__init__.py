"""Views of a run: metrics, traces, tables, curves and progress."""

from elche.coordination.accounts.metrics import EpochMetrics as EpochMetrics
from elche.coordination.accounts.metrics import Metrics as Metrics
from elche.coordination.accounts.metrics import WindowMetrics as WindowMetrics
