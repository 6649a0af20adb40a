"""The comparison itself: every field counts, and what cannot be read is refused."""

from dataclasses import fields

import harness
import pytest


def test_every_field_of_a_scheduler_output_is_compared():
    from vllm.v1.core.sched.output import SchedulerOutput

    compared = set(harness.plain(SchedulerOutput.make_empty())) - {"class"}
    assert compared == {field.name for field in fields(SchedulerOutput)}


@pytest.mark.parametrize("number", range(40))
def test_a_change_of_any_field_is_a_difference(number):
    from vllm.v1.core.sched.output import SchedulerOutput

    names = [field.name for field in fields(SchedulerOutput)]
    if number >= len(names):
        return
    one, other = SchedulerOutput.make_empty(), SchedulerOutput.make_empty()
    setattr(other, names[number], "changed")
    assert harness.first_difference(harness.plain(one), harness.plain(other)).startswith(names[number])


def test_a_difference_names_the_path_to_it():
    one, other = {"a": [{"b": 1}, {"b": 2}]}, {"a": [{"b": 1}, {"b": 3}]}
    assert harness.first_difference(one, other) == "a[1].b: 2 / 3"


def test_the_order_of_requests_counts():
    assert harness.first_difference({"a": 1, "b": 1}, {"b": 1, "a": 1}) is not None


def test_true_is_not_one():
    assert harness.first_difference(True, 1) is not None


def test_an_object_without_a_list_of_fields_is_refused():
    with pytest.raises(TypeError, match="no list of fields"):
        harness.plain({"metadata": object()})
