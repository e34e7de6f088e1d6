"""What a result must hold to be read: the types and ranges of everything that tables, pictures and comparisons use.

A schema is a test of a value, {key: schema} for an object with at least these keys, [schema] for a list, {ANY: schema}
for an object with keys of any name. Other keys may be there and are not looked at.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from benchmarks.collectives.timing import OPS
from contract.problem import DTYPES
from contract.strategy import AXES
from contract.strategy import IMPLEMENTATIONS as OURS
from shardiff.system.inputs import one_line

ANY = "*"
NAME = re.compile(r"[\w .,:;+=()/%-]{1,200}")
MOST = 10**18  # beyond any figure that is measured here, and within what floats and pictures can hold


def text(value: Any) -> bool:
    """A string."""
    return isinstance(value, str)


def name(value: Any) -> bool:
    """A word or some, which tables and pictures can show as they are."""
    return isinstance(value, str) and NAME.fullmatch(value) is not None


def flag(value: Any) -> bool:
    """True or false."""
    return isinstance(value, bool)


def count(value: Any) -> bool:
    """A whole number, 0 or more."""
    return type(value) is int and 0 <= value <= MOST


def several(value: Any) -> bool:
    """A whole number, 1 or more."""
    return count(value) and value >= 1


def number(value: Any) -> bool:
    """Any number."""
    return type(value) in (int, float) and abs(value) <= MOST


def amount(value: Any) -> bool:
    """A number, 0 or more."""
    return number(value) and value >= 0


def positive(value: Any) -> bool:
    """A number above 0."""
    return number(value) and value >= 1 / MOST


def maybe(schema: Any) -> Callable[[Any], bool]:
    """Or null."""
    return lambda value: value is None or flaw(schema, value) is None


def among(*values: str) -> Callable[[Any], bool]:
    """One of these strings."""
    return lambda value: isinstance(value, str) and value in values


def composed(value: Any) -> bool:
    """A strategy, or several on the axes of a mesh: `data_parallel x tensor_parallel`."""
    return isinstance(value, str) and all(part in AXES for part in value.split(" x "))


def event(value: Any) -> bool:
    """[rank, kind, microbatch, start, end, name] of a timeline; see `benchmarks.bubbles.timeline.Event`."""
    if not isinstance(value, list) or len(value) != 6:
        return False
    rank, kind, microbatch, start, end, what = value
    numbers = count(rank) and count(start) and count(end) and start <= end and maybe(count)(microbatch)
    return numbers and text(kind) and text(what)


def spread_of(figure: Callable[[Any], bool]) -> dict[str, Any]:
    """A median and its quartiles."""
    return dict.fromkeys(("median", "q1", "q3"), figure)


SIZES = {"batch": several, "width": several, "layers": several, "dtype": among(*DTYPES)}
HELD = dict.fromkeys(("parameters", "gradients", "optimizer_state", "activations", "temporaries"), maybe(count))
SIDE = {"records": [{}], "totals": {"wire_bytes": {"min": count}}}
DIFF = {
    "strategy": composed,
    "implementation": name,
    "target": name,
    "mesh": {ANY: several},
    "left": {**SIDE, "traced": flag},
    "right": {**SIDE, "memory": {ANY: count}},  # work came later, and may be missing
    "closed_form": {"records": [{}]},
    "rows": [
        {
            **dict.fromkeys(("verdict", "why"), text),
            "rules": [text],
            **dict.fromkeys(("left", "right"), [{}]),
            "bytes": {"left": count, "right": count},
        }
    ],
    "unexplained": count,
}
TIMES = dict.fromkeys(("min_s", "median_s", "p99_s", "rank_min_s", "rank_mean_s", "rank_max_s"), positive)
COLLECTIVE = {
    "implementation": among("torch", "jax"),
    "op": among(*OPS),
    "runs_as": name,
    "ranks": several,
    "bytes": several,
    "mode": name,
    "iterations": several,
    **TIMES,
    "algbw_GBps": positive,
    "busbw_GBps": amount,
    "correct": flag,
}
FIT = {
    "implementation": among("torch", "jax"),
    "op": among(*OPS),
    "ranks": several,
    "mode": name,
    "alpha_s": amount,
    "beta_GBps": maybe(positive),
    "bus_beta_GBps": maybe(amount),
    "relative_error": amount,
}
STEP = {
    "ranks": several,
    "strategy": composed,
    **dict.fromkeys(("implementation", "framework"), name),
    "peer": flag,
    "step_seconds": spread_of(positive),
    "compute_seconds": maybe(spread_of(number)),
    "exposed_seconds": maybe(spread_of(number)),
    "exposed_share": maybe(number),
    "samples_seconds": [[positive]],
    "memory": {"measured": HELD, "closed_form": maybe(HELD)},
    "wire_bytes": maybe(count),
    "loss": maybe(number),
    "difference": maybe(amount),
}
RATIO = {
    "ranks": several,
    "strategy": composed,
    **dict.fromkeys(("of", "to", "by"), name),
    "ratio": spread_of(number),
}
RATES = ("matmul_flops_per_second", "forward_backward_flops_per_second", "share", "update_share")
RATES += ("update_bytes_per_second", "copy_bytes_per_second")
PIPELINE = {"framework": among("torch", "jax"), "implementation": among(*OURS), "stages": several}
FITTED = {
    "implementation": among(*OURS),
    "stages": several,
    **dict.fromkeys(("work_seconds", "tick_seconds", "worst_residual"), number),
}
BUBBLE = {
    **PIPELINE,
    "schedule": name,
    "microbatches": several,
    "theory": number,
    "measured": spread_of(number),
    "weighted": maybe(spread_of(number)),
    "of_theory": number,
    "step_seconds": spread_of(positive),
}
MACHINE = {
    **dict.fromkeys(("os", "cpu", "python", "date"), text),
    **dict.fromkeys(("cores", "memory_bytes"), count),
    "gpus": [text],
    "versions": {ANY: maybe(text), "torch": maybe(text), "jax": maybe(text)},
    "commit": maybe(text),
}
CHECKED = {
    **dict.fromkeys(("implementation", "strategy", "mesh", "dtype", "optimizer"), name),
    "steps": count,
    **dict.fromkeys(("loss_error", "grad_error", "param_error"), maybe(amount)),
    "passed": flag,
}
COLLECTIVES = {
    "method": [text],
    "settings": {
        "ranks": [several],
        "iterations": several,
        "budget": positive,
        **dict.fromkeys(("transport", "device"), name),
        "threads_per_rank": {ANY: several},
    },
    "floor": maybe({"memory_copy_GBps": positive, "loopback_GBps": {ANY: positive}}),
    "rows": [COLLECTIVE],
    "fits": [FIT],
    "identities": [{"implementation": name, "ranks": several, "identity": text, "holds": flag}],
    "flat": maybe({"is_flat": flag, "sentence": text}),
}
STEPS = {
    "method": {ANY: text},
    "settings": {**SIZES, "optimizer": name, "microbatches": several, "iterations": several, "rounds": several},
    "rows": [STEP],
    "ratios": [RATIO],
    "single_device": [{"framework": name, "batch": several, **dict.fromkeys(RATES, spread_of(positive))}],
    "failures": [text],
}
BUBBLES = {
    "method": {ANY: text},
    "settings": {**SIZES, "iterations": several},
    "skipped": [{"stages": several, "reason": text}],
    "rows": [BUBBLE],
    "fits": [FITTED],
    "timelines": [{**PIPELINE, "microbatches": several, "events": [event]}],
}
SCHEMAS = {
    "check": {"rows": [CHECKED]},
    "diff": {
        "settings": {**SIZES, "microbatches": several},
        "diffs": [DIFF],
        "skipped": [{"target": name, "reason": text}],
    },
    "collectives": COLLECTIVES,
    "steps": STEPS,
    "bubbles": BUBBLES,
}


def broken(section: str, document: Any) -> str | None:
    """What is wrong with a document of this section; None if it holds what it must."""
    whole = {"machine": MACHINE, **SCHEMAS[section]}
    found = flaw(whole, document) or _others(document)
    return found or (_timelines(document) if section == "bubbles" else None)


def flaw(schema: Any, value: Any, where: str = "") -> str | None:
    """What does not fit the schema: where, and what is there; None if it does."""
    here = where.lstrip(".") or "it"
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            return f"{here} is {_shown(value)}, not an object"
        each = schema.get(ANY)
        for key in schema:
            if key != ANY and key not in value:
                return f"{here} has no {key}"
        inner = ((key, schema.get(key, each), one) for key, one in value.items() if key in schema or each)
        return next((found for key, one, v in inner if (found := flaw(one, v, f"{where}.{key}"))), None)
    if isinstance(schema, list):
        if not isinstance(value, list):
            return f"{here} is {_shown(value)}, not a list"
        inner = (flaw(schema[0], one, f"{where}[{i}]") for i, one in enumerate(value))
        return next((found for found in inner if found), None)
    return None if schema(value) else f"{here} cannot be {_shown(value)}"


def _shown(value: Any) -> str:
    kinds = {dict: "an object", list: "a list"}
    return kinds.get(type(value)) or one_line(repr(value) if not isinstance(value, int) else hex(value))[:40]


def _others(document: Any) -> str | None:
    """What not every result has."""
    optional = {"command": maybe(text), "complete": flag, "kind": text, "settings": {}}
    found = flaw({key: schema for key, schema in optional.items() if key in document}, document)
    device = {"device": text} if "device" in document.get("settings", ()) else {}
    return found or flaw({"settings": device} if device else {}, document)


def _timelines(document: Any) -> str | None:
    """Each timeline must belong to a row, and be of stages that the row has."""
    keys = ("implementation", "stages", "microbatches")
    rows = {tuple(row[key] for key in keys) for row in document["rows"]}
    for i, one in enumerate(document["timelines"]):
        busy = [event for event in one["events"] if event[1] in ("forward", "backward")]
        outside = any(event[0] >= one["stages"] for event in one["events"])
        if tuple(one[key] for key in keys) not in rows or outside or (one["framework"] == "torch" and not busy):
            return f"timelines[{i}] is of no row"
    return None
