"""tools/opt.py in process: the program alone on stdout, wrong names answered with the right ones, whole files."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from ir import ROWS, Function, check, export, randn
from test_numerics import Plant

from eyas.lowering.lower import Request, trace_target
from eyas.lowering.pipelines import pipeline_for
from eyas.passes import registry
from eyas.passes.pipeline import run_pipeline
from eyas.passes.printer import print_program
from eyas.passes.program import Program
from eyas.passes.registry import PASSES, parse_pipeline
from eyas.tools.opt import main, save

TARGET = ["tiny_gemma3:target_verify", "--max-seq-len", "64", "--max-prefill", "8"]
PIPELINE = "remove_noop,split_copy_to_slice,midm_sdpa{max_m=16},dead_code,masked_sdpa,share_buffers"


def layer(module, x, pos):
    low, high = x.chunk(2, dim=-1)
    q = torch.cat([high, low], dim=-1).float() * 0.5
    module.k.index_copy_(2, pos, q)
    module.v.index_copy_(2, pos, x)
    mask = pos[:, None] >= torch.arange(24)
    return F.scaled_dot_product_attention(q, module.k, module.v, mask, scale=0.5)


def make():
    caches = {name: torch.zeros(1, 2, 24, 16) for name in ("k", "v")}
    return export(Function(layer, **caches), randn(1, 2, ROWS, 16), torch.arange(ROWS))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("opt") / "layer.pt2"
    torch.export.save(make(), path)
    return path


@pytest.fixture
def opt(capsys, saved):
    """``opt(*arguments)`` over the saved layer: exit code, stdout and stderr."""

    def run(*arguments, source=None):
        code = main([str(saved) if source is None else str(source), *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def expected(path: Path, passes: str = "") -> str:
    program = Program({path.stem: torch.export.load(path)})
    run_pipeline(program, parse_pipeline(passes))
    return print_program(program)


# What goes where


def test_without_passes_the_program_is_printed(opt, saved):
    code, out, err = opt()
    assert code == 0 and out == expected(saved) and "method layer where s0 in [1, 16]" in out
    assert re.fullmatch(r"program [0-9a-f]{16} after the passes\n", err)


def test_the_text_is_that_of_the_pipeline(opt, saved):
    code, out, err = opt("-p", PIPELINE)
    assert code == 0 and out == expected(saved, PIPELINE) and out != expected(saved)
    lines = [line for line in err.splitlines() if " rewrites, " in line]
    assert [line.split(":")[0] for line in lines] == list(map(str, parse_pipeline(PIPELINE)))
    assert all(
        re.fullmatch(r".*: \d+ rewrites, \d+ -> \d+ nodes, \d+\.\d\d s, checks \d+\.\d\d s", line) for line in lines
    )


def test_a_method_of_a_target_goes_through_the_passes_as_in_a_pipeline(capsys):
    """The text of the tool is that of ``trace_target`` and ``run_pipeline``; stdout holds nothing else."""
    passes = "remove_noop,midm_sdpa{must_fire=true},dead_code"
    assert main([*TARGET, "-p", passes]) == 0
    captured = capsys.readouterr()
    request = Request(target="tiny_gemma3", out=Path(), max_seq_len=64, max_prefill=8)
    program = trace_target(request, ("target_verify",), Quiet())
    run_pipeline(program, parse_pipeline(passes))
    assert captured.out == print_program(program)
    assert "trace target_verify" in captured.err and "trace prefill" not in captured.err


def test_all_methods_of_a_target(capsys):
    assert main(["tiny_gemma3", *TARGET[1:], "-p", "midm_sdpa,share_buffers"]) == 0
    check(
        capsys.readouterr().out,
        r"""
        CHECK: {{^}}method prefill where s0 in [1, 8]
        CHECK: eyas.sdpa_midm.default
        CHECK: {{^}}method target_verify where s0 in [1, 8]
        CHECK: eyas.sdpa_midm.default
        CHECK: {{^}}method draft_decode where s0 in [1, 8]
        CHECK: {{^}}buffers
        """,
    )


def test_a_target_for_cuda_in_the_text_of_its_pipeline(capsys, tmp_path):
    """Traced in bfloat16; and another process can read the file that holds operators of Triton kernels."""
    method = [*TARGET, "--device", "cuda"]
    passes = ",".join(str(one) for one in pipeline_for("cuda", None) if one.name != "outline_blocks")
    assert main([*method, "-p", passes]) == 0
    text = capsys.readouterr().out
    check(
        text,
        r"""
        CHECK: {{^}}method target_verify where s0 in [1, 8]
        CHECK: bf16[1,s0,48] = eyas.fragment_int8_embedding.default
        CHECK: bf16[s0,128] = eyas.fragment_int8_linear.default
        CHECK: {{^}}buffers
        """,
    )
    assert main([*method, "-p", passes, "-o", str(tmp_path / "target_verify.pt2")]) == 0
    command = [sys.executable, "-m", "eyas.tools.opt", str(tmp_path / "target_verify.pt2"), "-p", "share_buffers"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == text


class Quiet:
    """A progress that says nothing."""

    def stage(self, name):
        import contextlib

        return contextlib.nullcontext()

    def note(self, text):
        pass


def test_as_a_process_stdout_is_the_program_alone(saved):
    """Through a pipe, with all that libraries say at import."""
    done = subprocess.run(
        [sys.executable, "-m", "eyas.tools.opt", str(saved), "-p", "dead_code"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected(saved, "dead_code")


# Wrong arguments: exit code 2, nothing on stdout, one line that says what would be right


WRONG = {
    "unknown pass": (
        ["-p", "midm_spda"],
        r"error: unknown pass 'midm_spda'; did you mean: midm_sdpa.*\? all of them: dead_code, ",
    ),
    "unknown option": (
        ["-p", "midm_sdpa{max_k=3}"],
        r"error: pass 'midm_sdpa' has no option 'max_k=3'; allowed: must_fire \(bool\), max_m \(int\)",
    ),
    "wrong value": (
        ["-p", "midm_sdpa{max_m=99}"], r"error: option 'max_m' of pass 'midm_sdpa' is 99; allowed: 1 to 16",
    ),
    "unknown pass to explain": (["--explain", "midm"], r"error: unknown pass 'midm'; did you mean: midm_sdpa"),
    "a pass to print that does not run": (
        ["-p", "dead_code", "--print-after", "midm_sdpa"],
        r"error: pass 'midm_sdpa' is to be printed but does not run; these do: dead_code",
    ),
    "an unknown pass to print": (["--print-before", "midm"], r"error: unknown pass 'midm'; did you mean"),
    "a folder that is not there": (
        ["-o", "nowhere/x.pt2"], r"error: -o takes a .pt2 file in a folder that exists, got nowhere/x.pt2",
    ),
    "another kind of file": (["-o", "x.txt"], r"error: -o takes a .pt2 file in a folder that exists, got x.txt"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_option_is_answered_with_the_right_ones(name, opt):
    arguments, message = WRONG[name]
    code, out, err = opt(*arguments)
    assert code == 2 and out == "" and re.match(message, err) and err.count("\n") == 1, err


SOURCES = {
    "unknown target": ("tiny_gema3:target_verify", r"unknown target 'tiny_gema3'.*tiny_gemma3"),
    "unknown method": ("tiny_gemma3:target_verfy", r"unknown method 'target_verfy'.*target_verify"),
    "no such file": ("nowhere.pt2", r"nowhere.pt2 does not exist; give a .pt2 file that torch.export.save wrote"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_wrong_source_is_answered_with_the_right_ones(name, opt):
    source, message = SOURCES[name]
    code, out, err = opt(source=source)
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 2 and out == "" and re.search(message, line), err


def test_a_source_is_needed(capsys):
    assert main([]) == 2
    assert "give a .pt2 file, TARGET or TARGET:METHOD; for example" in capsys.readouterr().err


@pytest.mark.parametrize("part", [0, 100, 0.5, 0.99])
def test_a_truncated_file_is_refused(part, opt, saved, tmp_path):
    data = saved.read_bytes()
    damaged = tmp_path / "damaged.pt2"
    damaged.write_bytes(data[: part if isinstance(part, int) else int(len(data) * part)])
    code, out, err = opt(source=damaged)
    assert code == 2 and out == "" and err.startswith(f"error: {damaged} "), err
    assert "is no .pt2 file, or a truncated one" in err or "cannot be loaded as an exported program" in err


@pytest.mark.parametrize("kind", ["text", "other archive", "damaged inside"])
def test_a_file_of_another_kind_is_refused(kind, opt, saved, tmp_path):
    import zipfile

    path = tmp_path / "other.pt2"
    if kind == "text":
        path.write_text("no archive at all\n" * 100)
    elif kind == "other archive":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("notes.txt", "nothing of ours")
    else:
        data = bytearray(saved.read_bytes())
        at = data.index(b'"graph_module"') if b'"graph_module"' in data else len(data) // 3
        data[at : at + 400] = b"\0" * 400
        path.write_bytes(bytes(data))
    code, out, err = opt(source=path)
    assert code == 2 and out == "" and err.startswith(f"error: {path} "), err


def test_a_pass_that_cannot_run_there_says_what_would(opt):
    code, out, err = opt("-p", "masked_sdpa,midm_sdpa")
    assert code == 1 and out == "" and err.splitlines()[-1].startswith("error: pass midm_sdpa (number 2, after masked_")
    assert err.rstrip().endswith("an order that works: midm_sdpa,masked_sdpa")


def test_a_pass_that_must_fire(opt):
    code, _, err = opt("-p", "midm_sdpa{must_fire=true,max_m=8}")
    assert code == 1 and "must fire and did not: a call has up to 16 rows; max_m is 8" in err


# Files


def test_a_written_file_holds_the_program(opt, saved, tmp_path):
    out_file = tmp_path / "layer.pt2"
    code, out, err = opt("-p", PIPELINE, "-o", out_file)
    assert code == 0 and out == "" and "after the passes" in err
    assert [path.name for path in tmp_path.iterdir()] == ["layer.pt2"]
    assert all(name.startswith("archive/") for name in zipfile.ZipFile(out_file).namelist()), "what Netron looks for"
    code, out, _ = opt(source=out_file)
    without_plan = expected(saved, PIPELINE.removesuffix(",share_buffers"))
    assert code == 0 and out == without_plan, (
        "a plan of shared buffers belongs to a program, not to a file of one method"
    )


def test_the_written_program_computes_the_same(opt, saved, tmp_path):
    out_file = tmp_path / "out.pt2"
    assert opt("-p", "split_copy_to_slice,midm_sdpa,dead_code", "-o", out_file)[0] == 0
    inputs = randn(1, 2, 7, 16), torch.arange(7)
    a, b = (torch.export.load(path).module()(*inputs) for path in (saved, out_file))
    torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_a_failed_write_leaves_the_old_file(opt, tmp_path, monkeypatch):
    out_file = tmp_path / "out.pt2"
    out_file.write_bytes(b"the old one")

    def fail(ep, file):
        file.write(b"half")
        raise RuntimeError("the disk is full")

    monkeypatch.setattr(torch.export, "save", fail)
    code, out, err = opt("-o", out_file)
    assert code == 1 and out == "" and "error: the disk is full" in err
    assert out_file.read_bytes() == b"the old one" and [p.name for p in tmp_path.iterdir()] == ["out.pt2"]


def test_several_methods_do_not_fit_one_file(saved, tmp_path):
    ep = torch.export.load(saved)
    with pytest.raises(ValueError, match=r"-o takes one method, the program has one, two; name one: TARGET:METHOD"):
        save(Program({"one": ep, "two": ep}), tmp_path / "all.pt2")
    assert not list(tmp_path.iterdir())


# What can be seen


def test_before_and_after_a_pass(opt, saved):
    passes = "split_copy_to_slice,dead_code"
    _, out, err = opt("-p", passes, "--print-before", "dead_code", "--print-after", "split_copy_to_slice")
    after_split = expected(saved, "split_copy_to_slice")
    assert out == expected(saved, passes)
    assert err.count("// ") == 2
    assert f"// after split_copy_to_slice\n{after_split}" in err and f"// before dead_code\n{after_split}" in err


def test_after_every_pass(opt):
    _, _, err = opt("-p", "split_copy_to_slice,dead_code", "--print-after-all")
    assert re.findall(r"^// (.*)$", err, re.M) == ["after split_copy_to_slice", "after dead_code"]


def test_what_changed(opt):
    """A diff of each pass that changed something, and none of the others."""
    _, _, err = opt("-p", "split_copy_to_slice,panel_linear,midm_sdpa", "--print-changed")
    assert re.findall(r"^--- (.*)$", err, re.M) == ["before split_copy_to_slice", "before midm_sdpa"]
    check(
        err,
        r"""
        CHECK: split_copy_to_slice: 1 rewrites
        CHECK: {{^}}-{{.*}}aten.chunk.default(
        CHECK: {{^}}+{{.*}}aten.slice.Tensor(
        CHECK: panel_linear: 0 rewrites
        CHECK: midm_sdpa: 1 rewrites
        CHECK: {{^}}-{{.*}}aten.scaled_dot_product_attention.default(
        CHECK: {{^}}+{{.*}}eyas.sdpa_midm.default(
        """,
    )


def test_a_table_of_times(opt, saved):
    _, out, err = opt("-p", "split_copy_to_slice,dead_code", "--time-passes")
    assert out == expected(saved, "split_copy_to_slice,dead_code")
    rows = [line for line in err.splitlines() if re.match(r"│ (split_copy|dead_code|all)", line)]
    assert len(rows) == 3 and re.search(r"│ +\d+\.\d{3} +│ +\d+\.\d{3} +│$", rows[2])


def test_reasons_of_a_pass(opt, saved):
    """What it would do, and why not the rest; nothing is done."""
    code, out, err = opt("--explain", "midm_sdpa")
    assert (code, out) == (0, "midm_sdpa: would make 1 rewrites\n") and "after the passes" in err
    code, out, _ = opt("--explain", "midm_sdpa{max_m=8}")
    first, second = out.splitlines()
    assert first == "midm_sdpa{max_m=8}: would make 0 rewrites"
    assert re.fullmatch(r"layer: .*:\d+: a call has up to 16 rows; max_m is 8", second)
    _, out, _ = opt("-p", "midm_sdpa", "--explain", "midm_sdpa")
    assert out.splitlines() == [
        "midm_sdpa: would make 0 rewrites", "there is no candidate: no node of the kind that it rewrites",
    ]  # fmt: skip


def test_the_passes_there_are(capsys):
    assert main(["--list-passes"]) == 0
    out = capsys.readouterr().out
    assert [re.match(r"\w+", line)[0] for line in out.splitlines()] == registry.pass_names()
    check(out, "CHECK: {{^}}dead_code {{.*}} exact\nCHECK: {{^}}midm_sdpa{max_m=16} {{.*}} changes bits")


# Numbers


@pytest.fixture
def planted(monkeypatch):
    monkeypatch.setitem(PASSES, "plant", f"{Plant.__module__}:Plant")


def test_numbers_are_compared_after_each_pass(opt, saved):
    passes = "split_copy_to_slice,midm_sdpa,dead_code"
    code, out, err = opt("-p", passes, "--verify-numerics", "--seed", 3)
    assert code == 0 and out == expected(saved, passes)
    lines = [line for line in err.splitlines() if line.startswith("numerics: ")]
    assert lines[0] == "numerics: split_copy_to_slice: equal bits" and lines[2] == "numerics: dead_code: equal bits"
    assert re.fullmatch(r"numerics: midm_sdpa: off by [\d.]+e-0[78] in result 0 of layer|.*: equal bits", lines[1])


def test_a_pass_that_changes_the_numbers_stops_the_run(opt, planted):
    code, out, err = opt("-p", "split_copy_to_slice,plant,dead_code", "--verify-numerics")
    assert code == 1 and out == "" and "error: pass plant (number 2) changes what method 'layer' computes" in err


def test_the_faulty_pass_is_found(opt, planted):
    code, out, err = opt("-p", "remove_noop,split_copy_to_slice,plant,midm_sdpa,dead_code", "--bisect")
    assert code == 1 and "bisect" in err
    assert re.fullmatch(
        r"pass plant \(number 3\) is the first after which outputs differ: method layer with \d+ rows, .*, by .* of "
        r"the largest value \(allowed: 0.0001\)\n",
        out,
    )


def test_good_passes_are_found_good(opt, planted):
    code, out, _ = opt("-p", PIPELINE, "--bisect")
    assert (code, out) == (0, "no pass changes the outputs by more than 0.0001 of the largest value\n")
    code, out, _ = opt("-p", "plant", "--bisect", "--tolerance", "1e9")
    assert (code, out) == (0, "no pass changes the outputs by more than 1e+09 of the largest value\n")


def test_without_checks_a_broken_graph_is_printed(opt, monkeypatch):
    """For looking at what a pass under work leaves behind."""
    monkeypatch.setitem(PASSES, "drops", "test_opt:Forgets")
    code, _, err = opt("-p", "drops")
    assert code == 1 and "failed: VerifyError: the ranges of method 'layer'" in err
    assert opt("-p", "drops", "--no-verify")[0] == 0


class Forgets(Plant):
    """Forgets the range of rows."""

    name = "forgets"

    def run_method(self, method, ep):
        ep.range_constraints.clear()
        return super().run_method(method, ep)
