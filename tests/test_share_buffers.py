"""Equal names become one storage, conflicts are errors, and the plan says who reads and who writes what."""

import copy

import pytest
import torch
from ir import ROWS, Function, Positive, apply, check, export, program_of, randn
from torch import nn

from eyas.passes.pipeline import PassError, run_pipeline
from eyas.passes.printer import print_program
from eyas.passes.program import Program
from eyas.passes.share_buffers import ShareBuffers, plan_lines

POSITIVE = Positive()
X, POSITIONS = randn(ROWS, 4), torch.arange(ROWS)


def write(module, x, positions):
    module.cache.index_copy_(0, positions, x)
    return module.cache.sum(0) * module.scale


def read(module, x, positions):
    return module.cache[positions] + x


def cache(**tensors):
    return {"cache": torch.zeros(24, 4), "scale": torch.full((1,), 2.0), **tensors}


def two_methods(first=write, second=read, tensors=None, others=None):
    """``first`` and ``second`` as methods ``prefill`` and ``verify`` of two modules, each with tensors of its own."""
    tensors = cache() if tensors is None else tensors
    others = copy.deepcopy(tensors) if others is None else others
    programs = program_of(first, X, POSITIONS, **tensors), program_of(second, X, POSITIONS, **others)
    return Program({"prefill": programs[0].methods["forward"], "verify": programs[1].methods["forward"]})


def plan_of(one, program):
    assert apply(one, program).rewrites > 0
    return program.sharing


@POSITIVE
def equal_names_become_one_tensor(one):
    program = two_methods()
    prefill, verify = (ep.state_dict for ep in program.methods.values())
    assert prefill["cache"] is not verify["cache"]
    plan = plan_of(one, program)
    assert prefill["cache"] is verify["cache"] and prefill["scale"] is verify["scale"]
    assert plan["cache"].readers == ("prefill", "verify") and plan["cache"].writers == ("prefill",)
    assert plan["cache"].mutable and plan["cache"].nbytes == 24 * 4 * 4
    assert plan["scale"].readers == ("prefill",) and not plan["scale"].mutable
    check(
        program,
        """
        CHECK-LABEL: method prefill
        CHECK-LABEL: method verify
        CHECK-LABEL: buffers
        CHECK-NEXT: cache: f32[24,4] read by prefill, verify; written by prefill
        CHECK-NEXT: scale: f32[1] read by prefill{{$}}
        """,
    )


@POSITIVE
def what_one_method_writes_the_other_reads(one):
    program = two_methods()
    plan_of(one, program)
    program.methods["prefill"].module()(X, POSITIONS)
    assert torch.equal(program.methods["verify"].module()(torch.zeros(2, 4), POSITIONS[1:3]), X[1:3])


@POSITIVE
def equal_caches_of_other_names_stay_apart(one):
    """Filling the target's cache leaves the draft's alone, however alike they are."""

    def draft(module, x, positions):
        module.cache_.index_copy_(0, positions, x)
        return module.cache_.sum(0)

    program = two_methods(write, draft, cache(), {"cache_": torch.zeros(24, 4)})
    plan = plan_of(one, program)
    assert plan["cache"].writers == ("prefill",) and plan["cache_"].writers == ("verify",)
    program.methods["prefill"].module()(X, POSITIONS)
    assert program.methods["prefill"].state_dict["cache"].any()
    assert not program.methods["verify"].state_dict["cache_"].any()


def through_views(module, x, positions):
    module.cache[2:][1:4].view(3, 2, 2).transpose(0, 1).add_(1)
    return x


def through_a_piece(module, x, positions):
    module.cache.chunk(2, dim=1)[1].index_copy_(0, positions, x[:, :2])
    return x


def through_an_index(module, x, positions):
    module.cache[positions] = x
    return x


def into_an_out_argument(module, x, positions):
    return torch.mul(module.scale, x[:1, :1].expand(24, 4), out=module.cache)


def in_a_list(module, x, positions):
    torch._foreach_mul_([module.scale[:1], module.cache], 2.0)
    return x


def one_step_on(module, x, positions):
    module.cache += 1
    return x


WRITES = [through_views, through_a_piece, through_an_index, into_an_out_argument, in_a_list, one_step_on]


@pytest.mark.parametrize("function", WRITES, ids=lambda function: function.__name__)
@pytest.mark.parametrize("functional", [False, True], ids=["in place", "functional"])
def test_every_way_of_writing_is_seen(function, functional):
    """In the graph as it is traced, and in the graph without writes in place, where the signature names them."""
    program = program_of(function, X, POSITIONS, **cache())
    ep = program.methods["forward"]
    program = Program({"forward": ep.run_decompositions({}) if functional else ep})
    plan = plan_of(ShareBuffers(), program)
    assert plan["cache"].mutable
    assert plan["scale"].mutable == (function is in_a_list)


@pytest.mark.parametrize("function", [read, lambda m, x, p: m.cache.clone().add_(1), lambda m, x, p: m.cache + m.scale])
def test_reading_is_no_writing(function):
    plan = plan_of(ShareBuffers(), program_of(function, X, POSITIONS, **cache()))
    assert plan["cache"].readers == ("forward",) and plan["cache"].writers == ()


class Stepper(nn.Module):
    """A counter that must go on, and a cache that is in no state dict."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.tensor([7]))
        self.register_buffer("cache", torch.zeros(24, 4), persistent=False)

    def forward(self, x, positions):
        self.cache[1:].index_copy_(0, positions, x)
        self.steps.add_(1)
        return self.cache.sum(0) + self.steps


@POSITIVE
def counters_and_caches_in_no_state_dict(one):
    module = Stepper()
    peek = Function(lambda m, x, positions: x + m.inner.cache[positions] + m.inner.steps, inner=module)
    step = Function(lambda m, x, positions: m.inner(x, positions), inner=module)
    program = Program({"step": export(step, X, POSITIONS), "peek": export(peek, X, POSITIONS)})
    plan = plan_of(one, program)
    assert [b.name for b in plan.values() if b.writers == ("step",) and b.readers == ("step", "peek")] == [
        "inner.cache", "inner.steps",
    ]  # fmt: skip
    step, peek = (program.methods[name].module() for name in ("step", "peek"))
    for count in (8, 9):
        step(X, POSITIONS)
        assert torch.equal(peek(torch.zeros(1, 4), POSITIONS[1:2]), X[:1] + count)


@POSITIVE
def initial_values_may_be_no_numbers(one):
    """A cache that starts as NaN or infinity equals its copy."""
    program = two_methods(tensors=cache(cache=torch.full((24, 4), float("nan")), scale=torch.tensor([-torch.inf])))
    plan_of(one, program)
    prefill, verify = (ep.state_dict for ep in program.methods.values())
    assert prefill["cache"] is verify["cache"] and prefill["cache"].isnan().all()


@POSITIVE
def tensors_that_the_tracer_names(one):
    """Both methods' code makes a tensor, and the tracer gives both the same name."""

    def half(module, x, positions):
        return x * torch.tensor(0.5)

    def twice(module, x, positions):
        return x * torch.tensor(2.0)

    program = two_methods(half, twice, {}, {})
    assert sorted(plan_of(one, program)) == ["prefill.lifted_tensor_0", "verify.lifted_tensor_0"]
    assert torch.equal(program.methods["prefill"].module()(X, POSITIONS), X * 0.5)
    assert torch.equal(program.methods["verify"].module()(X, POSITIONS), X * 2)


def one_cache_under_two_names(one, module):
    """The tracer settles on one of the names, in every method the same."""

    def fill(module, x, positions):
        module.a.k.index_copy_(0, positions, x)
        return x

    def peek(module, x, positions):
        return module.b.k[positions] + module.a.k[positions]

    modules = [Function(function, a=module["a"], b=module["b"]) for function in (fill, peek)]
    program = Program({name: export(m, X, POSITIONS) for name, m in zip(("fill", "peek"), modules)})
    (used,) = (b for b in plan_of(one, program).values() if b.mutable)
    assert used.writers == ("fill",) and used.readers == ("fill", "peek")
    program.methods["fill"].module()(X, POSITIONS)
    assert torch.equal(program.methods["peek"].module()(X, POSITIONS), 2 * X)


def holder(tensor):
    module = nn.Module()
    module.register_buffer("k", tensor)
    return module


@POSITIVE
def a_module_that_two_modules_hold(one):
    layers = nn.ModuleDict({"a": holder(torch.zeros(24, 4))})
    layers["b"] = layers["a"]
    one_cache_under_two_names(one, layers)


@POSITIVE
def a_tensor_that_two_modules_hold(one):
    k = torch.zeros(24, 4)
    one_cache_under_two_names(one, nn.ModuleDict({"a": holder(k), "b": holder(k)}))


@pytest.mark.parametrize("case", POSITIVE, ids=lambda case: case.__name__)
def test_fires(case):
    case(ShareBuffers())


CONFLICTS = {
    "shape": (cache(cache=torch.zeros(25, 4)), r"buffer 'cache' is \[24, 4\] torch.float32 in method 'prefill' and "
              r"\[25, 4\] torch.float32 in method 'verify'"),
    "dtype": (cache(cache=torch.zeros(24, 4, dtype=torch.float64)), r"float32 in method 'prefill' and \[24, 4\] "
              r"torch.float64 in method 'verify'"),
    "initial value": (cache(cache=torch.eye(24)[:, :4].contiguous()), r"buffer 'cache' starts with other values in "
                      r"method 'prefill' than in method 'verify'"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFLICTS)
def test_conflicts_name_both_methods(name):
    others, message = CONFLICTS[name]
    program = two_methods(others=others)
    with pytest.raises(PassError, match=message):
        run_pipeline(program, [ShareBuffers()])


@pytest.mark.parametrize(
    "view", [lambda t: t[3:9], lambda t: t.view(4, 24), lambda t: t.flatten()[95:]],
    ids=["rows", "reshaped", "last element"],
)  # fmt: skip
def test_two_names_for_memory_that_is_written_are_refused(view):
    """Each name would get a storage of its own, and what is written by one name would not be seen by the other."""

    def mix(module, x, positions):
        module.a.index_copy_(0, positions, x)
        return module.b.sum()

    a = torch.zeros(24, 4)
    program = program_of(mix, X, POSITIONS, a=a, b=view(a))
    with pytest.raises(PassError, match=r"buffers '[ab]' and '[ab]' share memory, and method 'forward' writes it"):
        run_pipeline(program, [ShareBuffers()])


def test_two_names_for_memory_that_is_only_read_are_fine():
    a = torch.zeros(24, 4)
    program = program_of(lambda m, x, p: m.a.sum() + m.b.sum(), X, POSITIONS, a=a, b=a[3:9])
    assert set(plan_of(ShareBuffers(), program)) == {"a", "b"}


def test_parts_of_one_allocation_may_be_written():
    def mix(module, x, positions):
        module.k.index_copy_(0, positions, x)
        module.v.index_copy_(0, positions, x)
        return module.k.sum() + module.v.sum()

    both = torch.zeros(2, 24, 4)
    plan = plan_of(ShareBuffers(), program_of(mix, X, POSITIONS, k=both[0], v=both[1]))
    assert plan["k"].mutable and plan["v"].mutable


def test_one_tensor_everywhere_still_gets_a_plan():
    """Methods traced from one module share their tensors already; the plan is what is new."""
    tensors = cache()
    program = two_methods(tensors=tensors, others=tensors)
    assert apply(ShareBuffers(), program).rewrites == 2


def test_a_program_without_constants_stays_as_it_is():
    program = program_of(lambda module, x, positions: x + 1, X, POSITIONS)
    before = print_program(program)
    (record,) = run_pipeline(program, [ShareBuffers()])
    assert record.rewrites == 0 and program.sharing == {} and print_program(program).startswith(before)


def test_the_plan_in_words():
    program = two_methods()
    run_pipeline(program, [ShareBuffers()])
    assert plan_lines(program.sharing) == [
        "cache: [24, 4] float32, read by prefill, verify; written by prefill",
        "1 constants (0.0 MB), 0 of them read by several methods and stored once",
    ]
