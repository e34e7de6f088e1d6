"""What the HLO reader says of every case in hlo_cases/, and which devices a collective connects.

hlo_cases/ holds texts with their answers. XLA's own parser (private, so only in tests) accepts every text of ours.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardiff.hlo import HloError, read, read_file
from shared_tests.tool.hlo_modules import ALL, CASES, FLAT, GOOD, module, only, reduce, valid

# The cases.


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.name.removesuffix(".hlo.txt"))
def test_every_case_has_the_records_that_its_answer_lists(path: Path) -> None:
    expected = json.loads(path.with_name(path.name.replace(".hlo.txt", ".json")).read_text())["collectives"]
    found = [json.loads(json.dumps(record.to_json())) for record in read_file(path).records]
    for answer in expected:
        matching = [r for r in found if all(r[key] == value for key, value in answer.items())]
        assert matching, f"no record like {answer} among {found}"
        found.remove(matching[0])
    assert not found, "records that the answer does not list"


@pytest.mark.parametrize("path", sorted(CASES.glob("bad_*")), ids=lambda path: path.name)
def test_every_bad_case_is_refused_in_one_line_that_names_the_file(path: Path) -> None:
    with pytest.raises(HloError) as problem:
        read_file(path)
    assert str(problem.value).startswith(str(path)) and "\n" not in str(problem.value)


# Which devices.


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("{ {0, 1}, {2,3} }", [[0, 1], [2, 3]]),
        ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("{{}}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("[2,4]<=[4,2]T(1,0)", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("[4,2]<=[2,2,2]T(2,1,0)", [[0, 4], [2, 6], [1, 5], [3, 7]]),
        ("mesh['a'=2,'b'=4] {'b'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['a'=2,'b'=4] {'a'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=2,'b'=4] {'a','b'}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("mesh['a'=2,'b'=4] {'b','a'}", [[0, 4, 1, 5, 2, 6, 3, 7]]),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("mesh['a'=4,'b'=2] {'a':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=4,'b'=2] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['a'=4,'b'=2] {'a':(2)2,'b'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh['a'=2,'b'=4], device_ids=(0,1,2,3,7,6,5,4) {'b'}", [[0, 1, 2, 3], [7, 6, 5, 4]]),
    ],
)
def test_every_syntax_of_replica_groups_is_understood(value: str, expected: list) -> None:
    record = only(module(reduce(FLAT + f"replica_groups={value}")))
    assert record.groups is not None and sorted(map(list, record.groups)) == sorted(expected)
    assert record.group_size == len(expected[0])


REPLICAS, PARTITIONS = [[0, 4], [1, 5], [2, 6], [3, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("all-reduce(%p), replica_groups={{0,1}}, to_apply=%add", REPLICAS),
        ("all-reduce(%p), replica_groups={}, to_apply=%add", REPLICAS),
        ("all-reduce(%p), channel_id=1, replica_groups={{0},{1}}, to_apply=%add", PARTITIONS),
        ("all-reduce(%p), channel_id=1, replica_groups={{0,1}}, to_apply=%add", [list(range(8))]),
        ("all-reduce(%p), channel_id=1, replica_groups={}, to_apply=%add", [list(range(8))]),
        (
            f"all-reduce(%p), {FLAT}replica_groups={{{{0,1,6,7}},{{2,3,4,5}}}}, to_apply=%add",
            [[0, 1, 6, 7], [2, 3, 4, 5]],
        ),
        ("all-to-all(%p), replica_groups={{0,1}}, dimensions={0}", REPLICAS),
        ("all-to-all(%p), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}", PARTITIONS),
        (
            "all-to-all(%p), channel_id=1, replica_groups={{0,2},{1,3}}, dimensions={0}",
            [[0, 2], [1, 3], [4, 6], [5, 7]],
        ),
        ("collective-broadcast(%p), replica_groups={{1,0}}", [[4, 0], [5, 1], [6, 2], [7, 3]]),
    ],
)
def test_channel_and_global_ids_decide_whether_an_id_is_a_replica_a_partition_or_both(
    instruction: str, expected: list
) -> None:
    record = only(module(f"ROOT %r = f32[8] {instruction}", header="replica_count=2, num_partitions=4"))
    assert record.groups is not None and sorted(map(list, record.groups)) == sorted(expected)
    assert record.group_size == len(expected[0])


@pytest.mark.parametrize(
    ("channel", "edges"),
    [("", {(0, 4), (1, 5), (2, 6), (3, 7)}), ("channel_id=1, ", {(0, 1), (4, 5)})],
)
def test_edges_of_a_permute_are_replicas_without_a_channel_and_partitions_with_one(channel: str, edges: set) -> None:
    text = f"ROOT %r = f32[8] collective-permute(%p), {channel}source_target_pairs={{{{0,1}}}}"
    record = only(module(text, header="replica_count=2, num_partitions=4"))
    assert record.edges is not None and set(record.edges) == edges


def test_ids_beyond_the_declared_devices_are_taken_as_they_stand_and_counted() -> None:
    module_ = valid(module(reduce("replica_groups={{0,1},{2,3}}"), header="is_scheduled=true"))
    assert module_.num_devices == 4 and module_.records[0].groups == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("header", "collective", "count"),
    [
        ("is_scheduled=true", "all-reduce(%p), replica_groups={}, to_apply=%add", 1),
        ("num_partitions=4", "all-reduce(%p), replica_groups={}, to_apply=%add", 4),
        ("replica_count=2, num_partitions=4", "all-reduce(%p), replica_groups={}, to_apply=%add", 8),
        ("num_partitions=2", "all-reduce(%p), replica_groups={{0,1},{5,2}}, to_apply=%add", 6),
        ("num_partitions=2", "collective-permute(%p), channel_id=1, source_target_pairs={{0,3},{4,1}}", 5),
        ("num_partitions=9", "collective-permute(%p), channel_id=1, source_target_pairs={}", 9),
    ],
)
def test_a_module_runs_on_the_devices_that_it_declares_and_on_those_that_it_names(header, collective, count) -> None:
    assert read(module(f"ROOT %r = f32[8] {collective}", header=header)).num_devices == count


def test_a_module_tells_its_name_and_its_collectives_in_the_order_of_the_text() -> None:
    found = valid(module(reduce(ALL).replace("ROOT %r", "%b") + "\n" + reduce(ALL).replace("%r", "%a")))
    assert (found.name, [record.name for record in found.records]) == ("m", ["b", "a"])
    assert {record.computation for record in found.records} == {"main"}


def test_groups_of_unequal_size_are_flagged_and_the_largest_counts() -> None:
    record = only(module(reduce(FLAT + "replica_groups={{0,1,2,3,4,5},{6,7}}")))
    assert (record.group_size, record.flags, record.wire_bytes) == (6, ("uneven_groups",), 2 * 5 * 32 // 6)


def test_a_permute_to_oneself_or_to_nobody_moves_nothing() -> None:
    for pairs in ("{}", "{{0,0},{1,1}}"):
        text = f"ROOT %r = f32[8] collective-permute(%p), channel_id=1, source_target_pairs={pairs}"
        assert only(module(text)).wire_bytes == 0
