"""One HTML page of plans: a table to choose from, the wafer strip and charts of each; needs no network."""

import io
from collections.abc import Callable
from importlib.resources import files

import jinja2
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxwafer.partition.evaluate import Plan
from jaxwafer.partition.plan import spans
from jaxwafer.picture import charts
from jaxwafer.planner import Result
from jaxwafer.roofline.table import amount

# What is drawn of each plan.
DRAWN = (charts.speeds, charts.waterfall, charts.contexts)


def page(result: Result, chosen: Plan) -> str:
    """The page of all plans of a result, with `chosen` shown first."""
    text = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    device = chosen.problem.device
    return environment.from_string(text).render(
        problem=result.problem,
        hardware=device.hardware,
        sources=device.sources,
        constants=device.constants,
        refused=result.refused,
        chosen=result.plans.index(chosen),
        plans=[_plan(plan) for plan in result.plans],
        choices=_svg(lambda axes: charts.choices(axes, result.plans, chosen)),
        fills=charts.FILLS,
        names=charts.NAMES,
        amount=amount,
    )


def _plan(plan: Plan) -> dict:
    """What the page shows of a plan."""
    memory = plan.problem.memory
    return {
        "plan": plan,
        "strategy": plan.strategy.replace("_", "-"),
        "wafers": [
            {
                "layers": spans(wafer.layers),
                "kinds": wafer.kinds,
                "parts": {n: (getattr(wafer, n), 100 * max(getattr(wafer, n), 0) / memory) for n in charts.FILLS},
            }
            for wafer in plan.wafers
        ],
        "way": " ".join(f"{v.wafer}" for v in plan.partition.visits if v.layers),
        "revisits": len(charts.revisits(plan.partition)),
        "charts": [_svg(lambda axes, draw=draw: draw(axes, plan)) for draw in DRAWN],
    }


def _svg(draw: Callable[[Axes], None]) -> str:
    """A chart as an SVG element, with text as text."""
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "jaxwafer"}):
        figure = Figure(figsize=(5, 3.6), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        axes.spines[["top", "right"]].set_visible(False)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
