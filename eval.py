"""Evaluation (Section 4.1): EM, F1, peak context, dependency and seconds on Q2, Q8 and Q16, in the columns of Table 1.

    EM, F1       summed over the questions of a task, mean over tasks; by SQuAD's definition, or HotpotQA's, or MEM1's
    peak         the most tokens that one call reads and writes: max_t |z_t| + |a_t|, mean over tasks
    dependency   sum over generated segments s of |s| (|p_s| + floor(|s| / 2)), p_s = z_t; mean over tasks
    seconds      wall-clock time of the batched rollout, divided by the number of tasks

The paper does not say whether q counts in peak and dependency: here it does, as in the cost of a call; --without_q
leaves it out of both, as MEM1 does. (MEM1 also skips failed tasks in peak, and counts <think> twice; not so here.)

    python eval.py RUN                            # warm start, student and teacher of a run of train.py
    python eval.py MODEL --questions FILE --corpus INDEX --horizons 2 8 --records FOLDER      # a folder or hub name
    python eval.py MODEL --questions FILE --corpus INDEX --keep_correct OUT.jsonl             # data for SFT
    python eval.py compare PPO=FOLDER,FOLDER MemOPD=FOLDER,FOLDER                             # records of several runs
    python eval.py study --seeds 0 1 2 3 4                        # Figure 3a on the toy: PPO, history, aligned
"""
import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, stdev

import torch
from tqdm import tqdm

from env import RULES, STOP, SearchEnv, compose, load_questions, open_retriever, step_all, toy_envs
from rollout import Trajectory, generate, load, rollout, stop_on, task_generators, update_rules

METRICS = ("em", "f1", "peak", "dependency", "seconds")


def peak(trajectory: Trajectory, with_q: bool = True) -> int:
    """The longest call, in tokens."""
    q = 0 if with_q else trajectory.prefix_len
    return max(len(call.prompt_ids) - q + len(call.action_ids) for call in trajectory.calls)


def dependency(trajectory: Trajectory, with_q: bool = True) -> int:
    """How many earlier tokens the generated ones depend on, in all."""
    q = 0 if with_q else trajectory.prefix_len
    return sum(len(c.action_ids) * (len(c.prompt_ids) - q + len(c.action_ids) // 2) for c in trajectory.calls)


def evaluate(model, tokenizer, envs: list[SearchEnv], update: str = "mem1", max_new_tokens: int = 128,
             max_len: int = 640, batch_size: int = 256, progress: str | None = None, temperature: float = 0.0,
             seed: int = 0, scores: str = "squad", with_q: bool = True, records: str | os.PathLike | None = None,
             keep_correct: str | os.PathLike | None = None) -> tuple[dict[str, float], list[Trajectory]]:
    """Roll out all environments, batch_size at a time: the means of METRICS, and the trajectories.

    records: a JSONL file with a line a task, written batch by batch; the tasks that it holds are not run again.
    keep_correct: a JSONL file to which the text of every episode with all answers right is added, for SFT."""
    rule, stop = update_rules(tokenizer)[update], stop_on(tokenizer, STOP)
    done, trajectories = read_records(records), []
    todo = [env for env in envs if env.task.id not in done]
    for i in range(0, len(todo), batch_size):
        batch, start = todo[i:i + batch_size], time.perf_counter()
        noise = task_generators(seed, 0, [env.task.id for env in batch])

        def sample(prompts, rows):
            return generate(model, prompts, max_new_tokens, temperature, stop, [noise[i] for i in rows])
        new = rollout(sample, tokenizer, batch, step_all, rule, max_len - max_new_tokens, progress)
        seconds = (time.perf_counter() - start) / len(batch)
        for env, trajectory in zip(batch, new):
            em, f1 = env.score(scores)
            done[env.task.id] = {"task": env.task.id, "em": em, "f1": f1, "peak": peak(trajectory, with_q),
                                 "dependency": dependency(trajectory, with_q), "seconds": seconds,
                                 "calls": len(trajectory.calls), "answers": env.answers}
        # before the records, which say that a task is done; a right answer ends a valid episode
        append(keep_correct, (as_text(env, t, tokenizer) for env, t in zip(batch, new)
                              if env.score()[0] == len(env.task.questions)))
        append(records, (done[env.task.id] for env in batch))
        trajectories += new
    return {name: mean(done[env.task.id][name] for env in envs) for name in METRICS}, trajectories


def as_text(env: SearchEnv, trajectory: Trajectory, tokenizer) -> dict:
    """An episode without token ids: those of its maker mean nothing to another tokenizer."""
    turns = [{"response": tokenizer.decode(call.action_ids, skip_special_tokens=True),
              "observation": tokenizer.decode(call.observation_ids)} for call in trajectory.calls]
    return {"task": env.task.id, "prompt": env.prompt(), "turns": turns}


def append(path: str | os.PathLike | None, lines: Iterable[dict]) -> None:
    """Add JSON lines to a file; each batch is on disk before the next begins."""
    if path is not None:
        drop_cut_line(path)
        with open(path, "a", encoding="utf-8") as f:
            f.writelines(json.dumps(line) + "\n" for line in lines)


def drop_cut_line(path: str | os.PathLike) -> None:
    """Remove a last line that a crash cut off, or the next one would be glued to it."""
    if os.path.exists(path):
        data = Path(path).read_bytes()
        os.truncate(path, data.rfind(b"\n") + 1)


def read_records(path: str | os.PathLike | None) -> dict[str, dict]:
    """{task: record} of a records file, {} where there is none. A last line that was cut off by a crash is removed from
    the file; any other damage is a ValueError naming the line."""
    if path is None or not os.path.exists(path):
        return {}
    drop_cut_line(path)
    found = {}
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        try:
            record = json.loads(line)
            found[record["task"]] = {**record, **{name: float(record[name]) for name in METRICS}}
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{os.fspath(path)}, line {number}: not a record of eval.py ({error})") from None
    return found


def table(rows: Iterable[tuple[str, str, dict[str, float]]]) -> Iterator[str]:
    """The lines of a Markdown table, as soon as each (set, model, metrics) is known."""
    yield from ("| set | model | EM | F1 | peak | dependency | s / task |", "|---|---|---|---|---|---|---|")
    for name, model, m in rows:
        yield (f"| {name} | {model} | {m['em']:.3f} | {m['f1']:.3f} | {m['peak']:.0f} | {m['dependency']:.0f} "
               f"| {m['seconds']:.3f} |")


def compare(groups: dict[str, list[Path]]) -> Iterator[str]:
    """`table1` for groups of records folders, a folder a seed."""
    found = {name: [{file.stem: read_records(file) for file in sorted(folder.glob("Q*.jsonl"))} for folder in folders]
             for name, folders in groups.items()}
    for name, seeds in found.items():
        for folder, sets in zip(groups[name], seeds):
            if sets.keys() != seeds[0].keys() or not all(sets.values()):
                raise ValueError(f"{folder}: its sets are {sorted(sets)}, those of the other runs {sorted(seeds[0])}")
    return table1({name: [{k: {m: mean(r[m] for r in records.values()) for m in METRICS} for k, records in sets.items()}
                          for sets in seeds] for name, seeds in found.items()})


def table1(found: dict[str, list[dict]]) -> Iterator[str]:
    """The layout of Table 1 for {model: [{set: {metric: mean over tasks}}, a dict a seed]}: for every set the mean and
    the standard deviation over seeds, and the change of F1 against the first model."""
    yield f"| set | model | runs | EM | F1 | change of F1 | {' | '.join(METRICS[2:])} |"
    yield "|---" * 9 + "|"
    for k in sorted(next(iter(found.values()))[0], key=lambda k: (len(k), k)):
        first = None
        for name, seeds in found.items():
            if k not in seeds[0]:
                continue
            runs = {m: [sets[k][m] for sets in seeds] for m in METRICS}
            first = first or mean(runs["f1"])
            change = f"{mean(runs['f1']) / first - 1:+.1%}" if first else ""
            yield (f"| {k} | {name} | {len(seeds)} | {spread(runs['em'])} | {spread(runs['f1'])} | {change} "
                   f"| {mean(runs['peak']):.0f} | {mean(runs['dependency']):.0f} | {mean(runs['seconds']):.3f} |")


def f1_table(found: dict[str, list[dict]]) -> Iterator[str]:
    """F1 alone, of the same dict: a line a model, a column a set."""
    names = list(next(iter(found.values()))[0])
    yield from (f"| F1 | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|")
    for model, seeds in found.items():
        yield f"| {model} | {' | '.join(spread([sets[k]['f1'] for sets in seeds]) for k in names)} |"


def spread(x: list[float], form: str = "z.3f") -> str:
    """Mean and standard deviation."""
    return f"{mean(x):{form}}" + (f" ± {stdev(x):.3f}" if len(x) > 1 else "")


def parse(argv: list[str] | None = None):
    """The command line of an evaluation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a run folder of train.py, a model folder, or a hub name; or `compare`, `study`")
    parser.add_argument("--questions", nargs="+", help="files of questions (env.load_questions); by default the toy")
    parser.add_argument("--corpus", help="an index of env.py, a JSONL of passages, or a retrieval server's URL")
    parser.add_argument("--horizons", type=int, nargs="+", default=[2, 8, 16], help="questions per task")
    parser.add_argument("--n", type=int, default=640, help="held-out questions per horizon at most (Q2: 320 tasks)")
    parser.add_argument("--update", choices=list(update_rules(None)), default="mem1", help="the update rule U of Eq. 1")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    parser.add_argument("--scores", choices=RULES, default="squad", help="whose definition of EM and F1")
    parser.add_argument("--without_q", action="store_true", help="leave q out of peak and dependency, as MEM1 does")
    parser.add_argument("--max_new_tokens", type=int, default=128, help="tokens of a response at most")
    parser.add_argument("--max_len", type=int, default=640, help="tokens of a call at most")
    parser.add_argument("--max_obs", type=int, default=1000, help="tokens of an observation at most, in whole passages")
    parser.add_argument("--top_k", type=int, help="passages of a search (default 2 for the toy, else 3)")
    parser.add_argument("--batch_size", type=int, default=256, help="tasks that run at once")
    parser.add_argument("--records", type=Path, help="folder for a line a task; what it holds is not run again")
    parser.add_argument("--keep_correct", type=Path, help="JSONL to which right episodes are added as text, for SFT")
    parser.add_argument("--seed", type=int, default=0, help="of the order of questions, and of sampling")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    counts = (*args.horizons, args.n, args.batch_size, args.max_new_tokens, args.max_obs)
    if min(counts) < 1 or args.top_k is not None and args.top_k < 1:
        parser.error("--horizons, --n, --batch_size, --max_new_tokens, --max_obs and --top_k must be positive")
    if args.max_len <= args.max_new_tokens:
        parser.error(f"--max_len {args.max_len} must leave room for a prompt beside {args.max_new_tokens} new tokens")
    if bool(args.questions) != bool(args.corpus):
        parser.error("--questions and --corpus go together")
    return args


def rows(args) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Evaluate what the command asks for, one model on one horizon at a time."""
    run = Path(args.model)
    models = {name: str(run / name) for name in ("warm_start", "student", "teacher") if (run / name).is_dir()}
    models = models or {run.name: args.model}
    questions = [task for path in args.questions or [] for task in load_questions(path)]
    retriever = open_retriever(args.corpus) if args.corpus else None
    for k in args.horizons:
        for name, path in models.items():
            tokenizer, model = load(path, args.device)
            settings = dict(budget=args.max_obs, length=lambda text: len(tokenizer.encode(text)))
            if questions:
                tasks = compose(questions, k, args.seed)[:max(1, args.n // k)]
                envs = [SearchEnv(task, retriever, top_k=args.top_k or 3, **settings) for task in tasks]
            else:
                envs = toy_envs("test", max(1, args.n // k), k, top_k=args.top_k or 2, **settings)
            folder = args.records and open_records(args.records / name if len(models) > 1 else args.records, path, args)
            metrics, _ = evaluate(
                model, tokenizer, envs, args.update, args.max_new_tokens, args.max_len, args.batch_size,
                f"Q{k}, {name}", args.temperature, args.seed, args.scores, not args.without_q,
                folder and folder / f"Q{k}.jsonl", args.keep_correct)
            yield f"Q{k}", name, metrics


def open_records(folder: Path, model: str, args) -> Path:
    """Make the folder, or continue in it: raise ValueError where it holds records made with other settings."""
    return same_settings(folder, {name: value for name, value in vars(args).items() if name not in (
        "horizons", "n", "batch_size", "records", "keep_correct", "device")} | {"model": os.path.abspath(model)})


def same_settings(folder: Path, ours: dict) -> Path:
    """Make the folder and write the settings into it, or hold them against those that are there."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "settings.json"
    theirs = json.loads(file.read_text()) if file.exists() else ours
    for name in ours:
        if ours[name] != theirs.get(name):
            raise ValueError(f"{folder} holds records with {name} {theirs.get(name)!r}, not {ours[name]!r}; choose "
                             "another folder")
    if not file.exists():
        file.write_text(json.dumps(ours, indent=1) + "\n")
    return folder


# ---- the matched control of Figure 3a, in small ----------------------------------------------------------------------

VARIANTS = {"PPO": ["--distill", "none"], "history": ["--distill", "history"], "aligned": ["--distill", "aligned"]}
PAIRS = [("PPO", "warm start"), ("history", "warm start"), ("aligned", "warm start"), ("history", "PPO"),
         ("aligned", "PPO"), ("aligned", "history")]
CURVES = {"reward": "reward of the batch", "teacher_kl": "KL to the teacher (Eq. 7)",
          "logp_mismatch": "logp_mismatch, p99", "clipfrac": "share of clipped ratios"}


def study(argv: list[str]) -> Iterator[str]:
    """For every seed one warm start, and from it a run of train.py for every variant, with the same teacher, tasks and
    evaluation; then the tables. A finished model is a small file in the folder, and is not made again."""
    parser = argparse.ArgumentParser(prog="eval.py study", description=study.__doc__, allow_abbrev=False,
                                     epilog="Other flags go to train.py.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--folder", type=Path, default=Path("runs/study"), help="for the runs and their results")
    parser.add_argument("--start", type=Path, help="folder of a study whose warm starts and teachers to use")
    parser.add_argument("--horizons", type=int, nargs="+", default=[2, 8, 16], help="questions per task")
    parser.add_argument("--n", type=int, default=640, help="held-out questions per horizon")
    parser.add_argument("--sweep", nargs="+", metavar="X", help="a flag of train.py without its dashes, and values: "
                        "the variants, in the place of PPO, history and aligned")
    parser.add_argument("--figures", type=Path, help="folder for the pictures (needs matplotlib)")
    args, flags = parser.parse_known_args(argv)
    if args.sweep and (len(args.sweep) < 2 or args.figures):
        parser.error("--sweep takes a flag and values, and draws no --figures")
    ours = ["--seed", "--run_dir", "--stage", "--resume", "--student", "--teacher", "--eval_questions"]
    ours += [] if args.sweep else ["--distill"]
    if clash := {flag.partition("=")[0] for flag in flags} & set(ours):
        parser.error(f"{' '.join(sorted(clash))}: study sets this itself, from --seeds, --folder, --start and --sweep")
    if args.figures and not find_spec("matplotlib"):
        raise ValueError("--figures needs matplotlib: pip install '.[figures]'")
    variants = VARIANTS if not args.sweep else {
        f"{args.sweep[0]} {value}": [f"--{args.sweep[0]}", value] for value in args.sweep[1:]}
    same_settings(args.folder, {"horizons": args.horizons, "n": args.n, "sweep": args.sweep, "flags": flags})
    found, states = {name: [] for name in ("warm start", *variants, "teacher")}, []
    with tqdm(total=len(args.seeds) * (len(found) + 1)) as bar:
        for seed in args.seeds:
            here = args.folder / f"seed-{seed}"
            start = (args.start or args.folder) / f"seed-{seed}" / "start"
            common = ["--seed", str(seed), "--resume", *flags]
            models = ["--student", str(start / "warm_start"), "--teacher", str(start / "teacher")]
            for name in found:
                bar.set_description(f"seed {seed}, {name}")
                file = name.replace(" ", "_")
                run, more, model = start, ["--stage", "warm_start"], file
                if name in variants:
                    run, more, model = here / file, [*models, "--eval_questions", "0", *variants[name]], "student"
                result = here / f"{file}.json"
                if not result.exists():
                    if name in variants or not args.start:
                        python("train.py", ["--run_dir", str(run), *common, *more],
                               run.with_name(f"{run.name}.log"))
                    keep(result, result_of(run, model, args))
                found[name].append(read(result))
                bar.update()
            if not args.sweep:
                states.append(states_of(here, start))
            bar.update()
    sets = {name: [r["sets"] for r in results] for name, results in found.items()}
    yield from f1_table(sets)
    if not args.sweep:
        yield from ("", *table1(sets), "", *paired(found, args.seeds), "", *mechanism(states))
    if args.figures:
        draw(found, args.figures)


def python(file: str, flags: list[str], log: Path) -> str:
    """Run one of our files as a process of its own: what it printed. Raises ValueError that names the log where it
    fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a") as f:
        command = [sys.executable, str(Path(__file__).with_name(file)), *flags]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=f, text=True)
        f.write(done.stdout)
    if done.returncode:
        raise ValueError(f"{' '.join(command)} ended with status {done.returncode}; what it said is in {log}")
    return done.stdout


def keep(file: Path, found: dict) -> None:
    """Write a result, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.with_suffix(".part").write_text(json.dumps(found) + "\n")
    os.replace(file.with_suffix(".part"), file)


def read(file: Path) -> dict:
    """What `keep` wrote. Raises ValueError that names the file where it is damaged."""
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file}: not a result of eval.py study ({error}); remove it to make it again") from None


def result_of(run: Path, name: str, args) -> dict:
    """A model's metrics on every set, greedy, and the curves of its training."""
    tokenizer, model = load(str(run / name), "cuda" if torch.cuda.is_available() else "cpu")
    sets = {f"Q{k}": evaluate(model, tokenizer, toy_envs("test", max(1, args.n // k), k, top_k=2))[0]
            for k in args.horizons}
    steps = [m for m in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if m["stage"] == "rl"]
    return {"sets": sets, "curves": {name: [float(f"{m[name]:.4g}") for m in steps] for name in CURVES}}


def states_of(here: Path, start: Path) -> dict:
    """What the teacher says of exact and of flattened states in the last batch of the aligned run (rce.py)."""
    file, aligned = here / "states.json", here / "aligned"
    if not file.exists():
        flags = ["--teacher", str(start / "teacher"), "--trajectories", str(aligned / "trajectories.jsonl"), "--json"]
        report = json.loads(python("rce.py", ["--model", str(aligned / "student"), *flags], here / "rce.log"))
        keep(file, {name: {key: row[key] for key in ("tokens", "mean_kl", "top1")}
                    for name, row in report["teacher"].items()})
    return read(file)


def paired(found: dict[str, list[dict]], seeds: list[int]) -> Iterator[str]:
    """Figure 3a as a table: how F1 changes from one model to another of the same seed, and how many seeds agree with
    the sign of the mean."""
    yield f"| set | F1 of | less that of | {' | '.join(f'seed {seed}' for seed in seeds)} | mean | agree |"
    yield "|---" * (len(seeds) + 5) + "|"
    for k in found["PPO"][0]["sets"]:
        for a, b in PAIRS:
            change = [x["sets"][k]["f1"] - y["sets"][k]["f1"] for x, y in zip(found[a], found[b])]
            agree = sum(x * mean(change) > 0 for x in change)
            yield (f"| {k} | {a} | {b} | {' | '.join(f'{x:+.3f}' for x in change)} | {spread(change, '+.3f')} "
                   f"| {agree}/{len(change)} |")


def mechanism(states: list[dict]) -> Iterator[str]:
    """Where the teacher's two targets differ: means over seeds."""
    yield "| teacher on history against exact state | tokens | KL | top-1 agreement |"
    yield "|---|---|---|---|"
    for row in max(states, key=len):  # a seed may have no call 5
        of = [s[row] for s in states if row in s]
        yield (f"| {row} | {mean(x['tokens'] for x in of):.0f} | {spread([x['mean_kl'] for x in of])} "
               f"| {spread([x['top1'] for x in of])} |")


def draw(found: dict[str, list[dict]], folder: Path) -> None:
    """curves.png: what each variant's training looked like; bars.png: Figure 3a."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    folder.mkdir(parents=True, exist_ok=True)
    colors = dict(zip(found, ("0.6", "tab:blue", "tab:orange", "tab:green", "0.3")))
    trained = {name: results for name, results in found.items() if results[0]["curves"]["reward"]}
    figure, axes = plt.subplots(1, len(CURVES), figsize=(15, 3.2), layout="constrained")
    for axis, (curve, title) in zip(axes, CURVES.items()):
        for name, results in trained.items():
            runs = [r["curves"][curve] for r in results]
            if curve == "teacher_kl" and not any(runs[0]):  # PPO asks no teacher
                continue
            for run in runs:
                axis.plot(run, color=colors[name], alpha=0.2, linewidth=0.8)
            axis.plot([mean(step) for step in zip(*runs)], color=colors[name], label=name)
        axis.set(title=title, xlabel="step", yscale="log" if curve == "logp_mismatch" else "linear")
    axes[0].legend()
    figure.savefig(folder / "curves.png", dpi=110)
    sets = list(found["PPO"][0]["sets"])
    figure, axes = plt.subplots(1, len(sets), figsize=(3.3 * len(sets), 3.2), layout="constrained")
    for axis, k in zip(axes, sets):
        for x, (name, results) in enumerate(found.items()):
            f1 = [r["sets"][k]["f1"] for r in results]
            axis.bar(x, mean(f1), yerr=stdev(f1) if len(f1) > 1 else None, color=colors[name], capsize=3)
            axis.plot([x] * len(f1), f1, "k.", markersize=4)
        axis.set_xticks(range(len(found)), found, rotation=20)
        axis.set(title=f"F1 on {k}", ylim=(0, None))
    figure.savefig(folder / "bars.png", dpi=110)


def main():
    try:
        if sys.argv[1:2] == ["compare"]:
            groups = dict(group.partition("=")[::2] for group in sys.argv[2:])
            if not groups or not all(groups.values()):
                raise ValueError("compare takes NAME=FOLDER,FOLDER,... for each group of runs")
            lines = compare({name: [Path(p) for p in folders.split(",")] for name, folders in groups.items()})
        elif sys.argv[1:2] == ["study"]:
            lines = study(sys.argv[2:])
        else:
            lines = table(rows(parse()))
        for line in lines:
            print(line, flush=True)
    except (ValueError, OSError) as error:
        raise SystemExit(f"eval.py: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit("\ninterrupted; records and studies go on with the same command") from None


if __name__ == "__main__":
    main()
