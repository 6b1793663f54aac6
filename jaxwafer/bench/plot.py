"""The roofline of a benchmark: measured points under the machine's two ceilings."""

import numpy as np
from matplotlib.figure import Figure

from jaxwafer.bench.measure import Measured


def roofline(points: list[Measured], flops_ceiling: float, title: str) -> Figure:
    """FLOP/s over FLOPs a byte, both logarithmic. flops_ceiling: of the devices, measured."""
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    bandwidth = max(max(p.ceiling) for p in points)
    intensity = np.array([p.flops_per_token / p.bytes_per_token for p in points])
    reached = np.array([p.flops_per_token * p.decode_tokens_per_s.median for p in points])
    knee = flops_ceiling / bandwidth
    x = np.geomspace(min(intensity.min(), knee) / 3, max(intensity.max(), knee) * 3, 100)
    axes.loglog(x, np.minimum(bandwidth * x, flops_ceiling), color="#333333")
    axes.annotate(f"{bandwidth / 1e9:.1f} GB/s", (x[10], bandwidth * x[10]), rotation=35, va="bottom", fontsize=8)
    axes.annotate(f"{flops_ceiling / 1e9:.0f} GFLOP/s", (x[-20], flops_ceiling), va="bottom", fontsize=8)
    axes.loglog(intensity, reached, "o", color="#b5423c")
    for measured, at in zip(points, zip(intensity, reached, strict=True), strict=True):
        point = measured.point
        label = f" {point.mesh}, {point.requests} x {point.prompt}+{point.new}: {measured.mbu:.0%}"
        axes.annotate(label, at, fontsize=7, va="center")
    axes.set_xlabel("FLOPs a counted byte")
    axes.set_ylabel("FLOP/s in decoding")
    axes.set_title(title, fontsize=10)
    return figure
