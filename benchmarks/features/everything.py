"""All features: importing this fills `FEATURES`, in the order of the table."""

# ruff: noqa: I001  # the order is the table's
from benchmarks.features import optimizing as optimizing
from benchmarks.features import scheduling as scheduling
from benchmarks.features import looping as looping
from benchmarks.features import modelling as modelling
from benchmarks.features import loading as loading
from benchmarks.features.feature import FEATURES as FEATURES
