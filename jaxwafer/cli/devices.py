"""`jaxwafer devices`: what there is to run on, and which implementation of each operation will run."""

from collections import Counter
from dataclasses import dataclass

import jax
from rich.table import Table

from jaxwafer.cli.run import print_table
from jaxwafer.mesh import find_devices
from jaxwafer.ops.backends import implementations
from jaxwafer.roofline.table import amount


@dataclass
class Devices:
    """Print the devices of each platform and the backend that each operation takes there."""

    def run(self) -> None:
        devices = find_devices()
        platform = devices[0].platform
        table = Table(title=f"jax {jax.__version__} on {platform}", title_justify="left")
        table.add_column("devices")
        table.add_column("memory", justify="right")
        table.add_column("")
        for kind, count in Counter(d.device_kind for d in devices).items():
            first = next(d for d in devices if d.device_kind == kind)
            limit = (first.memory_stats() or {}).get("bytes_limit")
            remark = "virtual ones are set up as --mesh asks" if platform == "cpu" else ""
            table.add_row(f"{count} x {kind}", amount(limit, "B") if limit else "of the host", remark)
        table.add_section()
        for operation, chosen in implementations(platform).items():
            table.add_row(operation, chosen["backend"], chosen["reason"])
        print_table(table)
