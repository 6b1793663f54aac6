"""All charts of a plan on one sheet."""

import io

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from jaxwafer.partition.evaluate import Plan
from jaxwafer.picture import charts


def figure(plan: Plan, plans: tuple[Plan, ...]) -> Figure:
    sheet = Figure(figsize=(14, 9), layout="constrained")
    FigureCanvasAgg(sheet)
    grid = sheet.add_gridspec(2, 4, height_ratios=(1.1, 1))
    charts.strip(sheet.add_subplot(grid[0, :]), plan)
    charts.choices(sheet.add_subplot(grid[1, 0]), plans, plan)
    charts.speeds(sheet.add_subplot(grid[1, 1]), plan)
    charts.waterfall(sheet.add_subplot(grid[1, 2]), plan)
    charts.contexts(sheet.add_subplot(grid[1, 3]), plan)
    for axes in sheet.axes:
        axes.spines[["top", "right"]].set_visible(False)
    return sheet


def png(plan: Plan, plans: tuple[Plan, ...]) -> bytes:
    """A PNG of the strip, all plans, micro-batches, a token's time and requests against context."""
    out = io.BytesIO()
    figure(plan, plans).savefig(out, format="png", dpi=130)
    return out.getvalue()
