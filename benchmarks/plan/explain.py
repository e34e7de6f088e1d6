"""The arithmetic of one predicted step, term by term, for a person to follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from benchmarks.plan.plan import label
from benchmarks.plan.view import flops_text, rate_text
from benchmarks.words import counted, duration
from contract.layout import held_by, share
from contract.planner.instructions import Begin, Send, shape_of
from contract.planner.places import Place, placement
from contract.planner.predict import MOST_SIMULATED, Prediction, total
from contract.planner.program import step
from contract.planner.work import ELEMENTWISE, product, seconds, update_bytes
from contract.problem import BYTES
from contract.strategy import Run
from shardiff.cost import Network
from shardiff.devices import Machine
from shardiff.record import wire_factor
from shardiff.system.words import size


def lines(one: Prediction, machine: Machine) -> Iterator[str]:
    """The whole story of one mesh on one machine. The terms are those of rank 0."""
    run, device = one.run, machine.device
    placed = placement(run, machine.network)
    yield f"{label(run)} on {machine}, predicted: {duration(one.seconds)} a step"
    yield ""
    yield "Compute of rank 0"
    yield from compute(run, machine)
    yield ""
    yield "Communication of rank 0, if nothing overlapped"
    yield from communication(run, placed.places[0], machine)
    yield ""
    how = "replayed" if run.problem.layers > MOST_SIMULATED and len(placed.ranks) > 1 else "simulated event by event"
    yield f"The step, {how}; of the rank that is done last"
    terms = {"forward and backward passes": one.compute, "bubble: waits for other stages": one.bubble}
    terms |= {f"waits for communication along {axis}": value for axis, value in one.exposed.items()}
    terms |= {"update": one.update, "what nothing hides": one.overhead}
    yield from (f"  {name:44} {duration(value):>9}" for name, value in terms.items() if value)
    yield f"  {'sum':44} {duration(one.seconds):>9}"
    yield f"  max(compute + update, communication), which is no step's time: {duration(one.naive)}"
    yield ""
    yield "Memory of the device that needs most (ZeRO, 1910.02054, section 3.1; contract/memory.py)"
    names = {"parameters": "P", "gradients": "P", "optimizer_state": "its slots x P", "activations": "until backward"}
    for name, value in one.memory.to_json().items():
        yield f"  {name.replace('_', ' '):17} {names[name]:15} {size(value):>9}"
    fits = "fits into" if one.fits else "does not fit into"
    yield f"  {'sum':17} {'':15} {size(total(one.memory)):>9}, {fits} {size(device.memory)}"
    yield ""
    yield from (f"source: {source}" for source in dict.fromkeys((*device.sources, machine.links_source)) if source)


def compute(run: Run, machine: Machine) -> Iterator[str]:
    """The products and elementwise operations of every kind of layer, and the update."""
    device, dtype, mine = machine.device, run.problem.dtype, share(run, 0)
    kinds = Counter((shape_of(part, run), one.rows) for one in mine.passes for part in mine.parts_of(one))
    for ((features, outputs), rows), times in kinds.items():
        work = product(rows, features, outputs, dtype)
        taken, elementwise = seconds(device, features, outputs, dtype, rows)
        yield (
            f"  {counted(times, 'layer')} of X[{rows}, {features}] @ W[{features}, {outputs}]: 2 b F G = "
            f"{work.flops / 1e9:.4g} GFLOP / {flops_text(device.rate(dtype))} = "
            f"{duration(work.flops / device.rate(dtype))} a product"
        )
        if device.roofline:
            memory = work.bytes / device.memory_bandwidth
            bound = ", which is longer" if memory > work.flops / device.rate(dtype) else ""
            yield (
                f"    its operands and result: {size(work.bytes)} / {rate_text(device.memory_bandwidth)} = "
                f"{duration(memory)}{bound} (roofline: Williams et al., CACM 52(4), 2009)"
            )
            accessed = ELEMENTWISE * rows * outputs * BYTES[dtype]
            yield (
                f"    bias and gelu: {ELEMENTWISE} b G e = {size(accessed)} / {rate_text(device.memory_bandwidth)} = "
                f"{duration(elementwise)} each way"
            )
        yield f"    forward 1 product, backward 2 (dX and dW): {duration(3 * taken)} a layer"
    if mine.parts[0].layer == 0:
        yield "    layer 0 needs no dX, as the batch has no gradient"
    elements = sum(sum(mine.elements(part)) for part in held_by(run, 0))
    accessed = update_bytes(run, elements)
    yield (
        f"  update, {run.optimizer}: {accessed / elements / BYTES[dtype]:.0f} accesses x {elements:,} parameters x "
        f"{BYTES[dtype]} bytes = {size(accessed)} / {rate_text(device.memory_bandwidth)} = "
        f"{duration(accessed / device.memory_bandwidth)}"
    )


def communication(run: Run, place: Place, machine: Machine) -> Iterator[str]:
    """Every kind of collective with its wire bytes, bandwidth and latency."""
    network = machine.network
    found: Counter[tuple[str, str, int]] = Counter()
    for one in step(run, 0, machine.device):
        if isinstance(one, Begin):
            found[one.axis, one.op, one.payload] += 1
        elif isinstance(one, Send):
            found["pp", "collective_permute", one.size] += 1
    if not found:
        yield "  none"
    for (axis, op, payload), times in found.items():
        yield from collective(axis, op, payload, times, place, network)


def collective(axis: str, op: str, payload: int, times: int, place: Place, network: Network) -> Iterator[str]:
    """One kind: the formula of `shardiff.cost` with its numbers."""
    group = place.groups[axis]
    factor, bandwidth = wire_factor(op, group.size), network.bandwidth(group)
    wire, latency = network.wire(op, payload, group), network.latency(op, group)
    where = "inside a host" if group.hosts == 1 else f"over {group.hosts} hosts, {group.shared} at once on each host"
    overhead = wire / (payload * float(factor)) if factor else 1.0
    more = f" x {overhead:.3g} (measured)" if abs(overhead - 1) > 1e-6 else ""
    yield (
        f"  {axis}: {times} x {op} of {size(payload)} on {group.size} ranks {where}: {factor} S = {size(wire)}{more} / "
        f"{rate_text(bandwidth)} + {duration(latency)} latency = "
        f"{duration(network.seconds(op, payload, group))} each, "
        f"{duration(times * network.seconds(op, payload, group))} in all"
    )
