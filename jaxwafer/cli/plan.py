"""`jaxwafer plan`: how many wafers, which layer where, how many requests, how fast."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from jaxwafer import planner
from jaxwafer.cli.plan_tables import (
    breakdown_table,
    choice_table,
    outcome_table,
    simulation_table,
    sweep_table,
    wafer_table,
)
from jaxwafer.cli.run import OptionalInt, OptionalPath, check_writable, print_table, write_file, write_json
from jaxwafer.errors import UserError
from jaxwafer.partition.file import document, simulation_fields
from jaxwafer.partition.simulate import Arrival, poisson, simulate_plan

OptionalFloat = Annotated[float | None, tyro.conf.arg(constructor=float, metavar="FLOAT", help_behavior_hint="")]


@dataclass(kw_only=True)
class Plan:
    """Plan a model on hardware: partitions by several strategies, their requests and speeds, from a config alone."""

    model: tyro.conf.Positional[str]
    """a name from checkpoints/, a Hugging Face folder, a config.json or a GGUF file"""
    hardware: str
    """a name from meshes/ (wse-3t, tpu7x, h200, ...), a TOML file, or this-machine (measured)"""
    context: OptionalInt = None
    """tokens that a request holds (default: 8192, or what the model has)"""
    weights: str = "native"
    """the weight policy (see decode)"""
    kv_cache: str = "bf16"
    """fp8, bf16 or f32"""
    strategy: str = "all"
    """all, or with commas of uniform, first-fit, minmax, kv-aware, packed, regions, width and Python files"""
    wafers: OptionalInt = None
    """pipeline stages (default: as few as hold it)"""
    cores: int = 1
    """devices of a stage, among which its layers are split"""
    requests: OptionalInt = None
    """requests that must fit at once"""
    target_tokens_per_second: OptionalFloat = None
    """find the fewest devices that decode a request this fast"""
    micro_batch: int = 1
    """requests that travel together"""
    vocabulary: str = "room"
    """where embedding and head lie: room (where there is room), mesh (on all wafers, as the engine has them) or ends"""
    most_layers: OptionalInt = None
    """most layers on a wafer"""
    change_cost: float = 0.01
    """what one more change of wafers is worth, in wafers (packed)"""
    compute: str = "bf16"
    """the number format of the arithmetic"""
    accepted: float = 1.0
    """tokens a step, above 1 with speculation"""
    stream_weights: bool = False
    """layers wait in external memory and come in one by one"""
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """set a figure of the hardware or a constant, such as hop_s=28e-6 or usd_per_hour=3; may be given several times"""
    simulate: OptionalInt = None
    """also play so many requests through the pipeline, event by event"""
    prompt_tokens: int = 0
    """of each simulated request; 0: already there"""
    output_tokens: int = 256
    """of each simulated request"""
    arrivals_per_second: OptionalFloat = None
    """of simulated requests, at random (default: all at once)"""
    row: OptionalInt = None
    """the plan of this row of the first table, instead of the best"""
    json: OptionalPath = None
    """write the plan to this file, for decode --partition"""
    plot: OptionalPath = None
    """write pictures to this PNG file"""
    html: OptionalPath = None
    """write a page with tables and pictures to this file; it needs no network"""

    def run(self) -> None:
        for flag in ("json", "plot", "html"):
            check_writable(getattr(self, flag), f"--{flag}")
        self._check_load()
        result = planner.plan(
            self.model, self.hardware, strategy=self.strategy, context=self.context, weights=self.weights,
            kv_cache=self.kv_cache, target_tokens_per_second=self.target_tokens_per_second, figures=self.set,
            wafers=self.wafers, cores=self.cores, requests=self.requests, micro_batch=self.micro_batch,
            vocabulary=self.vocabulary, most_layers=self.most_layers, change_cost=self.change_cost,
            compute=self.compute, accepted=self.accepted, streamed=self.stream_weights,
        )  # fmt: skip
        plan = result.best
        if self.row is not None:
            plans = [p for p, _ in result.distinct]
            if not 1 <= self.row <= len(plans):
                raise UserError(f"--row must be from 1 to {len(plans)}, not {self.row}")
            plan = plans[self.row - 1]
        load = self._load(plan) if self.simulate else []
        fields = document(plan, result.plans, result.refused)
        if self.simulate:
            simulated = simulate_plan(plan, load)
            fields["simulation"] = simulation_fields(simulated, plan)
        # Files first: a reader of the tables may go away, as `| head` does.
        if self.json:
            write_json(self.json, fields)
        # Drawing takes a second to import.
        if self.plot:
            from jaxwafer.picture.sheet import png

            write_file(self.plot, png(plan, result.plans))
        if self.html:
            from jaxwafer.picture.page import page

            write_file(self.html, page(result, plan).encode())
        print_table(choice_table(result, plan))
        for reason in dict.fromkeys(result.refused.values()):
            names = ", ".join(n.replace("_", "-") for n, r in result.refused.items() if r == reason)
            print(f"none by {names}: {reason}")
        print_table(wafer_table(plan))
        print_table(breakdown_table(plan))
        print_table(outcome_table(plan, self.target_tokens_per_second))
        print_table(sweep_table(plan))
        if self.simulate:
            print_table(simulation_table(plan, simulated))

    def _check_load(self) -> None:
        for name, least in (("simulate", 1), ("output_tokens", 1), ("prompt_tokens", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                asked = "at least 1" if least else "0 or more"
                raise UserError(f"--{name.replace('_', '-')} must be {asked}, not {value}")
        rate = self.arrivals_per_second
        if rate is not None and not 0 < rate < 1e12:
            raise UserError(f"--arrivals-per-second must be positive, not {rate:g}")

    def _load(self, plan) -> list[Arrival]:
        """The requests that are simulated."""
        tokens, context = self.prompt_tokens + self.output_tokens, plan.problem.context
        if self.prompt_tokens and tokens > context:
            raise UserError(
                f"--prompt-tokens {self.prompt_tokens} and --output-tokens {self.output_tokens} are more than the "
                f"context of {context}"
            )
        return poisson(self.simulate, self.prompt_tokens, self.output_tokens, self.arrivals_per_second)
