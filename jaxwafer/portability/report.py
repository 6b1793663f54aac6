"""Outcomes held against each other, and the report of them as Markdown and JSON."""

from dataclasses import dataclass

import numpy as np

from jaxwafer.portability.cases import Case
from jaxwafer.portability.measure import Outcome

# Largest difference of a log-probability that rounding explains, and why; activations are float32 throughout.
SAME_WEIGHTS = 1e-3, "the same numbers, summed in another order"
PLATFORMS = 5e-3, "other exponentials and another order of sums; products at full precision"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Of one case against another, or against a recorded one. difference: the largest of a log-probability."""

    case: str
    like: str
    equal: bool
    difference: float
    tolerance: float
    why: str

    @property
    def holds(self) -> bool:
        return self.equal and self.difference <= self.tolerance


def compare(name: str, found: Outcome, like: str, wanted: Outcome, tolerance: tuple[float, str]) -> Verdict:
    difference = float(np.max(np.abs(np.subtract(found.logprobs, wanted.logprobs))))
    return Verdict(case=name, like=like, equal=found.tokens == wanted.tokens, difference=difference,
                   tolerance=tolerance[0], why=tolerance[1])  # fmt: skip


def within(chosen: list[Case], found: dict[str, Outcome]) -> list[Verdict]:
    """Every case of a platform against the one that it should be like."""
    return [
        compare(case.name, found[case.name], case.like, found[case.like], SAME_WEIGHTS) for case in chosen if case.like
    ]


def across(found: dict[str, Outcome], recorded: dict[str, Outcome], where: str) -> list[Verdict]:
    """Every case of a platform against the same case elsewhere."""
    return [compare(name, found[name], where, recorded[name], PLATFORMS) for name in found if name in recorded]


def markdown(report: dict) -> str:
    """The report that `scripts/portability` writes as JSON, for people."""
    lines = ["# Portability", ""]
    for platform in report["platforms"]:
        facts = platform["facts"]
        lines += [
            f"## {facts['device_kind']} ({facts['platform']}, jax {facts['jax']})", "",
            f"- devices, in JAX's order: {', '.join(facts['devices'])}",
            f"- memories: {', '.join(facts['memories'])}; arrays are made in {facts['default_memory']}",
            f"- without a kernel, so that plain JAX runs: {', '.join(facts['reference']) or 'nothing'}",
            f"- donated caches written in place: {_donated(platform['outcomes'])}", "",
            "| case | like | tokens | log-probability | tolerance | why | backend of products | MBU | compile |",
            "|---|---|---|---|---|---|---|---|---|",
        ]  # fmt: skip
        verdicts = {(v["case"], v["like"]): v for v in platform["verdicts"]}
        for name, outcome in platform["outcomes"].items():
            own = [v for (case, _), v in verdicts.items() if case == name] or [None]
            for verdict in own:
                lines.append(_row(name, outcome, verdict))
        lines.append("")
    if report["targets"]:
        lines += [
            "## Compiled for TPUs that are not here", "",
            "| target | model | program | compile | arguments | peak | bytes / counted | copied whole |",
            "|---|---|---|---|---|---|---|---|",
        ]  # fmt: skip
        for target in report["targets"]:
            for name, program in target["programs"].items():
                ratio = f"{target['round']['ratio']:.2f}" if name == "one round, unrolled" else ""
                copies = ", ".join(program["copies"]) or "nothing"
                lines.append(
                    f"| {target['target']} | {target['model']} | {name} | {program['seconds']:.1f} s | "
                    f"{program['arguments'] / 1e6:.2f} MB | {program['peak'] / 1e6:.2f} MB | {ratio} | {copies} |"
                )
        lines.append("")
    return "\n".join(lines)


def _row(name: str, outcome: dict, verdict: dict | None) -> str:
    products = sorted({b[0] for op, b in outcome["backends"].items() if "matmul" in op})
    tail = f"{', '.join(products)} | {outcome['mbu']:.1%} | {outcome['compile_s']:.1f} s |"
    if verdict is None:
        return f"| {name} | | | | | | {tail}"
    tokens = "equal" if verdict["equal"] else "**differ**"
    return (
        f"| {name} | {verdict['like']} | {tokens} | {verdict['difference']:.1e} | {verdict['tolerance']:.0e} | "
        f"{verdict['why']} | {tail}"
    )


def _donated(outcomes: dict[str, dict]) -> str:
    copied = [name for name, outcome in outcomes.items() if outcome["aliased"] < outcome["cache"]]
    return f"not in {', '.join(copied)}" if copied else "in every case"
