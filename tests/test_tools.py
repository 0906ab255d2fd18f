"""The command-line tools: text on stdout, everything else on stderr, and one clear line for what a user got wrong."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from eyas.lowering import lower as lowering
from eyas.lowering.pipelines import FINISH, OPTIMISE
from eyas.passes.registry import PASSES
from eyas.runtime.artifact import Artifact
from eyas.runtime.decoding import GreedyDecoder, SpeculativeDecoder
from eyas.runtime.session import open_tokenizer
from eyas.runtime.statistics import TAU
from eyas.tools import bench, console, inspect, lower, run

TOOLS = {"lower": lower, "run": run, "inspect": inspect, "bench": bench}
LIKE_TINY = ("--target", "tiny_gemma3", "--max-seq-len", "64", "--max-prefill", "8", "--extra-method", "target_logits")
TEMPLATE = "{% for message in messages %}t9 {{ message['content'] }} {% endfor %}t10"


@pytest.fixture
def tool(capsys):
    """Runs a tool in this process: (exit code, stdout, stderr)."""

    def call(module, *arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = module.main([str(argument) for argument in arguments])
        except SystemExit as stop:  # argparse's own
            code = stop.code
        return code, *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def greedy(tiny):
    """Greedy text of a prompt, as ids and as the tool should show it."""
    program, tokenizer = tiny.load(), open_tokenizer(Artifact.open(tiny.path))

    def text(prompt: str | list[int], new: int, stop=()) -> tuple[list[int], str]:
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        new_ids = [t for block in GreedyDecoder(program).generate(ids, new, stop) for t in block]
        return new_ids, tokenizer.decode(new_ids) + "\n"

    return text


def words(count: int) -> str:
    return " ".join(f"t{4 + i % 100}" for i in range(count))


def one_line(err: str) -> str:
    """The error, which is all that was said."""
    assert err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n"), err
    return err.removeprefix("error: ").rstrip()


# run


def test_the_text_is_all_of_stdout_and_the_figures_are_on_stderr(tiny, tool, greedy):
    code, out, err = tool(run, tiny.path, "--prompt", "t5 t6", "--max-new-tokens", 12, "--stop-ids", "")
    assert (code, out) == (0, greedy("t5 t6", 12)[1])
    assert "speculative: 12 new tokens after a prompt of 3; ended by budget\n" in err
    assert f"  tau 1.000 ({TAU})\n" in err
    assert "chain 4: 11 rounds, accepted {0: 11}, by position [0.00, 0.00, 0.00, 0.00]; verify " in err
    assert "the draft head of this artifact is untrained" in err and "greedy:" not in err


@pytest.mark.parametrize("chain", [None, 1, 7])
def test_any_chain_gives_the_same_text(chain, tiny, tool, greedy):
    options = [] if chain is None else ["--chain", chain]
    code, out, err = tool(run, tiny.path, "--prompt", words(9), "--max-new-tokens", 20, "--stop-ids", "", *options)
    assert (code, out) == (0, greedy(words(9), 20)[1])
    assert f"chain {chain or 4}:" in err


def test_greedy_decoding_has_no_rounds_to_report(tiny, tool, greedy):
    code, out, err = tool(run, tiny.path, "--prompt", "t5", "--greedy", "--max-new-tokens", 6, "--stop-ids", "")
    assert (code, out) == (0, greedy("t5", 6)[1])
    assert "greedy: 6 new tokens after a prompt of 2" in err and "tau" not in err and "speculative" not in err
    code, out, err = tool(run, tiny.path, "--prompt", "t5", "--greedy", "--chain", 2)
    assert (code, out) == (2, "") and "--greedy has no proposals; --compare-greedy runs both" in one_line(err)


def test_accepted_proposals_are_counted(tiny, tool, greedy, monkeypatch, tmp_path):
    """Every second round proposes what is to come, the others nothing right: accept lengths 3 and 0, by turns."""
    ids, text = greedy("t5 t6", 21)
    known, rounds = [2, 5, 6, *ids], []

    def propose(self, position, chain):
        rounds.append(position)
        return [t if len(rounds) % 2 else (t + 1) % 128 for t in known[position + 1 : position + 1 + chain]]

    monkeypatch.setattr(SpeculativeDecoder, "_propose", propose)
    stats = tmp_path / "stats.json"
    code, out, err = tool(
        run, tiny.path, "--prompt", "t5 t6", "--max-new-tokens", 21, "--stop-ids", "", "--chain", 3,
        "--stats-json", stats,
    )  # fmt: skip
    assert (code, out) == (0, text)
    assert "chain 3: 8 rounds, accepted {0: 4, 3: 4}, by position [0.57, 0.57, 0.57]" in err
    assert f"tau 2.500 ({TAU})" in err
    figures = json.loads(stats.read_text())
    assert (figures["tau"], figures["accept_histogram"], figures["chain"]) == (2.5, {"0": 4, "3": 4}, 3)
    assert figures["acceptance_by_position"] == [4 / 7] * 3  # the last token is a plain step


def test_both_decoders_are_compared(tiny, tool, greedy, tmp_path):
    stats = tmp_path / "stats.json"
    code, out, err = tool(
        run, tiny.path, "--prompt", "t5", "--compare-greedy", "--max-new-tokens", 9, "--stop-ids", "",
        "--stats-json", stats,
    )  # fmt: skip
    assert (code, out) == (0, greedy("t5", 9)[1])
    assert err.endswith("identical: 9 tokens, speculative and greedy\n")
    assert "greedy: 9 new" in err and "speculative: 9 new" in err
    figures = json.loads(stats.read_text())
    assert figures["identical_to_greedy"] is True and figures["rounds"] == 8 and figures["chain"] == 4


@pytest.mark.parametrize(("wrong", "shown"), [(7, "[7] '"), (1, "[1] '")])
def test_the_first_difference_is_shown(wrong, shown, tiny, tool, greedy, monkeypatch, tmp_path):
    ids, _ = greedy("t5", 9)
    calls, stats = [], tmp_path / "stats.json"

    def broken(self, anchor, position, chain, alike):
        self._proposed = chain
        calls.append(position)
        return [wrong if len(calls) == 3 else ids[len(calls)]]

    monkeypatch.setattr(SpeculativeDecoder, "_round", broken)
    code, out, err = tool(
        run, tiny.path, "--prompt", "t5", "--compare-greedy", "--max-new-tokens", 9, "--stats-json", stats
    )
    assert code == 1 and out.startswith(" ".join(f"t{i}" for i in ids[:3]))
    last = err.splitlines()[-1]
    assert last.startswith(f"different at new token 3: greedy [{ids[3]}] 't{ids[0]} ") and shown in last
    assert "speculative" in last and "What is guaranteed" in last
    assert json.loads(stats.read_text())["identical_to_greedy"] is False


def test_a_text_that_ends_early_differs_too(tiny, capsys):
    tokenizer = open_tokenizer(Artifact.open(tiny.path))
    assert run.compare({"greedy": ([5, 6, 7], None), "speculative": ([5, 6], None)}, tokenizer) is False
    assert "different at new token 2: greedy [7] 't5 t6 t7', speculative [] 't5 t6';" in capsys.readouterr().err


def test_figures_as_json(tiny, tool, tmp_path):
    stats = tmp_path / "stats.json"
    code, out, _ = tool(run, tiny.path, "--prompt", "t5 t6", "--max-new-tokens", 12, "--stats-json", stats)
    figures = json.loads(stats.read_text())
    assert code == 0 and len(out.split()) == figures["new_tokens"] == 12
    assert figures["prompt_tokens"] == 3 and figures["emitted"] == 11 == sum(figures["accept_histogram"].values())
    assert figures["tau_definition"] == TAU and figures["finished"] == "budget" and figures["chain"] == 4
    assert figures["decode_tokens_per_second"] > 0 and figures["prompt_tokens_per_second"] > 0
    assert set(figures["seconds"]) == {"prefill", "decode", "verify", "draft", "host"}
    assert figures["seconds"]["decode"] >= figures["seconds"]["verify"] + figures["seconds"]["draft"] > 0
    assert figures["load_seconds"] > 0 and figures["peak_rss_bytes"] > 1e7
    assert figures["artifact_bytes"] == sum(f.stat().st_size for f in tiny.path.iterdir() if "manifest" not in f.name)
    assert figures["draft"]["format"] == "untrained" and "identical_to_greedy" not in figures
    assert list(tmp_path.iterdir()) == [stats]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "stats.json"
    console.write_json(file, {"a": 1})
    with pytest.raises(TypeError):
        console.write_json(file, {"a": 2, "b": object()})
    assert json.loads(file.read_text()) == {"a": 1} and list(tmp_path.iterdir()) == [file]
    console.write_json(file, {"é": 2})
    assert json.loads(file.read_text()) == {"é": 2}

    def interrupted(source, target):
        assert json.loads(source.read_text()) == {"a": 3}
        raise KeyboardInterrupt

    monkeypatch.setattr(console.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        console.write_json(file, {"a": 3})
    assert json.loads(file.read_text()) == {"é": 2} and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("module", [run, lower])
def test_figures_that_cannot_be_written_are_refused_before_the_work(module, tiny, tool, tmp_path, monkeypatch):
    arguments = {run: (tiny.path, "--prompt", "t5"), lower: (*LIKE_TINY, "-o", tmp_path / "new")}[module]
    code, out, err = tool(module, *arguments, "--stats-json", tmp_path / "no" / "stats.json")
    assert (code, out) == (2, "") and one_line(err).startswith(f"no folder {tmp_path / 'no'} for stats.json")
    code, out, err = tool(module, *arguments, "--stats-json", tmp_path)
    assert (code, out) == (2, "") and one_line(err).startswith(f"{tmp_path} is a folder")
    monkeypatch.setattr(console.os, "access", lambda *_: False)
    code, out, err = tool(module, *arguments, "--stats-json", tmp_path / "stats.json")
    assert (code, out) == (2, "") and "may not be written to" in one_line(err)
    assert not list(tmp_path.iterdir())


def test_a_prompt_from_a_file(tiny, tool, greedy, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("t5\nt6 é\n", encoding="utf-8")
    arguments = tiny.path, "--prompt-file", file, "--max-new-tokens", 5, "--stop-ids", ""
    code, out, err = tool(run, *arguments)
    assert (code, out) == (0, greedy("t5\nt6 é\n", 5)[1]) and "after a prompt of 4" in err
    file.write_text("")
    code, out, err = tool(run, *arguments)
    assert (code, out) == (0, greedy([2], 5)[1]) and "after a prompt of 1" in err
    code, _, err = tool(run, *arguments, "--raw-prompt")
    assert code == 2 and "the prompt is empty and this tokenizer adds no start token" in one_line(err)
    file.write_bytes("t5 é".encode("latin-1"))
    code, out, err = tool(run, *arguments)
    assert (code, out) == (2, "") and re.search(r"prompt.txt is not UTF-8 text \(.* at byte 3\)", one_line(err))


@pytest.mark.parametrize("name", ["absent.txt", "."])
def test_a_prompt_file_that_is_not_there(name, tiny, tool, tmp_path):
    code, out, err = tool(run, tiny.path, "--prompt-file", tmp_path / name)
    assert (code, out) == (2, "") and one_line(err) == f"no prompt file at {tmp_path / name}"


def test_an_empty_prompt_is_the_start_token(tiny, tool, greedy):
    code, out, err = tool(run, tiny.path, "--prompt", "", "--max-new-tokens", 5, "--stop-ids", "")
    assert (code, out) == (0, greedy([2], 5)[1]) and "after a prompt of 1" in err


def test_raw_prompts_are_taken_as_written(tiny, tool, greedy):
    options = "--max-new-tokens", 5, "--stop-ids", ""
    code, out, err = tool(run, tiny.path, "--raw-prompt", "--prompt", "t5", *options)
    ids = open_tokenizer(Artifact.open(tiny.path)).encode_raw("t5")
    assert len(ids) == 1 and (code, out) == (0, greedy(ids, 5)[1]) and "after a prompt of 1" in err
    code, out, err = tool(run, tiny.path, "--raw-prompt", "--chat", "t5", *options)
    assert (code, out) == (2, "") and "--raw-prompt goes with --prompt or --prompt-file" in one_line(err)


def test_a_chat_goes_through_the_artifacts_template(tiny, tool, greedy, tmp_path):
    code, out, err = tool(run, tiny.path, "--chat", "t5")
    assert (code, out) == (2, "") and "there is no chat template" in one_line(err)
    folder = tiny.copy(tmp_path / "chat")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["tokenizer"]["chat_template"] = TEMPLATE
    (folder / "manifest.json").write_text(json.dumps(manifest))
    code, out, err = tool(run, folder, "--chat", "t5", "--max-new-tokens", 5, "--stop-ids", "")
    ids = open_tokenizer(Artifact.open(tiny.path)).encode_raw("t9 t5 t10")
    assert (code, out) == (0, greedy(ids, 5)[1]) and "after a prompt of 3" in err


def test_prompts_up_to_the_last_position(tiny, tool, greedy):
    code, out, err = tool(run, tiny.path, "--prompt", words(62), "--stop-ids", "")  # with the start token, 63
    assert (code, out) == (0, greedy(words(62), 1)[1])
    assert "1 new tokens after a prompt of 63; ended by length" in err
    code, out, err = tool(run, tiny.path, "--prompt", words(63))
    assert (code, out) == (2, "") and "the prompt has 64 tokens; the program holds 64" in one_line(err)
    assert "may have 63" in err and "--max-seq-len" in err


def test_a_budget_beyond_the_caches_ends_with_them(tiny, tool, greedy):
    code, out, err = tool(run, tiny.path, "--prompt", "t5", "--max-new-tokens", 10**6, "--stop-ids", "")
    assert (code, out) == (0, greedy("t5", 62)[1]) and "62 new tokens" in err and "ended by length" in err


def test_stop_ids_replace_the_artifacts(tiny, tool, greedy):
    ids, _ = greedy("t5", 20)
    at = next(i for i, t in enumerate(ids) if i > 2 and t not in ids[:i])
    code, out, err = tool(run, tiny.path, "--prompt", "t5", "--stop-ids", f"0, {ids[at]}", "--max-new-tokens", 20)
    tokenizer = open_tokenizer(Artifact.open(tiny.path))
    assert (code, out) == (0, tokenizer.decode(ids[: at + 1]) + "\n")
    assert f"{at + 1} new tokens" in err and "ended by stop" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--stop-ids", "5,x"), "--stop-ids takes comma-separated ids from 0 to 127, got 'x'"),
        (("--stop-ids", "128"), "--stop-ids takes comma-separated ids from 0 to 127, got '128'"),
        (("--stop-ids=-1",), "--stop-ids takes comma-separated ids from 0 to 127, got '-1'"),
        (("--stop-ids", "²"), "--stop-ids takes comma-separated ids from 0 to 127, got '²'"),
        (("--chain", "0"), "chain must lie in 1..7 for this artifact, got 0"),
        (("--chain", "8"), "chain must lie in 1..7 for this artifact, got 8"),
        (("--max-new-tokens", "0"), "max_new_tokens must be at least 1, got 0"),
        (("--max-new-tokens", "-3"), "max_new_tokens must be at least 1, got -3"),
        (("--threads", "0"), "--threads must be at least 1, got 0"),
    ],
)
def test_wrong_options_are_answered_in_one_line(options, message, tiny, tool):
    code, out, err = tool(run, tiny.path, "--prompt", "t5", *options)
    assert (code, out, one_line(err)) == (2, "", message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "one of the arguments --prompt --prompt-file --chat is required"),
        (("--prompt", "a", "--chat", "b"), "argument --chat: not allowed with argument --prompt"),
        (("--prompt", "a", "--chain", "x"), "argument --chain: invalid int value: 'x'"),
    ],
)
def test_command_lines_that_make_no_sense(arguments, message, tiny, tool):
    code, out, err = tool(run, tiny.path, *arguments)
    assert (code, out) == (2, "") and err.splitlines()[-1] == f"run.py: error: {message}"


@pytest.mark.parametrize("module", [run, inspect])
def test_a_path_without_an_artifact(module, tool, tmp_path):
    arguments = ("--prompt", "t5") if module is run else ()
    for path, message in ((tmp_path / "no", "no artifact at"), (tmp_path, "has no manifest.json")):
        code, out, err = tool(module, path, *arguments)
        assert (code, out) == (2, "") and str(path) in one_line(err) and message in err
        assert "expected the folder that lowering wrote" in err


def test_threads_are_set_before_the_program_is_loaded(tiny, tool, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    seen, load = [], Artifact.load

    def spy(self):
        seen.append(run.os.environ["OMP_NUM_THREADS"])
        return load(self)

    monkeypatch.setattr(Artifact, "load", spy)
    assert tool(run, tiny.path, "--prompt", "t5", "--threads", 2, "--max-new-tokens", 2)[0] == 0
    assert seen == ["2"]


def test_the_hash_of_the_weights_is_checked_unless_told_not_to(tiny, tool, tmp_path):
    folder = tiny.copy(tmp_path / "damaged")
    data = bytearray((folder / "model.ptd").read_bytes())
    data[-1] ^= 1
    (folder / "model.ptd").write_bytes(data)
    code, _, err = tool(run, folder, "--prompt", "t5")
    assert code == 2 and "model.ptd does not match the manifest" in one_line(err)
    assert tool(run, folder, "--prompt", "t5", "--no-verify-data", "--max-new-tokens", 1)[0] == 0


def raising(error: BaseException):
    def generate(self, *arguments, **options):
        yield [5]
        raise error

    return generate


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted; nothing half-written was left\n"),
        (RuntimeError("the method failed"), 1, "error: the method failed\n"),
        (OSError(28, "No space left on device"), 2, "error: [Errno 28] No space left on device\n"),
        (KeyError("no such thing"), 2, "error: no such thing\n"),
    ],
)
def test_what_ends_a_run_early_is_one_line(error, code, said, tiny, tool, monkeypatch, tmp_path):
    stats = tmp_path / "stats.json"
    monkeypatch.setattr(SpeculativeDecoder, "generate", raising(error))
    got, out, err = tool(run, tiny.path, "--prompt", "t5", "--stats-json", stats)
    assert (got, err) == (code, said) and out == "t5" and not stats.exists()


def test_a_bug_of_ours_is_not_hidden(tiny, tool, monkeypatch):
    monkeypatch.setattr(SpeculativeDecoder, "generate", raising(AssertionError("a bug")))
    with pytest.raises(AssertionError, match="a bug"):
        tool(run, tiny.path, "--prompt", "t5")


def test_a_reader_that_goes_away_is_no_error(tiny):
    """In a process of its own: the pipe is closed before the first word."""
    command = [sys.executable, "-m", "eyas.tools.run", str(tiny.path), "--prompt", "t5", "--max-new-tokens", "40"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait() == 0
    assert err == ""


# lower


def test_lowering_says_what_it_does_on_stderr(tiny, tool, tmp_path):
    stats, out = tmp_path / "lower.json", tmp_path / "out"
    code, printed, err = tool(lower, *LIKE_TINY, "-o", out, "--stats-json", stats)
    assert (code, printed) == (0, "") and (out / "model.pte").read_bytes() == (tiny.path / "model.pte").read_bytes()
    assert re.search(r"^\[ +[\d.]+ s\] weights \.\.\.\n\[ +[\d.]+ s\] weights: [\d.]+ s$", err, re.MULTILINE)
    for found in (
        "draft: taps: after layers 0, 1, 3",
        f"pipeline: {OPTIMISE['cpu']},{FINISH['cpu']}",
        "weights: int8:",
        "check: target_verify:",
        "peak memory",
    ):
        assert f"s]   {found}" in err
    assert re.search(rf"^{out}: [\d.]+ MB in [\d.]+ s$", err.splitlines()[-1])
    figures = json.loads(stats.read_text())
    assert figures["path"] == "out" and figures["cached"] == {"program": True}
    assert {"read checkpoints", "weights", "write data", "tokenizer", "manifest", "check"} <= set(figures["seconds"])
    assert figures["total_seconds"] >= sum(figures["seconds"].values()) - 0.01
    assert figures["bytes"] == {
        name: (out / name).stat().st_size for name in ("model.pte", "model.ptd", "tokenizer.json")
    }
    assert figures["pipeline"] == tiny.report.pipeline
    assert figures["peak_bytes"] > 0 and figures["peak_child_bytes"] > 0 and figures["source_bytes"] > 0


@pytest.fixture
def planned(monkeypatch):
    """Lowering ends once it has planned; the requests that it got."""
    requests = []

    def plan(self):
        requests.append(self.request)
        self.progress.note("a finding")
        return replace(self.report, source_bytes=1)

    monkeypatch.setattr(lowering.Lowering, "run", plan)
    return requests


def test_quiet_lowering_names_stages_only(tool, planned, tmp_path):
    arguments = "--target", "tiny_gemma3", "-o", tmp_path / "out"
    assert "]   a finding\n" in tool(lower, *arguments)[2]
    code, out, err = tool(lower, *arguments, "--quiet")
    assert (code, out) == (0, "") and "a finding" not in err and "pipeline" not in err and "load the compiler:" in err


@pytest.mark.parametrize(
    ("passes", "pipeline"),
    [
        ("", "masked_sdpa,panel_linear,share_buffers,outline_blocks{overhead=320}"),
        (
            "materialize_tables",
            "materialize_tables,masked_sdpa,panel_linear,share_buffers,outline_blocks{overhead=320}",
        ),
        (
            " materialize_tables{} , split_copy_to_slice",
            "materialize_tables,split_copy_to_slice,masked_sdpa,panel_linear,share_buffers,outline_blocks{overhead=320}",
        ),
    ],
)
def test_passes_replace_the_optimisations(passes, pipeline, tool, planned, tmp_path):
    code, _, err = tool(lower, "--target", "tiny_gemma3", "-o", tmp_path / "out", "--passes", passes)
    assert code == 0 and f"  pipeline: {pipeline}\n" in err


def test_every_option_reaches_the_request(tool, planned, tmp_path):
    folder = tmp_path / "checkpoint"
    code, _, _ = tool(
        lower, "--target", "tiny_gemma4", "-o", tmp_path / "out", "--checkpoint", folder, "--draft", "head", "--quant",
        "int4", "--max-seq-len", 96, "--max-prefill", 5, "--chain", 2, "--max-chain", 3, "--extra-method",
        "target_logits", "--cache", tmp_path / "cache", "--passes", "materialize_tables",
    )  # fmt: skip
    assert code == 0
    assert planned == [
        lowering.Request(
            "tiny_gemma4", tmp_path / "out", draft="head", checkpoint=folder, quant="int4", max_seq_len=96,
            max_prefill=5, chain=2, max_chain=3, methods=("target_logits",), cache=tmp_path / "cache",
            passes="materialize_tables",
        )
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--target", "tiny_gemma"), r"unknown target 'tiny_gemma'; allowed: .*tiny_gemma3, tiny_gemma4"),
        (("--passes", "panel_liner"), r"unknown pass 'panel_liner'; did you mean: panel_linear"),
        (("--passes", "materialize_tables{x=1}"), r"materialize_tables.*'?x'?"),
        (("--quant", "int5"), r"unknown recipe 'int5'; allowed: none, int8, int4, or the path of a recipe file"),
        (("--device", "cuda"), r"no CUDA device was found; a program is compiled and checked on the card"),
        (("--device", "tpu"), r"unknown device 'tpu'; allowed: cpu, cuda"),
        (("--extra-method", "decode"), r"unknown extra method 'decode'; allowed: target_logits"),
        (("--checkpoint", "no/such"), r"tiny targets are random and take no checkpoint, got no/such"),
        (("--target", "gemma3_270m", "--checkpoint", "no/such"), r"no/such"),
        (("--draft", "no/such"), r"no folder no/such; expected one with config.json and model.safetensors"),
        (("--max-chain", "0"), r"max-chain.*got 0"),
        (("--chain", "9"), r"--chain must lie in 1..7, got 9"),
        (("--max-prefill", "100"), r"max-prefill.*100"),
    ],
)
def test_lowering_refuses_in_one_line(options, message, tool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = tool(lower, "--target", "tiny_gemma3", "-o", "out", *options)
    *progress, last = err.splitlines()
    assert (code, out) == (2, "") and re.search(f"^error: .*{message}", last), last
    assert all(line.startswith("[") for line in progress) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [(), ("--target", "tiny_gemma3"), ("-o", "out")])
def test_lowering_needs_a_target_and_a_place(arguments, tool):
    code, out, err = tool(lower, *arguments)
    assert (code, out) == (2, "") and one_line(err).startswith("--target and -o are needed; for example:")


@pytest.mark.parametrize("place", ["file", "file/out", "full"])
def test_places_that_cannot_be_written(place, tool, tmp_path):
    (tmp_path / "file").write_text("kept")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("kept")
    code, out, err = tool(lower, *LIKE_TINY, "-o", tmp_path / place)
    *progress, last = err.splitlines()
    assert (code, out) == (2, "") and last.startswith(f"error: {tmp_path / place}") and "choose another" in last
    assert len(progress) <= 2  # before any work
    assert (tmp_path / "file").read_text() == (tmp_path / "full" / "notes.txt").read_text() == "kept"
    assert len(list(tmp_path.rglob("*"))) == 3


@pytest.mark.parametrize("by", ["Ctrl-C", "SIGTERM"])
def test_an_interrupted_lowering_leaves_nothing(by, tool, tmp_path, monkeypatch):
    def interrupt(*_):
        assert list(tmp_path.iterdir()), "it had begun"
        os.kill(os.getpid(), {"Ctrl-C": signal.SIGINT, "SIGTERM": signal.SIGTERM}[by])
        time.sleep(5)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(lowering.Lowering, "write_program", interrupt)
    code, out, err = tool(lower, *LIKE_TINY, "-o", tmp_path / "out")
    want, word = {"Ctrl-C": (130, "interrupted"), "SIGTERM": (143, "terminated")}[by]
    assert (code, out) == (want, "") and err.splitlines()[-1] == f"{word}; nothing half-written was left"
    assert not list(tmp_path.iterdir()) and signal.getsignal(signal.SIGTERM) is before


def test_lists(tool):
    code, out, err = tool(lower, "--list-targets")
    assert (code, err) == (0, "") and {"gemma3_270m", "tiny_gemma4"} <= {line.split()[0] for line in out.splitlines()}
    code, out, err = tool(lower, "--list-passes")
    assert (code, err) == (0, "") and [line.split()[0] for line in out.splitlines()] == sorted(PASSES)
    assert all(len(line.split()) > 4 for line in out.splitlines())


# inspect


def test_an_artifact_in_words(tiny, tool):
    code, out, err = tool(inspect, tiny.path)
    assert (code, err) == (0, "")
    for line in (
        "target      tiny_gemma3 (random)",
        "draft       taps: after layers 0, 1, 3 (boundaries 1, 2, 4 of 0 to 4; evenly spread)",
        "method      target_verify(int64[1,M], int64[M]) -> int64[1,M], float32[1,M,48]; 1 to 8 rows",
        "constant    get_max_chain_len = 7",
        "stop id     1 '<eos>'",
        f"pipeline    {tiny.report.pipeline}",
    ):
        assert line in out.splitlines(), line
    assert out.count("\nbuffer ") == 10 and out.count("; written by ") == 10  # keys and values of 4 layers and the head
    assert re.search(r"^buffer +target\..*: read by prefill, .*; written by prefill, target_verify", out, re.MULTILINE)
    assert re.search(r"^buffer +draft\..*: read by draft_decode; written by draft_decode$", out, re.MULTILINE)
    longer = tool(inspect, tiny.path, "--buffers", "--matrices")[1]
    assert longer.count("\nmatrix ") == 38 and longer.count("\nbuffer ") > 10


def test_the_doctor_reports_versions_compiler_and_devices(tool):
    code, out, _ = tool(inspect, "--doctor")
    assert code == 0 and {"torch", "executorch", "machine", "c++", "cpu", "cuda"} <= {
        line.split()[0] for line in out.splitlines()
    }


def test_the_doctor_misses_the_compiler(tool, monkeypatch):
    def none():
        raise RuntimeError("no compiler")

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", none)
    code, out, _ = tool(inspect, "--doctor")
    assert code == 0 and "no compiler was found; install g++ (or clang++) or set CXX\n" in out


# bench


def test_identity_of_a_tiny_artifact(tiny, tool, tmp_path):
    stats = tmp_path / "identity.json"
    code, out, _ = tool(
        bench, "--stats-json", stats, "identity", tiny.path, "--prompts", 2, "--new-tokens", 8,
    )  # fmt: skip
    assert code == 0 and out.count("100%") == 7 and "2 prompts x 8 new tokens" in out
    assert "rows bit-equal in calls of 1 to 8 rows (target_verify, target_logits): True" in " ".join(out.split())
    assert "16 of 16 tokens equal" in out
    figures = json.loads(stats.read_text())
    assert figures["ok"] is True and figures["rows_bit_equal"] is True and figures["eager_others"] == 0
    assert figures["equal"] == {str(chain): 4 for chain in range(1, 8)}
    assert figures["tau"]["4"] == 1 and 1 < figures["oracle_tau"]["4"] <= 5


def test_acceptance_by_kind(tiny, tool, tmp_path):
    held_out, stats = tmp_path / "held_out.json", tmp_path / "stats.json"
    prompts = [{"kind": kind, "ids": [2, i, 7]} for i, kind in enumerate(("prose", "prose", "code", "prose"), 3)]
    held_out.write_text(json.dumps({"prompts": prompts}))
    options = "--prompts", held_out, "--per-kind", 2, "--new-tokens", 12, "--max-repeated", 1
    code, out, _ = tool(bench, "--stats-json", stats, "acceptance", tiny.path, *options)
    figures = json.loads(stats.read_text())["kinds"]
    assert code == 0 and {kind: f["prompts"] for kind, f in figures.items()} == {"prose": 2, "code": 1}
    for found in figures.values():
        assert found["same"] and all(1 <= tau <= 1 + int(chain) for chain, tau in found["tau"].items())
        assert 0 <= found["repeated"] <= 1 and all(0 <= share <= 1 for share in found["by_position"])
        assert found["repeated_of_all"] >= found["repeated"] and found["tokens"] <= 12 * found["prompts"]
    assert "accepted by position " in out and "yes" in out and "speed-up" in out
    held_out.write_text('{"prompts": [1]}')
    code, _, err = tool(bench, "acceptance", tiny.path, *options)
    assert code == 2 and "holds no prompts; expected held_out.json of a trained head" in one_line(err)


def test_bench_texts_of_two_heads_of_one_target(chain, tool, tmp_path):
    """Their target's methods have one code and one result; what the heads propose changes no text."""
    stats, heads = tmp_path / "stats.json", (chain("accept").path, chain("reject").path)
    code, out, _ = tool(bench, "--stats-json", stats, "texts", *heads, "--prompts", 2, "--new-tokens", 8)
    figures = json.loads(stats.read_text())
    outputs = figures["outputs"]
    assert code == 1 and not figures["ok"] and (figures["identical"], figures["texts"]) == (4, 4)
    assert {name: different > 0 for name, (_, different) in outputs.items()} == {
        "prefill": False, "target_verify": False, "draft_decode": True,
    }  # fmt: skip
    assert outputs["target_verify"][0] == 2 * (64 // 8 + 8 + 7), "ids and features, by calls of 8 rows, and of 1 to 8"
    assert f"draft_decode: {outputs['draft_decode'][1]} of {outputs['draft_decode'][0]} outputs differ\n" in out
    code, _, _ = tool(bench, "texts", heads[0], heads[0], "--prompts", 1, "--new-tokens", 4)
    assert code == 0


def test_bench_texts_of_two_models(gemma4, tiny, chain, tool):
    code, out, _ = tool(bench, "texts", tiny.path, chain("accept").path, "--prompts", 2, "--new-tokens", 8)
    assert code == 1 and "0 of 4 texts identical" in out, "they take the same calls"
    assert "target_logits: one of them alone has it" in out
    code, _, err = tool(bench, "texts", tiny.path, gemma4.path)
    assert code == 2 and re.search(
        r"different calls: .*'rows of target_verify': 8.* and .*'rows of target_verify': 4", err
    )


def test_identity_fails_where_a_token_differs(tiny, tool, monkeypatch):
    monkeypatch.setattr(SpeculativeDecoder, "_round", lambda self, *_: [5])
    code, out, _ = tool(bench, "identity", tiny.path, "--prompts", 1, "--new-tokens", 4, "--no-eager")
    assert code == 1 and "100%" not in out and "eager module" not in out


def test_lengths_around_windows_and_chunks(tiny, tool, monkeypatch, tmp_path):
    stats, options = tmp_path / "stats.json", ("--prompts", 1, "--new-tokens", 4, "--no-eager", "--lengths")
    code, out, _ = tool(bench, "--stats-json", stats, "identity", tiny.path, *options)
    found = json.loads(stats.read_text())["lengths"]
    assert code == 0 and "greedy text, and that of K=1; K=4; K=7; oracle, K=4" in out
    assert [(row["length"], row["new_tokens"]) for row in found] == [
        (length, 64 - length) for length in (1, 2, 7, 8, 9, 15, 16, 17, 55, 63)
    ]  # fmt: skip
    assert all(row["identical"] and not row["different"] for row in found)
    assert all(2 < row["tau"] < 5 for row in found[:-2]), "a window that rejected drafts have wrapped"

    speculate = SpeculativeDecoder._round

    def wrong(self, anchor, position, chain, *rest):
        block = speculate(self, anchor, position, chain, *rest)
        return [block[0] ^ 1, *block[1:]] if (position, chain) == (16, 7) else block

    monkeypatch.setattr(SpeculativeDecoder, "_round", wrong)
    code, out, _ = tool(bench, "--stats-json", stats, "identity", tiny.path, *options)
    figures = json.loads(stats.read_text())
    different = {row["length"]: row["different"] for row in figures["lengths"] if not row["identical"]}
    assert code == 1 and figures["ok"] is False and "NO: K=7" in out
    assert different and all(names == ["K=7"] for names in different.values())


def test_lengths_that_fit():
    from eyas.tools.bench_identity import lengths_of

    facts = {"get_sliding_window": 0, "get_max_prefill_chunk": 20, "get_max_seq_len": 100}
    assert lengths_of(facts) == [1, 2, 9, 36, 41, 91, 99]
    facts |= {"get_sliding_window": 50, "get_max_seq_len": 52}
    assert lengths_of(facts) == [1, 2, 9, 41, 43, 49, 50, 51]
    assert lengths_of(facts | {"get_max_seq_len": 2}) == [1]


def test_an_oracle_with_the_rounds_of_a_card():
    """On the host: it accepts what the other oracle accepts, and what it is not told is the head's own."""
    from test_cuda_decoding import LENGTH, MOST, Toy, prompt, text

    from eyas.tools.oracle import CudaOracleDecoder, OracleDecoder, is_told

    program, accepted = Toy("always"), set()
    decoder, plain = CudaOracleDecoder(program, False, "cpu"), OracleDecoder(program)
    for length in (1, 5, 20):
        ids = prompt(length)
        want = text(GreedyDecoder(program), ids)
        decoder.text = plain.text = [*ids, *want]
        for chain in (1, 4, MOST):
            assert text(decoder, ids, chain=chain) == text(plain, ids, chain=chain) == want
            assert decoder.statistics.accepted == plain.statistics.accepted
            accepted |= set(decoder.statistics.accepted)
    assert accepted == set(range(MOST + 1))
    decoder.text = []
    assert text(decoder, ids, chain=MOST) == want and set(decoder.statistics.accepted) == {0}
    assert 0.7 < sum(map(is_told, range(LENGTH))) / LENGTH < 0.9


def test_prompts_are_many_and_different():
    from eyas.tools.prompts import PROMPTS, TEXT, text_ids

    assert len(set(PROMPTS)) == len(PROMPTS) >= 50 and all(PROMPTS)

    class Letters:
        def encode(self, text):
            return [ord(c) for c in text]

    assert text_ids(Letters(), len(TEXT) + 2) == [*map(ord, TEXT + TEXT[:2])] and text_ids(Letters(), 1) == [ord("A")]


def test_bfloat16_sets_the_bound_for_a_program_of_a_card(tiny):
    """The module in float32 and in bfloat16, on the host, beside the texts and logits of a program."""
    import torch
    from rich.console import Console

    from eyas.tools import bench_identity as identity

    artifact, program = Artifact.open(tiny.path), tiny.load()
    ids = [2, 5, 6]
    text = [t for block in GreedyDecoder(program).generate(ids, 20, ()) for t in block]
    console = Console(record=True, width=200)
    found = identity.eager_on_card(artifact, program, [ids], [text], console)
    assert (found["eager_tokens"], found["eager_equal"], found["eager_within_bound"]) == (20, 20, True)
    assert 0 < found["eager_bfloat16_difference"] < 1 and found["eager_largest_gap"] == 0
    apart = found["logits_apart"]
    assert list(apart) == ["eager, bfloat16", "artifact, calls of 1", "artifact, calls of 8"]
    assert max(apart["artifact, calls of 1"], apart["artifact, calls of 8"]) < 1e-4 < apart["eager, bfloat16"]
    assert "20 of 20 tokens equal" in console.export_text()

    exact = identity.eager_module(artifact)
    rounded = identity.in_bfloat16(exact, "tiny_gemma3")
    assert {b.dtype for name, b in rounded.named_buffers() if name.endswith(("weight", "cache.k"))} == {torch.bfloat16}
    assert rounded.norm.weight.dtype == torch.float32 and torch.equal(rounded.norm.weight, exact.norm.weight)
    least = identity.logits_of(exact, [*ids, *text[:-1]])[len(ids) - 1 + 7].argmin()
    wrong = identity.compare_rounded(exact, rounded, [ids], [[*text[:7], int(least), *text[8:]]])
    assert wrong["eager_within_bound"] is False and wrong["eager_largest_gap"] > 2 * wrong["eager_bfloat16_difference"]


def test_decoding_is_taken_apart(tiny, tool, tmp_path):
    stats = tmp_path / "e2e.json"
    options = "--context", 30, "--new-tokens", 8, "--repeats", 2, "--no-transformers"
    code, out, err = tool(bench, "--stats-json", stats, "e2e", tiny.path, *options, "--chains", "4,2")
    figures = json.loads(stats.read_text())
    assert code == 0 and "30 tokens of context, 8 new ones, medians of 2" in out and "transformers" not in out
    assert re.search(r"target_verify of 5 rows takes [\d.]+ times as long as one row; a draft step takes", out)
    assert figures["ok"] and list(figures["decoding"]) == ["0", "2", "4"] and "decoding: " in err
    for chain, row in figures["decoding"].items():
        assert row["same"] and row["tokens_per_second"] > 0 and row["round_us"] > row["host_us"] > 0
        assert row["tau"] == 1 and row["eta"] == pytest.approx(row["speed_up"]) and (chain != "0" or row["eta"] == 1)
    for times in figures["phases"].values():
        assert list(times) == [str(rows) for rows in range(1, 9)] and min(times.values()) > 0
    assert "rounds" not in figures and "kernels" not in figures, "of a card alone"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--context", "60", "--new-tokens", "5"), "--context 60 and --new-tokens 5 do not fit: the program holds 64"),
        (
            ("--context", "0"),
            "--context and --repeats must be at least 1 and --new-tokens at least 2, got 0, 3 and 256",
        ),
        (
            ("--context", "8", "--new-tokens", "8", "--chains", "8"),
            "--chains must lie in 1..7 for this artifact, got 8",
        ),
        (("--chains", "1,x"), "--chains takes comma-separated numbers of at least 1, got 'x'"),
    ],
)
def test_decoding_that_cannot_be_measured(options, message, tiny, tool):
    code, out, err = tool(bench, "e2e", tiny.path, *options)
    assert (code, out) == (2, "") and one_line(err).startswith(message)


def test_decoding_fails_where_a_text_differs(tiny, tool, monkeypatch):
    monkeypatch.setattr(SpeculativeDecoder, "_round", lambda self, *_: [5])
    options = "--context", 8, "--new-tokens", 6, "--repeats", 1, "--chains", 3
    code, out, _ = tool(bench, "e2e", tiny.path, *options)
    assert code == 1 and re.search(r"K=3 .* NO ", out)
    assert "transformers is compared for gemma3_270m alone; the target of this artifact is tiny_gemma3" in out


def test_a_peer_that_fails_is_a_line(monkeypatch, capsys):
    from types import SimpleNamespace

    from rich.console import Console

    from eyas.tools import bench_e2e

    def peer_rate(model, ids, new_tokens, repeats, static):
        if static:
            raise RuntimeError("\n  no such kernel\n  and more")
        return 100.0

    def load_peer(dtype, device):
        if device == "cpu":
            raise FileNotFoundError("no checkpoint")
        return "a model"

    monkeypatch.setattr(bench_e2e, "load_peer", load_peer)
    monkeypatch.setattr(bench_e2e, "peer_rate", peer_rate)
    artifact = SimpleNamespace(manifest={"target": {"name": "gemma3_270m"}})
    rest = [1], 8, 3, {0: 200.0, 4: 300.0}, bench_e2e.ConsoleProgress(), Console(width=120)
    assert bench_e2e.bench_peers(artifact, "cuda", *rest) == {
        "eager, bfloat16": 100.0, "static cache, compiled, bfloat16": "RuntimeError: no such kernel",
    }  # fmt: skip
    out = capsys.readouterr().out
    assert "2.00x" in out and "3.00x" in out and "eyas, K=4" in out and "RuntimeError: no such kernel" in out
    assert bench_e2e.bench_peers(artifact, "cpu", *rest) == {
        f"eager, {kind}": "FileNotFoundError: no checkpoint" for kind in ("float32", "bfloat16")
    }


def test_kernels_of_a_trace():
    """Overlapping ones count once as time in which any runs; what is not the card's is left out."""
    from eyas.tools.bench_e2e import kernel_figures, spans_of

    events = [
        {"ph": "X", "cat": "kernel", "name": "b", "ts": 10, "dur": 4},
        {"ph": "X", "cat": "kernel", "name": "a", "ts": 0, "dur": 6},
        {"ph": "X", "cat": "gpu_memcpy", "name": "copy", "ts": 12, "dur": 4},
        {"ph": "X", "cat": "kernel", "name": "a", "ts": 20, "dur": 2},
        {"ph": "X", "cat": "kernel", "name": "c", "ts": 20, "dur": 1},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 0, "dur": 9},
        {"ph": "f", "cat": "ac2g", "name": "ac2g", "ts": 0},
    ]
    found = kernel_figures(spans_of({"traceEvents": events}), 2, 20.0)
    assert (found["busy_us"], found["share"], found["calls"]) == (7.0, 0.35, 2.5)
    assert found["kernels"][0] == {"name": "a", "us": 4.0, "calls": 1.0}
    assert [kernel["name"] for kernel in found["kernels"]] == ["a", "b", "copy", "c"]
    assert kernel_figures([], 2, 20.0)["kernels"] == []


def test_kernels_are_timed(tool, monkeypatch):
    from eyas.tools import bench_kernels

    monkeypatch.setattr(bench_kernels, "SECONDS", 0.0)
    monkeypatch.setattr(bench_kernels, "ROTATED_BYTES", 1 << 16)
    monkeypatch.setattr(bench_kernels, "SHAPES", ((64, 64),))
    code, out, _ = tool(bench, "kernels", "--rows", "1,3")
    rows = [line.split("│")[1:3] for line in out.splitlines() if "│" in line]
    found = [tuple(cell.strip() for cell in row) for row in rows]
    assert code == 0 and {("64 x 64", "1"), ("64 x 64", "3"), ("512", "1"), ("512", "3")} <= set(found)
    for wrong in ("x", "0", "1,,2"):
        code, out, err = tool(bench, "kernels", "--rows", wrong)
        assert (code, out) == (2, "") and "--rows takes comma-separated numbers of at least 1" in one_line(err)


def test_cuda_kernels_need_a_card_and_known_kinds(tool, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, out, err = tool(bench, "kernels", "--device", "cuda")
    assert (code, out) == (1, "") and "no CUDA device was found; --device cpu times the cpu kernels" in one_line(err)
    code, out, err = tool(bench, "kernels", "--device", "cuda", "--kinds", "int4,fp8")
    assert (code, out) == (2, "") and "unknown kind 'fp8' of cuda kernels; allowed: int4, int8, att" in one_line(err)


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ((), 1, "no CUDA device was found; plans are for the card that they are tried on"),
        (("--kinds", "int8"), 2, "kind 'int8' has no plans to try; allowed: int4, attention"),
        (("--rows", "1,17"), 2, "--rows must lie in 1..16 for these kernels, got 17"),
        (("--shape", "64"), 2, "--shape takes two numbers, outputs and inputs, got '64'"),
        (("--shape", "64,x"), 2, "--shape takes comma-separated numbers of at least 1, got 'x'"),
    ],
)
def test_plans_that_cannot_be_tried(options, code, said, tool, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found, out, err = tool(bench, "plans", *options)
    assert (found, out) == (code, "") and said in one_line(err)


def test_perplexity_of_recipes(tool, tmp_path):
    stats = tmp_path / "quant.json"
    code, out, _ = tool(bench, "--stats-json", stats, "quant", "--target", "tiny_gemma3", "--recipes", "int8,none")
    figures = json.loads(stats.read_text())
    assert code == 0 and list(figures) == ["int8", "none"] and "as int8" in " ".join(out.split())
    assert 0 < figures["int8"]["bytes"] < figures["none"]["bytes"] / 3 and figures["int8"]["agreement"] == 1
    assert figures["none"]["perplexity"] == pytest.approx(figures["int8"]["perplexity"], rel=0.05)
    assert tool(bench, "quant", "--target", "nope")[2].startswith("error: unknown target 'nope'")


def test_lowering_and_loading_are_measured(tiny, tool, monkeypatch):
    from eyas.tools import bench_lowering

    def lower_once(target, quant, out, environment):
        if not out.exists():
            tiny.copy(out)
        return {**tiny.report.to_json(), "wall_seconds": 3.0}

    monkeypatch.setattr(bench_lowering, "lower_once", lower_once)
    code, out, _ = tool(bench, "lowering", "--target", "tiny_gemma3")
    assert code == 0 and "tiny_gemma3, int8" in out
    cells = {row[1].strip(): row[2].strip() for line in out.splitlines() if len(row := line.split("│")) > 2}
    assert cells["cold lowering, s"] == "3.0" and float(cells["loading, s (median of 5)"]) > 0


# all of them


def options(parser: argparse.ArgumentParser):
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from options(child)
        else:
            yield parser, action


@pytest.mark.parametrize("name", TOOLS)
def test_help_tells_of_every_option(name):
    command = [sys.executable, "-m", f"eyas.tools.{name}", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == "" and done.stdout.startswith(f"usage: {name}.py")
    for parser, action in options(TOOLS[name].parser()):
        assert action.help and action.help != argparse.SUPPRESS, action
        for option in action.option_strings:
            assert option in parser.format_help()


@pytest.mark.parametrize("arguments", [(), ("--help",), ("fly",)])
def test_bench_without_a_command(arguments, tool):
    code, out, err = tool(bench, *arguments)
    assert (code, "identity" in out + err) == (0 if arguments == ("--help",) else 2, True)
