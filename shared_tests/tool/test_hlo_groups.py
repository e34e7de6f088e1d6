"""Replica groups and edges by their definition: counted out device by device, for any mesh, iota and mode of ids."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardiff.hlo import HloError
from shardiff.hlo.groups import MAX_IDS, device_edges, device_groups, parse_groups

axis_cuts = st.lists(st.integers(1, 3), min_size=1, max_size=3)  # sizes of the parts of an axis, the slowest first


@settings(max_examples=150)
@given(st.lists(axis_cuts, min_size=1, max_size=3), st.data())
def test_a_mesh_groups_the_devices_that_differ_in_the_named_parts_only(axes, data):
    """Every axis is counted in its parts, like digits; the groups' ids vary the named parts, the first one slowest."""
    parts = [(a, p) for a, cuts in enumerate(axes) for p in range(len(cuts))]
    chosen = data.draw(st.lists(st.sampled_from(parts), unique=True))
    # Neighbouring parts of an axis can be named together: as (the product before them)their product.
    named = []
    for a, p in chosen:
        before, size = prod(axes[a][:p]), axes[a][p]
        whole = len(axes[a]) == 1 and data.draw(st.booleans())
        named.append(f"'{'xyz'[a]}'" if whole else f"'{'xyz'[a]}':({before}){size}")
    mesh = ",".join(f"'{'xyz'[a]}'={prod(cuts)}" for a, cuts in enumerate(axes))
    count = prod(prod(cuts) for cuts in axes)
    listed = data.draw(st.none() | st.permutations(range(count)))
    order = "" if listed is None else f", device_ids=({','.join(map(str, listed))})"
    ids = list(range(count)) if listed is None else listed

    groups: dict[tuple[int, ...], list[int]] = {}
    lengths = [axes[a][p] for a, p in parts]
    rest = [i for i, part in enumerate(parts) if part not in chosen]
    members = {}
    for position, digits in enumerate(product(*map(range, lengths))):
        members[digits] = ids[position]
    for digits in product(*(range(lengths[i]) for i in rest)):
        for inner in product(*(range(axes[a][p]) for a, p in chosen)):
            at = dict(zip(rest, digits, strict=True)) | {parts.index(c): k for c, k in zip(chosen, inner, strict=True)}
            groups.setdefault(digits, []).append(members[tuple(at[i] for i in range(len(parts)))])
    want = sorted(tuple(group) for group in groups.values())
    found, size = parse_groups(f"mesh[{mesh}]{order} {{{','.join(named)}}}")
    assert found is not None and sorted(found) == want
    assert size == prod(axes[a][p] for a, p in chosen)


@settings(max_examples=80)
@given(st.permutations(range(3)), st.tuples(*[st.integers(1, 3)] * 3), st.data())
def test_an_iota_counts_in_the_order_of_its_transposed_dims(order, dims, data):
    count = prod(dims)
    size = data.draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
    strides = (dims[1] * dims[2], dims[2], 1)
    ids = [
        sum(strides[axis] * k for axis, k in zip(order, index, strict=True))
        for index in product(*(range(dims[axis]) for axis in order))
    ]
    want = tuple(tuple(ids[i : i + size]) for i in range(0, count, size))
    text = f"[{count // size},{size}]<=[{','.join(map(str, dims))}]T({','.join(map(str, order))})"
    assert parse_groups(text) == (want, size)
    assert parse_groups(text.replace(",", " , ").replace("<=", " <= ")) == (want, size)
    text = f"mesh['x'={count // size},'y'={size}], device_ids=([{count}]<={text.partition('<=')[2]}) {{'y'}}"
    assert parse_groups(text) == (want, size)


MEANINGS = {  # which ids a replica or partition stands for, and whether one group becomes several
    "cross_replica": lambda group, r, p: [[i * p + k for i in group] for k in range(p)],
    "cross_partition": lambda group, r, p: [[k * p + i for i in group] for k in range(r)],
    "cross_replica_and_partition": lambda group, r, p: [[i * p + k for i in group for k in range(p)]],
    "flattened_id": lambda group, r, p: [group],
}


@settings(max_examples=80)
@given(st.sampled_from(sorted(MEANINGS)), st.integers(1, 4), st.integers(1, 4), st.data())
def test_ids_mean_replicas_partitions_or_both(mode, replicas, partitions, data):
    many = {"cross_replica": replicas, "cross_partition": partitions, "cross_replica_and_partition": replicas}
    ids = data.draw(st.permutations(range(many.get(mode, replicas * partitions))))
    cut = data.draw(st.integers(0, len(ids) - 1))
    listed = [group for group in (ids[:cut], ids[cut:]) if group]
    text = "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in listed) + "}"
    want = [tuple(g) for group in listed for g in MEANINGS[mode](group, replicas, partitions)]
    assert device_groups(text, mode, replicas, partitions) == (tuple(want), max(map(len, want)))
    everyone = tuple(tuple(g) for g in MEANINGS[mode](sorted(ids), replicas, partitions))
    for text in ("{}", "{{}}", "{{},{}}", " { } "):
        assert device_groups(text, mode, replicas, partitions) == (everyone, len(everyone[0]))


@pytest.mark.parametrize("mode", ["cross_replica", "cross_partition", "cross_replica_and_partition"])
def test_ids_that_can_be_no_replicas_or_partitions_are_taken_as_they_stand(mode):
    scope = 3 if mode == "cross_partition" else 2
    beyond = f"{{{{0,{scope}}}}}"
    assert device_groups(beyond, mode, 2, 3) == (((0, scope),), 2)
    assert device_groups(f"{{{{0,{scope - 1}}}}}", mode, 2, 3)[0] != ((0, scope - 1),)
    if mode != "cross_replica_and_partition":
        assert device_edges(beyond, mode, 2, 3) == ((0, scope),)
        assert device_edges(f"{{{{0,{scope - 1}}}}}", mode, 2, 3) != ((0, scope - 1),)


def test_edges_are_between_the_same_partitions_of_replicas_or_the_same_replicas_of_partitions():
    assert device_edges("{{0,1}}", "cross_replica", 2, 3) == ((0, 3), (1, 4), (2, 5))
    assert device_edges("{{0,2},{2,1}}", "cross_partition", 2, 3) == ((0, 2), (3, 5), (2, 1), (5, 4))
    assert device_edges("{}", "cross_replica", 2, 3) == ()


def test_no_groups_are_everyone_and_an_iota_may_be_of_its_own_shape():
    assert parse_groups("{}") == parse_groups("{{},{}}") == ((), 0)
    assert parse_groups("[2,3]") == (((0, 1, 2), (3, 4, 5)), 3)


def test_negative_ids_are_padding():
    assert parse_groups("{{0,1,2},{3,4,-1}}") == (((0, 1, 2), (3, 4)), 3)
    assert parse_groups("{{-1,-1},{0,1}}") == (((0, 1),), 2)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (f"[2,{MAX_IDS}]<=[{2 * MAX_IDS}]", MAX_IDS),
        (f"mesh['x'=2,'y'={MAX_IDS}] {{'y'}}", MAX_IDS),
        (f"mesh['x'=2,'y'={MAX_IDS}] {{'x'}}", 2),
    ],
)
def test_of_more_groups_than_can_be_listed_the_size_is_known(text, size):
    assert parse_groups(text) == (None, size)
    assert device_groups(text, "flattened_id", 1, 2 * MAX_IDS) == (None, size)
    assert device_groups(text, "cross_replica_and_partition", 1, 8) == (None, 8 * size)


def test_as_many_groups_as_can_be_listed_are():
    half = MAX_IDS // 2
    groups, size = parse_groups(f"[2,{half}]<=[{MAX_IDS}]")
    assert groups is not None and (len(groups), groups[1][0], size) == (2, half, half)
    groups, size = parse_groups(f"mesh['x'={half},'y'=2] {{'x'}}")
    assert groups is not None and (len(groups), groups[1][:2], size) == (2, (1, 3), half)
    assert device_groups("{}", "flattened_id", 1, MAX_IDS + 1) == (None, MAX_IDS + 1)
    groups, size = device_groups("{}", "flattened_id", 1, MAX_IDS)
    assert groups is not None and size == MAX_IDS
    assert device_groups("{{0,1}}", "cross_replica", 2, half) == (tuple((i, half + i) for i in range(half)), 2)
    assert device_groups("{{0,1}}", "cross_replica", 2, half + 1) == (None, 2)
    assert device_groups("{{0,1}}", "cross_partition", half, 2) == (tuple((2 * i, 2 * i + 1) for i in range(half)), 2)
    assert device_groups("{{0,1}}", "cross_partition", half + 1, 2) == (None, 2)
    edges = device_edges("{{0,1}}", "cross_replica", 2, half)
    assert edges is not None and len(edges) == half
    assert device_edges("{{0,1}}", "cross_replica", 2, half + 1) is None


def test_groups_and_edges_of_thousands_of_devices_are_listed():
    """The limit is on the number of ids, and not on the number of devices for each of them."""
    n = 8192
    ids = "{{" + ",".join(map(str, range(n))) + "}}"
    assert device_groups(ids, "flattened_id", 1, n) == ((tuple(range(n)),), n)
    assert device_groups(ids, "cross_partition", 1, n) == ((tuple(range(n)),), n)
    pairs = tuple((i, i + 1) for i in range(n - 1))
    text = "{" + ",".join(f"{{{a},{b}}}" for a, b in pairs) + "}"
    assert device_edges(text, "cross_partition", 1, n) == pairs


REFUSED = {
    "[3]<=[3]": "replica groups '[3]<=[3]': expected [groups,size]<=[...]",
    "[1,1,3]<=[3]": "replica groups '[1,1,3]<=[3]': expected [groups,size]<=[...]",
    "[0,3]<=[0]": "replica groups '[0,3]<=[0]': expected [groups,size]<=[...]",
    "[2,2]<=[5]": "replica groups '[2,2]<=[5]' do not multiply up",
    "[2,2]<=[2,2]T(0,0)": "replica groups '[2,2]<=[2,2]T(0,0)' do not multiply up",
    "[2,2]<=[2,2]T(1)": "replica groups '[2,2]<=[2,2]T(1)' do not multiply up",
    "everyone": "replica groups 'everyone' cannot be read",
    "{{0,x}}": "device ids '{{0,x}}' cannot be read",
    "{{0,1-}}": "numbers '0,1-' cannot be read",
    "{{0,1234567890}}": "numbers '0,1234567890' cannot be read",
    "mesh[x=2] {'x'}": "replica groups \"mesh[x=2] {'x'}\": axis 'x=2' cannot be read",
    "mesh['x'=0] {'x'}": "replica groups \"mesh['x'=0] {'x'}\": axis \"'x'=0\" cannot be read",
    "mesh['x'=00] {'x'}": "replica groups \"mesh['x'=00] {'x'}\": axis \"'x'=00\" cannot be read",
    "mesh['x'=2,'x'=2] {'x'}": "replica groups \"mesh['x'=2,'x'=2] {'x'}\": axis \"'x'=2\" cannot be read",
    "mesh['x'=2] {'y'}": "replica groups \"mesh['x'=2] {'y'}\": axis \"'y'\" is not in the mesh",
    "mesh['x'=2] {x}": "replica groups \"mesh['x'=2] {x}\": axis 'x' is not in the mesh",
    "mesh['x'=4] {'x':(3)2}": "replica groups \"mesh['x'=4] {'x':(3)2}\": axis \"'x':(3)2\" does not divide 4",
    "mesh['x'=4] {'x':(0)2}": "replica groups \"mesh['x'=4] {'x':(0)2}\": axis \"'x':(0)2\" does not divide 4",
    "mesh['x'=4] {'x':(2)0}": "replica groups \"mesh['x'=4] {'x':(2)0}\": axis \"'x':(2)0\" does not divide 4",
    "mesh['x'=4] {'x':(4)2}": "replica groups \"mesh['x'=4] {'x':(4)2}\": axis \"'x':(4)2\" does not divide 4",
    "mesh['x'=2] {'x','x'}": "replica groups \"mesh['x'=2] {'x','x'}\" name an axis twice",
    "mesh['x'=6] {'x':(1)2,'x':(1)3}": ("replica groups \"mesh['x'=6] {'x':(1)2,'x':(1)3}\": parts of an axis overlap"),
    "mesh['x'=2], device_ids=(0) {'x'}": (
        "replica groups \"mesh['x'=2], device_ids=(0) {'x'}\": 1 device ids for a mesh of 2"
    ),
    "mesh['x'=2], device_ids=(0,-1) {'x'}": (
        "replica groups \"mesh['x'=2], device_ids=(0,-1) {'x'}\": 2 device ids for a mesh of 2"
    ),
    "mesh['x'=2], device_ids=([3]) {'x'}": (
        "replica groups \"mesh['x'=2], device_ids=([3]) {'x'}\" do not multiply up"
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_groups_that_make_no_sense_are_refused_with_what_is_wrong(text):
    with pytest.raises(HloError) as problem:
        parse_groups(text)
    assert str(problem.value) == REFUSED[text]


def test_edges_that_are_no_pairs_are_refused():
    for text in ("{{0}}", "{{0,1},{2,3,4}}", "{{0,1},{-1,2}}"):
        with pytest.raises(HloError) as problem:
            device_edges(text, "flattened_id", 1, 8)
        assert str(problem.value) == f"source_target_pairs {text!r} are no pairs"
