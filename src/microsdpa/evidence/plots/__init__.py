"""Plots of the report and of README, drawn from result files."""

from microsdpa.evidence.plots.charts import all_plots
from microsdpa.evidence.plots.figure import Plot

__all__ = ["Plot", "all_plots"]
