"""Trains an EAGLE-3 draft head for a target, on texts that the target writes itself, and writes it as a folder.

python -m eyas.tools.train_draft --target gemma3_270m --device cuda --intermediate 1536 -o heads/gemma3_270m

What was written and trained so far is kept in the work folder: the same command goes on from there.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from eyas.tools.console import ConsoleProgress, run_tool, write_json

CHAINS = range(1, 8)
MAX_FILE_BYTES = 15_000_000  # of the head's weights: what repositories take
MIN_NEW = 8  # tokens of a text that is of use


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="train_draft.py", description=__doc__.splitlines()[0])
    p.add_argument("--target", required=True, help="name of the target (see --help of lower.py)")
    p.add_argument("--checkpoint", type=Path, help="a .gguf file or a Hugging Face folder; default: the target's own")
    p.add_argument("-o", "--output", type=Path, required=True, help="folder to write the head to")
    p.add_argument("--work", type=Path, help="folder for texts and checkpoints (default: OUTPUT.work)")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default cpu")
    p.add_argument("--seed", type=int, default=0, help="of prompts, texts and training (default 0)")
    data = p.add_argument_group("texts")
    data.add_argument("--prompts", type=int, default=9000, help="how many (default 9000)")
    data.add_argument("--new-tokens", type=int, default=192, help="that the target adds to each (default 192)")
    data.add_argument("--temperatures", default="0,0.7,1", help="at which each is continued (default 0,0.7,1)")
    data.add_argument("--write-batch", type=int, default=1024, help="texts written at once (default 1024)")
    data.add_argument(
        "--max-repeated", type=float, default=0.2, help="of 4-grams, from where a text is cut (default 0.2)"
    )
    head = p.add_argument_group("head")
    head.add_argument("--draft-vocab", type=int, default=8192, help="ids that it proposes (default 8192)")
    head.add_argument("--intermediate", type=int, help="width of its MLP (default: by the target's width)")
    head.add_argument("--taps", help="comma-separated boundaries (default: the usual ones)")
    head.add_argument("--fc-norm", choices=("none", "concat", "per_tap"), default="per_tap", help="default per_tap")
    head.add_argument("--raw-output", action="store_true", help="feed back the raw output, not the normed one")
    train = p.add_argument_group("training")
    train.add_argument("--epochs", type=float, default=3.0, help="passes over the texts at most (default 3)")
    train.add_argument("--batch", type=int, default=64, help="texts a step (default 64)")
    train.add_argument("--ttt", type=int, default=5, help="steps of the training-time test (default 5)")
    train.add_argument("--lr", type=float, default=1e-3, help="highest learning rate (default 1e-3)")
    train.add_argument("--check-every", type=int, default=200, help="steps between held-out checks (default 200)")
    train.add_argument("--patience", type=int, default=5, help="checks without progress to stop (default 5; 0: never)")
    return p


def main(argv: list[str] | None = None) -> int:
    return run_tool(lambda: run(parser().parse_args(argv)))


def run(args: argparse.Namespace) -> int:
    if args.output.exists() and any(args.output.iterdir() if args.output.is_dir() else [args.output]):
        raise ValueError(f"{args.output} exists and is not an empty folder; name another, or remove it first")
    temperatures = parse_temperatures(args.temperatures)
    for name, least in (("prompts", 8), ("new_tokens", 8), ("write_batch", 1), ("batch", 1), ("ttt", 1)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}")
    if args.epochs <= 0:
        raise ValueError(f"--epochs must be above 0, got {args.epochs}")
    import torch

    from eyas.models.eagle3_checkpoint import write_head
    from eyas.models.target import find_target
    from eyas.training.generate import Generator, draft_vocabulary, keep_good
    from eyas.training.teacher import Teacher
    from eyas.training.trainer import Plan, Trainer

    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but no CUDA device was found; allowed here: cpu")
    progress, start = ConsoleProgress(), time.perf_counter()
    work = args.work or args.output.with_name(args.output.name + ".work")
    device = torch.device(args.device)
    spec = find_target(args.target)
    with progress.stage("read the target"):
        checkpoint = spec.open_checkpoint(args.checkpoint)
        prompts, held_out_prompts = read_prompts(args, checkpoint, work)
        length = max(len(p.ids) for p in [*prompts, *held_out_prompts]) + args.new_tokens
        dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
        teacher = Teacher(spec, checkpoint, length, dtype, device)
    parse_taps(args.taps, teacher.module.n_layers)
    progress.note(f"{len(prompts)} prompts, {len(held_out_prompts)} held out, up to {length} tokens a text")
    with progress.stage("write texts"):
        generator = Generator(teacher, checkpoint.stop_ids, args.seed)
        written = write_texts(generator, prompts, temperatures, args, work / "texts", progress)
        held_out = write_texts(generator, held_out_prompts, (0.0,), args, work / "held_out", progress)
        texts, filtered = keep_good(written, args.max_repeated, MIN_NEW)
        held_out, held_out_filtered = keep_good(held_out, args.max_repeated, MIN_NEW)
    progress.note(f"texts: {filtered}")
    progress.note(f"held out: {held_out_filtered}")
    with progress.stage("draft vocabulary"):
        ids = draft_vocabulary(texts, args.draft_vocab, teacher.vocab_size, checkpoint.stop_ids)
        covered = share_covered(held_out, ids)
    progress.note(f"draft vocabulary: {len(ids)} ids, {covered:.1%} of held-out tokens")
    head = make_head(args, checkpoint, ids, teacher).to(device)
    total = max(1, round(args.epochs * (len(texts) // args.batch)))
    plan = Plan(
        total, args.batch, args.ttt, lr=args.lr, seed=args.seed, check_every=args.check_every, patience=args.patience
    )
    trainer = Trainer(teacher, head, plan, texts, held_out, work)
    if trainer.step:
        progress.note(f"goes on after step {trainer.step} of {total}")
    with progress.stage("train"):
        train(trainer, progress)
    trained = trainer.step
    with progress.stage("evaluate"):
        report = evaluate(teacher, head, held_out, args.batch)
        untrained = evaluate(teacher, make_head(args, checkpoint, ids, teacher).to(device), held_out, args.batch)
    for line in report_lines(report, untrained):
        progress.note(line)
    config = head.config
    weights = {name: p.detach() for name, p in head.named_parameters()}
    write_head(args.output, config, weights, head.d2t.cpu(), target_name=args.target, max_file_bytes=MAX_FILE_BYTES)
    card = {
        "target": dict(checkpoint.identity), "license of the target": checkpoint.license or "see its own files",
        "made with": made_with(args),
        "sources of prompts": source_line(checkpoint), "texts": asdict(filtered),
        "temperatures": temperatures,
        "held out": asdict(held_out_filtered), "held-out tokens in the draft vocabulary": covered,
        "steps": trained, "plan": asdict(plan), "tau": report, "tau untrained": untrained,
    }  # fmt: skip
    write_json(args.output / "card.json", card)
    write_json(
        args.output / "held_out.json",
        {"prompts": [{"kind": p.kind, "ids": list(p.ids)} for p in held_out_prompts]},
    )
    progress.note(f"wrote {args.output} after {time.perf_counter() - start:.0f} s; {work} is no longer needed")
    return 0


def made_with(args: argparse.Namespace) -> dict[str, object]:
    import torch

    paths = ("checkpoint", "output", "work")  # of this machine
    return {
        "arguments": {name: value for name, value in vars(args).items() if name not in paths},
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "torch": torch.__version__,
    }  # fmt: skip


def parse_temperatures(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = (-1.0,)
    if min(values) < 0:
        raise ValueError(f"--temperatures takes comma-separated numbers of at least 0, got {text!r}")
    return values


def parse_taps(text: str | None, n_layers: int) -> tuple[int, ...] | None:
    if text is None:
        return None
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise ValueError(f"--taps takes comma-separated numbers, got {text!r}")
    taps = tuple(int(part) for part in text.split(","))
    if max(taps) > n_layers:
        raise ValueError(f"taps are boundaries from 0 to the target's {n_layers} layers, got {text!r}")
    return taps


def read_prompts(args: argparse.Namespace, checkpoint, work: Path):
    """Prompts to train on, and those held out. A target without a tokenizer gets random ids."""
    import random

    from eyas.training.corpus import is_held_out, prompts
    from eyas.training.generate import Prompt

    if checkpoint.tokenizer.kind == "none":
        random.seed(args.seed)
        vocab = checkpoint.config.vocab_size
        made = [Prompt("random", tuple(random.randrange(2, vocab) for _ in range(6))) for _ in range(args.prompts)]
        n = max(1, args.prompts // 10)
        return made[n:], made[:n]
    import tokenizers

    from eyas.lowering.content_cache import default_root
    from eyas.lowering.tokenizer import read_tokenizer

    content, facts = read_tokenizer(
        checkpoint.tokenizer, default_root() / "tokenizers", vocab_size=checkpoint.config.vocab_size,
        bos_id=checkpoint.bos_id,
    )  # fmt: skip
    backend = tokenizers.Tokenizer.from_buffer(content)
    first = [facts.bos_id] if facts.add_bos else []
    train, held_out = [], []
    for kind, text in prompts(None, args.seed):
        ids = (first + backend.encode(text, add_special_tokens=False).ids)[:64]
        (held_out if is_held_out(text) else train).append(Prompt(kind, tuple(ids)))
    return balanced(train, args.prompts), balanced(held_out, 256)


def balanced(prompts, limit: int):
    """The first ``limit`` prompts with the kinds in turns, as long as each lasts."""
    by_kind: dict[str, list] = {}
    for prompt in prompts:
        by_kind.setdefault(prompt.kind, []).append(prompt)
    made = []
    while len(made) < limit and any(by_kind.values()):
        made += [waiting.pop() for waiting in by_kind.values() if waiting]
    return made[:limit]


def write_texts(generator, prompts, temperatures, args: argparse.Namespace, folder: Path, progress) -> list:
    """The texts of ``prompts`` at every temperature; what lies in ``folder`` already is read."""
    import os

    from eyas.training.generate import Text

    by_length = sorted(prompts, key=lambda prompt: len(prompt.ids))
    calls = [
        (by_length[at : at + args.write_batch], temperature)
        for temperature in temperatures
        for at in range(0, len(by_length), args.write_batch)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"seed": args.seed, "prompts": args.prompts, "new_tokens": args.new_tokens,
                "temperatures": list(temperatures), "write_batch": args.write_batch}  # fmt: skip
    known = folder / "settings.json"
    if known.exists() and json.loads(known.read_text()) != settings:
        raise ValueError(f"{folder} holds texts of other settings, {known.read_text().strip()}; remove it, or use them")
    write_json(known, settings)
    texts, begin = [], time.perf_counter()
    for i, (some, temperature) in enumerate(calls):
        path = folder / f"{i:05}.json"
        if not path.exists():
            size = args.write_batch if args.device == "cuda" else 0
            made = generator.texts(some, args.new_tokens, temperature, batch=i, size=size)
            part = path.with_suffix(".part")
            try:
                part.write_text(json.dumps([(t.kind, t.ids, t.prompt, t.temperature) for t in made]))
                os.replace(part, path)
            finally:
                part.unlink(missing_ok=True)
        try:
            texts += [Text(kind, tuple(ids), n, t) for kind, ids, n, t in json.loads(path.read_text())]
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error}); remove it, and its texts are written again") from error
        if (i + 1) % max(1, len(calls) // 10) == 0:
            tokens = sum(len(t.ids) - t.prompt for t in texts)
            progress.note(f"{i + 1} of {len(calls)} batches, {tokens / (time.perf_counter() - begin):.0f} tokens/s")
    return texts


def share_covered(texts, ids) -> float:
    """The share of new tokens that a draft vocabulary has."""
    known = set(ids.tolist())
    new = [token for text in texts for token in text.ids[text.prompt :]]
    return sum(token in known for token in new) / max(1, len(new))


def make_head(args: argparse.Namespace, checkpoint, ids, teacher):
    """The head to train, on the cpu: random but for its ``lm_head``, which are the target's rows."""
    from eyas.models.eagle3 import Eagle3Head
    from eyas.models.eagle3_checkpoint import untrained_head
    from eyas.models.recipe import load_recipe, materialize
    from eyas.models.tiny_targets import random_tensors

    made = untrained_head(
        target_vocab_size=teacher.vocab_size, target_hidden_size=teacher.module.hidden_size,
        target_layers=teacher.module.n_layers, target_embed=checkpoint.tensors["embed_tokens.weight"], seed=args.seed,
        boundaries=parse_taps(args.taps, teacher.module.n_layers), ids=ids,
    )  # fmt: skip
    config = replace(
        made.config, intermediate_size=args.intermediate or made.config.intermediate_size, fc_norm=args.fc_norm,
        norm_output=not args.raw_output,
    )  # fmt: skip
    head = Eagle3Head(config, 1)
    tensors = {**random_tensors(head, args.seed), "lm_head.weight": made.tensors["lm_head.weight"]}
    import torch

    materialize(head, "draft.", tensors, load_recipe("none"), torch.float32)
    head.d2t.copy_(made.d2t)
    return head


def train(trainer, progress) -> None:
    """Shows loss, accuracy and speed as it goes."""
    begin, tokens, every = time.perf_counter(), 0, max(1, trainer.plan.steps // 20)

    def told(now) -> None:
        nonlocal tokens
        tokens += now.tokens
        if now.step % every == 0 or now.held_out:
            shares = " ".join(f"{a:.3f}" for a in now.held_out or now.accuracy)
            which = "held-out accuracy" if now.held_out else "accuracy"
            speed = tokens / (time.perf_counter() - begin)
            progress.note(f"step {now.step}: loss {now.loss:.3f}, {which} {shares}, {speed:.0f} tokens/s")

    trainer.run(told=told)
    if trainer.stopped:
        progress.note(f"stopped after step {trainer.step}: held-out accuracy no longer rises")


def evaluate(teacher, head, texts, batch: int) -> dict[str, dict[str, float]]:
    """tau at each chain length by kind, and the share of repeated 4-grams, over greedy texts. Chains are walked round
    by round as decoding does.
    """
    import torch

    from eyas.training.objective import Batch, accepted, run_steps, tau

    counts: dict[str, dict[int, list[int]]] = {}
    repeated: dict[str, list[float]] = {}
    for at in range(0, len(texts), batch):
        some = texts[at : at + batch]
        with torch.no_grad():
            held = accepted(run_steps(teacher, head, Batch.of(some, teacher.device), max(CHAINS)))
        for text, row in zip(some, held):
            repeated.setdefault(text.kind, []).append(text.repeated)
            for chain in CHAINS:
                total = counts.setdefault(text.kind, {}).setdefault(chain, [0, 0])
                tokens, rounds = tau([text], row[None], chain)
                total[0] += tokens
                total[1] += rounds
    shares = {kind: sum(values) / len(values) for kind, values in repeated.items()}
    return {
        kind: {**{f"K={c}": n / max(1, r) for c, (n, r) in by.items()}, "repeated": shares[kind]}
        for kind, by in sorted(counts.items())
    }


def report_lines(report, untrained) -> list[str]:
    return [
        f"tau of {kind}: "
        + ", ".join(f"{name} {value:.2f}" for name, value in figures.items() if name != "repeated")
        + f" (untrained K=4 {untrained[kind]['K=4']:.2f}); repeated 4-grams {figures['repeated']:.1%}"
        for kind, figures in report.items()
    ]


def source_line(checkpoint) -> str:
    from eyas.training.corpus import SOURCES

    return "random ids" if checkpoint.tokenizer.kind == "none" else SOURCES


if __name__ == "__main__":
    sys.exit(main())
