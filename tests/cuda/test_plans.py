"""Plans that the tuner tries: all of them compute the same, and one that does not is found."""

import io
from dataclasses import dataclass, replace

import pytest
import torch
from card import DEVICE
from rich.console import Console
from triton.runtime.errors import OutOfResources

from eyas.kernels import fragment_linear, splitk_sdpa
from eyas.tools.bench_cuda_attention import Case
from eyas.tools.bench_cuda_plans import attention_calls, attention_plans, int4_calls, int4_plans, time_plans

SHAPE, ROWS = (256, 512), (1, 9)


def timed(kernels, plans, calls):
    """Each plan's figures and what was shown, by a clock that counts calls."""
    console = Console(width=140, file=io.StringIO())
    found = time_plans(kernels, plans, calls, "plans", console, lambda call, times: float(times))
    return found, console.file.getvalue()


@pytest.mark.parametrize(("group", "offsets", "n_plans"), [(128, False, 19), (32, True, 7)])
def test_int4_plans(group, offsets, n_plans):
    base = replace(fragment_linear.plan(*SHAPE, group), splits=2)
    plans = list(int4_plans(base, base, group))
    first = replace(base, mma=True)
    assert list(int4_plans(first, base, group)) == [first, *plans]
    found, _ = timed(fragment_linear, plans, int4_calls(SHAPE, group, offsets, ROWS, DEVICE))
    assert len({row["plan"] for row in found}) == len(plans) == n_plans
    assert all(row["ok"] and list(row["us"]) == [1, 9] for row in found)
    assert found[0]["apart"] == 0 < max(row["apart"] for row in found), "others add in another order"


@pytest.mark.parametrize(
    ("width", "tried"),
    [
        (64, [(16, 3, 2), (16, 4, 2)]),
        (512, [(32, 2, 2), (16, 3, 2), (16, 4, 2), (32, 2, 1), (32, 2, 4)]),
    ],
)
def test_attention_plans(width, tried):
    case = Case("small", 4, 2, width, 0, 100, 128)
    base = splitk_sdpa.Plan(64, 32, 2, warps=8, stages=2, wgmma=True)
    if width == 64:
        base = replace(splitk_sdpa.plan(4, 2, 64, 9), keys=16, splits=2)
    plans = list(attention_plans(base))
    found, _ = timed(splitk_sdpa, plans, attention_calls(case, ROWS, DEVICE))
    assert [(plan.keys, plan.stages, plan.splits) for plan in plans] == tried
    assert [plan.wgmma for plan in plans] == [width == 512 and plan.keys == 32 for plan in plans]
    assert all(row["ok"] for row in found) and found[0]["apart"] == 0


@dataclass(frozen=True)
class Named:
    """A plan that is nothing but its name."""

    name: str


def test_a_plan_that_is_wrong_or_does_not_fit():
    def call(i):
        name = fragment_linear.plan().name
        if name == "too large":
            raise OutOfResources(300_000, 232_448, "shared memory")
        return torch.ones(2, 3, 4) * {"wrong": 1.1, "no number": float("nan")}.get(name, 1)

    names = ("right", "wrong", "no number", "too large")
    found, shown = timed(fragment_linear, [*map(Named, names)], {1: (call, 1), 2: (lambda i: torch.ones(2, 2), 1)})
    assert [(row["ok"], row["us"][1]) for row in found] == [(True, 8.0), (False, 8.0), (False, 8.0), (True, None)]
    assert shown.count("WRONG") == 2 and "does not fit" in shown
    with pytest.raises(ValueError, match="the plan that others are held against does not fit"):
        timed(fragment_linear, [Named("too large"), Named("right")], {1: (call, 1)})
