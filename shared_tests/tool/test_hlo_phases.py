"""In which phase of a training step the HLO reader says that a collective runs, and which line of source it is from."""

from __future__ import annotations

import pytest

from shardiff.hlo import read
from shared_tests.tool.hlo_modules import ALL, CHOSEN, brief, module, only, reduce, valid


@pytest.mark.parametrize(
    ("op_name", "phase"),
    [
        ("jit(f)/jvp()/dot_general", "forward"),
        ("jit(f)/transpose(jvp())/dot_general", "backward"),
        ("jit(f)/transpose(jvp(checkpoint))/rematted_computation/dot", "backward"),
        ("jit(f)/(jvp()/reduce_sum:transpose(jvp())/dot_general)", "backward"),
        ("jit(step)/optimizer/add", "update"),
        ("jit(f)/jit(transpose)/transpose", "other"),
        ("jit(f)/dynamic_update_slice", "other"),
        ("", "other"),
    ],
)
def test_phase_comes_from_op_name(op_name: str, phase: str) -> None:
    assert only(module(reduce(ALL) + f', metadata={{op_name="{op_name}"}}')).phase == phase


def test_a_collective_that_lost_its_name_takes_the_latest_phase_that_it_reads() -> None:
    text = f"""%f = f32[8] negate(%p), metadata={{op_name="jit(f)/jvp()/neg"}}
    %b = f32[8] negate(%f), metadata={{op_name="jit(f)/transpose(jvp())/neg"}}
    %c = f32[8] copy(%b)
    %x = (f32[8], f32[8]) all-reduce(%f, %c), {ALL}, to_apply=%add
    %y = f32[8] all-reduce(%f), {ALL}, to_apply=%add"""
    assert [record.phase for record in valid(module(text)).records] == ["backward", "forward"]


def test_what_is_combined_runs_when_its_last_operand_is_there_whatever_its_name() -> None:
    text = f"""%f = f32[8] negate(%p), metadata={{op_name="jit(f)/jvp()/neg"}}
    %b = f32[8] negate(%f), metadata={{op_name="jit(f)/transpose(jvp())/neg"}}
    %x = (f32[8], f32[8]) all-reduce(%f, %b), {ALL}, to_apply=%add, metadata={{op_name="jit(f)/jvp()/psum"}}"""
    assert only(module(text)).phase == "backward"


def test_the_name_of_an_argument_tells_no_phase() -> None:
    text = '%q = f32[8] parameter(1), metadata={op_name="optimizer"}\n' + reduce(ALL, operands="%q")
    assert only(module(text)).phase == "other"


def test_a_gather_of_parameters_takes_the_earliest_phase_that_reads_it() -> None:
    text = f"""%g = f32[64] all-gather(%p), {ALL}, dimensions={{0}}
    %h = f32[64] copy(%g)
    %b = f32[64] negate(%h), metadata={{op_name="jit(f)/transpose(jvp())/neg"}}
    %f = f32[64] negate(%h), metadata={{op_name="jit(f)/jvp()/neg"}}"""
    assert only(module(text)).phase == "forward"


def test_a_gather_of_what_the_optimizer_computed_is_update_and_a_sum_of_gradients_backward() -> None:
    text = f"""%g = f32[8] negate(%p), metadata={{op_name="jit(step)/transpose(jvp())/neg"}}
    %sum = f32[8] all-reduce(%g), {ALL}, to_apply=%add, metadata={{op_name="jit(step)/psum"}}
    %new = f32[8] subtract(%p, %sum), metadata={{op_name="jit(step)/sub"}}
    ROOT %all = f32[64] all-gather(%new), {ALL}, dimensions={{0}}, metadata={{op_name="jit(step)/sub"}}"""
    assert [record.phase for record in valid(module(text)).records] == ["backward", "update"]


def test_phase_of_a_nameless_collective_in_a_called_computation_is_that_of_the_caller() -> None:
    text = 'ROOT %w = f32[8] call(%p), to_apply=%yes, metadata={op_name="jit(f)/transpose(jvp())/x"}'
    assert only(module(text, CHOSEN)).phase == "backward"


JVP, TRANSPOSE = "jit(f)/jvp()/x", "jit(f)/transpose(jvp())/x"


@pytest.mark.parametrize(
    ("names", "phase"),
    [
        ((TRANSPOSE, TRANSPOSE), "backward"),
        ((JVP, JVP), "forward"),
        ((JVP, TRANSPOSE), "other"),
        ((JVP, ""), "other"),
        (("", ""), "other"),
    ],
)
def test_callers_tell_a_phase_if_they_agree(names: tuple[str, str], phase: str) -> None:
    """The nameless collective is two calls deep; what is called twice has the phase that both callers have."""
    middle = """%middle (x: f32[8]) -> f32[8] {
      %x = f32[8] parameter(0)
      ROOT %c = f32[8] call(%x), to_apply=%yes
    }"""
    calls = "\n".join(
        f'%w.{i} = f32[8] call(%p), to_apply=%middle, metadata={{op_name="{name}"}}' for i, name in enumerate(names)
    )
    record = only(module(calls, CHOSEN + middle))
    assert (record.phase, brief(record)[3]) == (phase, (2, 2))


REPEATED = {  # what reads the second gather of one value, both of which have the name of that value, and its phase
    f'%x = f32[64] negate(%again), metadata={{op_name="{TRANSPOSE}"}}': "backward",
    f'%x = f32[64] negate(%again), metadata={{op_name="{JVP}"}}': "forward",
    f"""%x = f32[64] negate(%again), metadata={{op_name="{TRANSPOSE}"}}
    %y = f32[64] negate(%again), metadata={{op_name="{JVP}"}}""": "forward",
    "%x = f32[64] negate(%again)": "forward",
}


@pytest.mark.parametrize("readers", REPEATED)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_value_is_gathered_again_for_the_backward_pass_if_that_alone_reads_it(readers: str, is_async: bool) -> None:
    """Since jax 0.11 a TPU's compiler gives both gathers the op_name of what they gather."""
    named = f'{ALL}, dimensions={{0}}, metadata={{op_name="{JVP}"}}'
    again = f"%again = f32[64] all-gather(%f), {named}"
    if is_async:
        again = f"""%start = (f32[8], f32[64]) all-gather-start(%f), {named}
        %again = f32[64] all-gather-done(%start), metadata={{op_name="{JVP}"}}"""
    text = f"""%f = f32[8] negate(%p), metadata={{op_name="{JVP}"}}
    %g = f32[64] all-gather(%f), {named}
    %h = f32[64] negate(%g), metadata={{op_name="{JVP}"}}
    {again}
    {readers}"""
    assert [record.phase for record in valid(module(text)).records] == ["forward", REPEATED[readers]]


def test_a_gather_in_the_fusions_of_a_tpu_has_the_phase_of_what_reads_the_last_of_them() -> None:
    piece = (
        f'all-gather(%a), {ALL}, dimensions={{0}}, frontend_attributes={{chain_id="0"}}, metadata={{op_name="{JVP}"}}'
    )
    fusions = f"""%end (a: f32[8], b: f32[64]) -> f32[64] {{
      %a = f32[8] parameter(0)
      %b = f32[64] parameter(1)
      %all-gather.2 = f32[64] {piece}
      ROOT %c = f32[64] custom-call(%a, %b, %all-gather.2), custom_call_target="AsyncCollectiveDone"
    }}
    %begin (a: f32[8]) -> (f32[8], f32[64]) {{
      %a = f32[8] parameter(0)
      %all-gather.1 = f32[64] {piece}
      ROOT %c = (f32[8], f32[64]) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
    }}"""
    text = f"""%f = f32[8] negate(%p), metadata={{op_name="{JVP}"}}
    %g = f32[64] all-gather(%f), {ALL}, dimensions={{0}}, metadata={{op_name="{JVP}"}}
    %s = (f32[8], f32[64]) fusion(%f), kind=kCustom, calls=%begin
    %s.0 = f32[8] get-tuple-element(%s), index=0
    %s.1 = f32[64] get-tuple-element(%s), index=1
    %h = f32[64] negate(%g), metadata={{op_name="{JVP}"}}
    %again = f32[64] fusion(%s.0, %s.1), kind=kCustom, calls=%end, metadata={{op_name="{JVP}"}}
    %x = f32[64] negate(%again), metadata={{op_name="{TRANSPOSE}"}}"""
    records = module(text, fusions)
    assert sorted(record.phase for record in read(records).records) == ["backward", "forward"]


def test_a_value_that_is_gathered_once_is_gathered_where_its_name_says() -> None:
    """A fusion of a forward and a backward result has the name of one of them."""
    text = f"""%g = f32[64] all-gather(%p), {ALL}, dimensions={{0}}, metadata={{op_name="{JVP}"}}
    %x = f32[64] negate(%g), metadata={{op_name="{TRANSPOSE}"}}"""
    assert only(module(text)).phase == "forward"


READ = {  # what the nameless collective reads, and its phase
    f'negate(%p), metadata={{op_name="{TRANSPOSE}"}}': "backward",
    f'constant({{1,1,1,1,1,1,1,1}}), metadata={{op_name="{TRANSPOSE}"}}': "other",  # a value that others share
    'copy(%g), metadata={op_name="jit(f)/copy"}': "backward",  # gradients moved are gradients
    "negate(%g)": "backward",  # and so are those of which nothing is said
    'negate(%g), metadata={op_name="jit(f)/neg"}': "update",  # arithmetic that differentiation did not write
    'negate(%f), metadata={op_name="jit(f)/neg"}': "forward",
    f'negate(%g), metadata={{op_name="{JVP}"}}': "forward",
}


@pytest.mark.parametrize("read", READ)
def test_a_nameless_collective_has_the_phase_of_what_it_reads(read: str) -> None:
    text = f"""%f = f32[8] negate(%p), metadata={{op_name="{JVP}"}}
    %g = f32[8] negate(%p), metadata={{op_name="{TRANSPOSE}"}}
    %x = f32[8] {read}
    {reduce(ALL, operands="%x")}"""
    assert only(module(text)).phase == READ[read]


@pytest.mark.parametrize(
    ("name", "root", "phase"),
    [("jit(step)/add", "%t", "update"), (TRANSPOSE, "%t", "backward"), ("", "%t", "backward"), (JVP, "%s", "forward")],
)
def test_a_fusion_that_has_lost_its_name_is_named_by_what_it_computes(name: str, root: str, phase: str) -> None:
    """As a TPU's compiler fuses the update of a bias, which ZeRO then gathers: a tuple of moved data at its end."""
    named = f', metadata={{op_name="{name}"}}' if name else ""
    shape = "(f32[8], f32[8])" if root == "%t" else "f32[8]"
    inner = f"""%fused (x: f32[8]) -> {shape} {{
      %x = f32[8] parameter(0)
      %s = f32[8] negate(%x){named}
      %m = f32[8] copy(%s)
      %t = (f32[8], f32[8]) tuple(%m, %x)
    }}"""
    inner = inner.replace(f"      {root} =", f"      ROOT {root} =")
    if root == "%s":
        inner = "\n".join(line for line in inner.splitlines() if "%m =" not in line and "%t =" not in line)
    part = "%part = f32[8] get-tuple-element(%new), index=0" if root == "%t" else "%part = f32[8] copy(%new)"
    text = f"""%g = f32[8] negate(%p), metadata={{op_name="{TRANSPOSE}"}}
    %new = {shape} fusion(%g), kind=kLoop, calls=%fused
    {part}
    ROOT %all = f32[64] all-gather(%part), {ALL}, dimensions={{0}}"""
    assert only(module(text, inner)).phase == phase


def test_a_combined_gather_that_has_an_operand_twice_is_flagged() -> None:
    both = "(f32[64], f32[64]) all-gather(%p, {0}), {1}, dimensions={{0}}"
    twice = only(module(f"ROOT %r = {both.format('%p', ALL)}"))
    assert twice.flags == ("gathered_twice",) and twice.payload_bytes == 512
    other = only(module(f"%q = f32[8] negate(%p)\nROOT %r = {both.format('%q', ALL)}"))
    assert other.flags == ()


def test_what_reads_a_collective_tells_where_nothing_else_does_and_a_name_of_its_own_comes_first() -> None:
    gather = f"%r = f32[64] all-gather(%p), {ALL}, dimensions={{0}}"
    reader = '%y = f32[64] negate(%r), metadata={{op_name="{0}"}}'
    for name, phase in ((JVP, "forward"), (TRANSPOSE, "backward"), ("jit(f)/optimizer/x", "update")):
        assert only(module(f"{gather}\n{reader.format(name)}")).phase == phase
    named = f'{gather}, metadata={{op_name="{TRANSPOSE}"}}\n{reader.format(JVP)}'
    assert only(module(named)).phase == "backward"


TABLES = """
FileNames
1 "model.py"
2 "dir/train \\"x\\".py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=3 end_column=9}
2 {file_name_id=2 function_name_id=1 line=99 end_line=99 column=3 end_column=9}

StackFrames
1 {file_location_id=2 parent_frame_id=1}
2 {file_location_id=1 parent_frame_id=2}

"""


@pytest.mark.parametrize(
    ("metadata", "source"),
    [
        ('op_name="x" stack_frame_id=2', "model.py:12"),
        ('op_name="stack_frame_id=2" source_file="a/b.py" source_line=7', "a/b.py:7"),
        ('op_name="x"', None),
        ('op_name="x" stack_frame_id=0', None),
    ],
)
def test_source_line_comes_from_the_stack_frame_tables_or_from_the_metadata(metadata: str, source: str | None) -> None:
    text = module(reduce(ALL) + f", metadata={{{metadata}}}").replace(
        "num_partitions=8\n", "num_partitions=8\n" + TABLES
    )
    assert only(text).source == source
