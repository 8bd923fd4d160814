"""Counting collectives in compiled programs' text."""

from v41jax.hlo_collectives import Collective, count_collectives

PROGRAM = """HloModule step

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (state: (s32[], f32[8,64])) -> (s32[], f32[8,64]) {
  %state = (s32[], f32[8,64]{1,0}) parameter(0)
  %x = f32[8,64]{1,0} get-tuple-element(%state), index=1
  %reduced = f32[8,64]{1,0} all-reduce(%x), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %scattered = f32[2,64]{1,0} reduce-scatter(%reduced), channel_id=2, replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %out = (s32[], f32[8,64]{1,0}) tuple(%i, %reduced)
}

%condition (state: (s32[], f32[8,64])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%cheap (x: f32[4]) -> f32[4] {
  ROOT %x = f32[4]{0} parameter(0)
}

%dear (x: f32[4]) -> f32[4] {
  ROOT %g = f32[4]{0} all-reduce(%x), channel_id=3, replica_groups=[1,8]<=[8], to_apply=%add
}

ENTRY %main (p: f8e4m3fn[8,64]) -> f32[8,64] {
  %p = f8e4m3fn[8,64]{1,0} parameter(0)
  %start = (u8[8,64]{1,0}, u8[32,64]{1,0}) all-gather-start(%p), replica_groups={{0,2,4,6},{1,3,5,7}}
  %done = u8[32,64]{1,0} all-gather-done(%start)
  %loop = (s32[], f32[8,64]) while(%init), condition=%condition, body=%body, frontend={"known_trip_count":{"n":"5"}}
  %chosen = f32[4]{0} conditional(%which, %x, %x), branch_computations={%cheap, %dear}
  ROOT %result = f32[8,64]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_loops_are_multiplied_out_and_the_dearer_branch_counts():
    assert count_collectives(PROGRAM) == [
        Collective("all-reduce", 2048, 4, 5),
        Collective("reduce-scatter", 2048, 4, 5),
        Collective("all-gather", 2048, 4, 1),
        Collective("all-reduce", 16, 8, 1),
    ]


def test_a_loop_that_names_no_count_runs_up_to_the_limit_of_its_condition():
    counter = """%condition (state: (s32[], f32[8,64])) -> pred[] {
  %limit.2 = s32[]{:T(128)} constant(7)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  ROOT %less = pred[]{:T(512)} compare(%i, %limit.2), direction=LT
"""
    unnamed = PROGRAM.replace(', frontend={"known_trip_count":{"n":"5"}}', "")
    known = unnamed.replace(PROGRAM[PROGRAM.index("%condition (") : PROGRAM.index("}\n\n%cheap")], counter)
    assert {one.kind: one.count for one in count_collectives(unnamed)}["reduce-scatter"] == 1
    assert {one.kind: one.count for one in count_collectives(known)}["reduce-scatter"] == 7


def test_a_fused_reduce_scatter_of_a_tpu_is_no_all_reduce():
    program = """HloModule m

%all-reduce-scatter.1 (input: f32[64,8]) -> f32[16,8] {
  %sum = f32[64,8]{1,0} all-reduce(%input), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %own = f32[16,8]{1,0} dynamic-slice(%sum, %first, %zero), dynamic_slice_sizes={16,8}
}

ENTRY %main (p: f32[64,8]) -> f32[16,8] {
  ROOT %f = f32[16,8]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1
}
"""
    assert count_collectives(program) == [Collective("reduce-scatter", 2048, 4, 1)]


def test_groups_may_be_named_by_the_axes_of_a_mesh():
    def group(groups: str) -> int:
        line = f"  ROOT %g = f32[4]{{0}} all-reduce(%p), replica_groups={groups}, to_apply=%add\n"
        return count_collectives("HloModule m\n\nENTRY %main (p: f32[4]) -> f32[4] {\n" + line + "}\n")[0].group

    assert group("mesh['axis_0'=8,'axis_1'=4,'axis_2'=2] {'axis_1'}") == 4
    assert group("mesh['axis_0'=8,'axis_1'=4,'axis_2'=2] {'axis_0','axis_2'}") == 16
    assert group("mesh['a'=8] {'a':(2)4}") == 4


def test_a_program_without_collectives_has_none():
    assert (
        count_collectives("HloModule m\n\nENTRY %main (p: f32[]) -> f32[] {\n  ROOT %p = f32[] parameter(0)\n}\n") == []
    )
