"""Does alignment help? Matched controls and sweeps on the toy (Table 1, Figure 3a).

For every seed one warm start, and from it a run of train.py for every variant (PPO, history,
aligned; or the values of one flag), with the same teacher, tasks, noise and evaluation, greedy and
sampled; then the tables. A finished model is a small file in the folder and is not made again, so
that commands for different seeds can share a folder, at the same time or later.

    python -m experiments.study --seeds 0 1 2 3 4
    python -m experiments.study --seeds 100 --sweep distill_coef 0 0.02 1 --actor_lr 1e-4
    python -m experiments.study --seeds 100 --sweep divergence reverse forward jensen_shannon
    python -m experiments.study --folder experiments/results/study
    python -m experiments.study compare PPO=FOLDER,FOLDER MemOPD=FOLDER,FOLDER

A divergence takes the place of `losses.reverse_kl`. The fourth makes nothing: it prints the tables
of committed results. The last compares groups of runs from the records of eval.py --records, a
folder per seed. Flags that are not listed go to train.py.
"""

import argparse
import json
import math
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, stdev

import torch
from tqdm import tqdm

import losses
import train as train_file
from env import toy_envs
from eval import COSTS, evaluate, markdown, read_records, same_settings
from experiments.audit import audit_teacher
from pack import action_hidden, pack_all
from rollout import call_ids, command, load, load_trajectories, write

TRAIN = Path(__file__).parents[1] / "train.py"
VARIANTS = {
    "PPO": ["--distill", "none"],
    "history": ["--distill", "history"],
    "aligned": ["--distill", "aligned"],
}
PAIRS = [
    ("PPO", "warm start"),
    ("history", "warm start"),
    ("aligned", "warm start"),
    ("history", "PPO"),
    ("aligned", "PPO"),
    ("aligned", "history"),
]
MODES = {"greedy": 0.0, "sampled": 1.0}  # temperatures: at 1 a student acts as in training
SURE = 0.95  # a probability from which on the gradient of Eq. 7 hardly reaches a token
KL_QUESTIONS = 128  # of the tasks of a set on which the KL is looked at
DIVERGENCES = ("reverse", "forward", "jensen_shannon")  # of the sweep `divergence`
BOOTSTRAPS = 2000
CURVES = {
    "reward": "reward of the batch",
    "teacher_kl": "KL to the teacher (Eq. 7)",
    "logp_mismatch": "logp_mismatch, p99",
    "clipfrac": "share of clipped ratios",
}


# ---- the study -----------------------------------------------------------------------------------
def study(argv):
    """The lines of all tables; runs what is missing first."""
    args, flags = parse(argv)
    variants = VARIANTS
    if args.sweep:
        name, *values = args.sweep
        variants = {f"{name} {value}": [f"--{name}", value] for value in values}
    settings = {"horizons": args.horizons, "n": args.n, "sweep": args.sweep, "flags": flags}
    same_settings(args.folder, settings)
    models = ["warm start", *variants, "teacher"]
    found, states = {name: [] for name in models}, []
    bar = tqdm(total=len(args.seeds) * len(models), disable=all_made(args, models))
    for seed in args.seeds:
        for name in models:
            bar.set_description(f"seed {seed}, {name}")
            found[name].append(result(seed, name, variants, args, flags))
            bar.update()
        if not args.sweep:
            states.append(states_of(seed, args))
    bar.close()
    tables = [by_set(found, "f1")]
    if not args.sweep:
        tables += [paired(found), table1(means_of_all(found, "greedy")), by_set(found, "answered")]
    tables.append(habit_table(found, "sampled"))
    if not args.sweep:
        tables += [kl_table(found), mechanism(states)]
    for i, table in enumerate(tables):
        yield from ["", *table] if i else table
    if args.figures:
        draw(found, args.figures)


def parse(argv):
    """The command line, checked before any run: (its arguments, the flags for train.py)."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="experiments.study", description=__doc__, formatter_class=formatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    add("--folder", type=Path, default=Path("runs/study"), help="for the runs and their results")
    add("--start", type=Path, help="folder of a study whose warm starts and teachers to use")
    add("--horizons", type=int, nargs="+", default=[2, 3, 4, 8, 16], help="questions per task")
    add("--n", type=int, default=1280, help="held-out questions per horizon")
    sweep = "a flag of train.py without its dashes, and values: the variants of a sweep"
    add("--sweep", nargs="+", metavar="X", help=sweep)
    add("--figures", type=Path, help="folder for the pictures (needs matplotlib)")
    args, flags = parser.parse_known_args(argv)
    if args.sweep and (len(args.sweep) < 2 or args.figures):
        parser.error("--sweep takes a flag and values, and draws no --figures")
    ours = {"--seed", "--run_dir", "--stage", "--resume", "--student", "--teacher"}
    ours |= {"--eval_questions"} if args.sweep else {"--eval_questions", "--distill"}
    clash = ours & {flag.partition("=")[0] for flag in flags}
    if clash:
        source = "study sets this itself, from --seeds, --folder, --start and --sweep"
        parser.error(f"{' '.join(sorted(clash))}: {source}")
    if args.figures and not find_spec("matplotlib"):
        raise ValueError("--figures needs matplotlib: pip install '.[figures]'")
    return args, flags


def file_of(seed, name, args):
    """Where the result of a model is kept."""
    return args.folder / f"seed-{seed}" / f"{name.replace(' ', '_')}.json"


def start_of(seed, args):
    """The run that made the warm start and the teacher of a seed."""
    return (args.start or args.folder) / f"seed-{seed}" / "start"


def all_made(args, models):
    """Whether there is nothing left to run."""
    return all(file_of(seed, name, args).exists() for seed in args.seeds for name in models)


def result(seed, name, variants, args, flags):
    """A model's result: from its file, or from a run that makes it."""
    file, start = file_of(seed, name, args), start_of(seed, args)
    if file.exists():
        return load_result(file)
    common = ["--seed", str(seed), "--resume", *flags]
    if name in variants:
        run, model = file.with_suffix(""), "student"
        common += ["--student", f"{start}/warm_start", "--teacher", f"{start}/teacher"]
        make_run(run, [*common, "--eval_questions", "0", *variants[name]])
    else:
        run, model = start, file.stem
        if not args.start:
            make_run(run, [*common, "--stage", "warm_start"])
    teacher = None if model == "teacher" else start / "teacher"
    found = {**evaluated(run / model, teacher, args), "curves": curves_of(run)}
    save_result(file, found)
    return found


def make_run(run, flags):
    """Run train.py, or resume it. Raises ValueError with its last words if it fails."""
    # in a separate process: when it ends all its memory is free, and main() of train.py sets up
    # what bfloat16 needs and says, in the log, how a failed run can be resumed
    log = run.with_name(f"{run.name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    program = [str(TRAIN)]
    if "--divergence" in flags:
        at = flags.index("--divergence")
        flags, name = flags[:at] + flags[at + 2 :], flags[at + 1]
        program = ["-m", "experiments.study", "train", name]
    command = [sys.executable, *program, "--run_dir", str(run), *flags]
    with open(log, "a") as f:
        done = subprocess.run(command, stdout=f, stderr=f)
    if done.returncode:
        said = log.read_text().splitlines() or ["nothing"]
        raise ValueError(f"{' '.join(command)} failed: {said[-1]}; what it said is in {log}")


def train_by(name, flags):
    """train.py with another divergence to the teacher: the edit of `losses.reverse_kl` that README
    speaks of, made from outside."""
    reverse = losses.reverse_kl

    def forward(logits, teacher_logits):
        """KL(p_T || p_theta)."""
        return reverse(teacher_logits, logits)

    def jensen_shannon(logits, teacher_logits):
        """The mean of both KLs to the mean of both distributions."""
        common = min(logits.shape[1], teacher_logits.shape[1])
        pair = [x[:, :common].log_softmax(-1) for x in (logits, teacher_logits)]
        middle = torch.logaddexp(*pair) - math.log(2)
        return (reverse(pair[0], middle) + reverse(pair[1], middle)) / 2

    if name not in DIVERGENCES:
        raise ValueError(f"{name} is no divergence; take one of {', '.join(DIVERGENCES)}")
    losses.reverse_kl = {"forward": forward, "jensen_shannon": jensen_shannon}.get(name, reverse)
    train_file.main(flags)


def evaluated(folder, teacher_folder, args):
    """A model on every set, {"sets": {mode: {set: metrics}}}: F1 task by task, [slips, chances] of
    each habit, means of the rest. And where its KL to the teacher sits on what it sampled there,
    {"kl": {set: numbers}}."""
    tokenizer, model = load(str(folder), device(), "packed", torch.float32)
    teacher = teacher_folder and load(str(teacher_folder), device(), "packed", torch.float32)[1]
    sets, kl = {mode: {} for mode in MODES}, {}
    for mode, temperature in MODES.items():
        for k in args.horizons:
            envs = toy_envs("test", max(1, args.n // k), k, top_k=2)
            settings = {"temperature": temperature, "progress": f"Q{k}, {mode}"}
            means, trajectories = evaluate(model, tokenizer, envs, **settings)
            means["f1"] = [round(env.score()["f1"], 4) for env in envs]
            means["habits"] = habits_of(envs, trajectories, tokenizer)
            sets[mode][f"Q{k}"] = means
            if teacher and temperature:
                some = [trajectory for trajectory in trajectories if trajectory is not None]
                kl[f"Q{k}"] = where_kl_sits(model, teacher, some[: max(1, KL_QUESTIONS // k)])
    return {"sets": sets, "kl": kl}


MEMORY = re.compile(
    r"<think> (?:.* is (?P<value>.*?) ; )?known (?P<known>.*?)(?:next (?P<question>.*)|done) "
    r"</think> <(?:search|answer)> (?P<query>.*?) </"
)
HABITS = {
    "first hop": "the first of two hops is taken for the answer",
    "gave up": "all is answered while questions are open, before the last turn",
    "miscopied": "the answers in the memory are wrong in another way, or cannot be read",
}


def habits_of(envs, trajectories, tokenizer):
    """[slips, chances] of each of HABITS over all turns, each held against the memory before it and
    the value that it says it found."""
    count = {habit: [0, 0] for habit in HABITS}
    for env, trajectory in zip(envs, trajectories, strict=True):
        calls = trajectory.calls if trajectory is not None else []
        turns = [MEMORY.match(tokenizer.decode(call.action_ids)) for call in calls]
        for call, before, now in zip(calls, turns, turns[1:]):
            if before is None or before["question"] is None:
                continue  # nothing to hold the turn against
            if now is None or now["value"] is None:
                count["miscopied"][0] += 1
                count["miscopied"][1] += 1
                continue
            known, kept = (turn["known"].split(" ; ")[:-1] for turn in (before, now))
            longer = [*known, now["value"]]
            two_hops = before["question"].endswith(f" of {before['query']}")
            first_hop = two_hops and kept == longer
            expected = longer if first_hop or not two_hops else known
            last = "last turn" in tokenizer.decode(call.observation_ids)
            may_go_on = 0 < len(kept) < len(env.task.questions) and not last
            gave_up = may_go_on and now["question"] is None
            cases = [(first_hop, two_hops), (gave_up, may_go_on), (kept != expected, True)]
            for habit, (slip, chance) in zip(HABITS, cases):
                count[habit][0] += slip
                count[habit][1] += chance
    return count


@torch.no_grad()
def where_kl_sits(student, teacher, trajectories):
    """Eq. 7 on sampled tokens: its mean, and the share of tokens, of the KL and of its gradient on
    tokens where the student is sure of what the teacher would not say. The gradient by a logit is
    p_v (log p_v - log q_v - KL): where p is nearly 1 almost none is left."""
    prompts, actions, _ = call_ids(trajectories)
    kls, gradients, sure = [], [], []
    for packed in pack_all(prompts, actions, 8192):
        packed = packed.to(student.device)
        logp, logq = log_probs(student, packed), log_probs(teacher, packed)  # (n, V)
        p, off = logp.exp(), logp - logq
        kl = (p * off).sum(-1)
        kls.append(kl)
        gradients.append((p * (off - kl[:, None])).norm(dim=-1))
        sure.append((p.amax(-1) > SURE) & (p.argmax(-1) != logq.argmax(-1)))
    kl, gradient, sure = torch.cat(kls), torch.cat(gradients), torch.cat(sure)
    found = {"tokens": len(kl), "mean_kl": kl.mean(), "sure": sure.double().mean()}
    found["sure_kl"] = kl[sure].sum() / kl.sum()
    found["sure_gradient"] = gradient[sure].sum() / gradient.sum()
    return {name: float(f"{x:.4g}") for name, x in found.items()}


def log_probs(model, packed):
    """A model's log-probs at every sampled token of a pack, (N, V)."""
    logits = model.get_output_embeddings()(action_hidden(model, packed))
    return logits.double().log_softmax(-1)


def curves_of(run):
    """What training looked like, a number per step; empty for a warm start or a teacher."""
    curves = {curve: [] for curve in CURVES}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        step = json.loads(line)
        if step["stage"] == "rl":
            for curve in CURVES:
                curves[curve].append(float(f"{step[curve]:.4g}"))
    return curves


def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


def states_of(seed, args):
    """What the teacher says of exact and of flattened states in the last batch of the aligned run.
    Raises ValueError if its packs fail the audit: then nothing is known about either."""
    file = file_of(seed, "states", args)
    if file.exists():
        return load_result(file)
    teacher_folder = start_of(seed, args) / "teacher"
    tokenizer, teacher = load(str(teacher_folder), device(), "packed", torch.float32)
    recorded = file.with_name("aligned") / "trajectories.jsonl"
    rows, packs = audit_teacher(teacher, load_trajectories(recorded), tokenizer=tokenizer)
    if not packs.holds():
        raise ValueError(f"{teacher_folder}: RCE (Eq. 5) fails on {recorded}: {packs}")
    states = {}
    for name, row in rows.items():
        states[name] = {key: row[key] for key in ("tokens", "mean_kl", "top1")}
    save_result(file, states)
    return states


def save_result(file, found):
    """Write a result, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write(file, json.dumps(found) + "\n")


def load_result(file):
    """What `save_result` wrote. Raises ValueError naming the file if it is damaged."""
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        advice = "remove it to make it again"
        raise ValueError(f"{file}: not a result of the study ({error}); {advice}") from None


# ---- tables and pictures -------------------------------------------------------------------------
def compare(groups):
    """Table 1 for groups of record folders of eval.py, {model: folders}, a folder per seed."""
    found = {}
    for name, folders in groups.items():
        found[name] = [means_of(folder) for folder in folders]
        first = found[name][0]
        for folder, sets in zip(folders, found[name]):
            if sets.keys() != first.keys() or not sets:
                expected = f"those of the other runs {sorted(first)}"
                raise ValueError(f"{folder}: its sets are {sorted(sets)}, {expected}")
    return table1(found)


def means_of(folder):
    """{set: {metric: mean over tasks}} of a folder of records."""
    sets = {}
    for file in sorted(folder.glob("Q*.jsonl")):
        records = read_records(file).values()
        if not records:
            raise ValueError(f"{file}: no records in it")
        sets[file.stem] = {}
        for metric in ("em", "f1", *COSTS):
            sets[file.stem][metric] = mean(record[metric] for record in records)
    return sets


def table1(found):
    """The layout of Table 1 for {model: [{set: {metric: mean over tasks}}, a dict per seed]}: for
    every set the mean and the standard deviation over seeds, and the change of F1 against the first
    model."""
    columns = ["set", "model", "runs", "EM", "F1", "change of F1", *COSTS]
    rows = []
    sets = next(iter(found.values()))[0]
    for k in sorted(sets, key=lambda k: (len(k), k)):
        first = None
        for name, seeds in found.items():
            if k not in seeds[0]:
                continue
            runs = {}
            for metric in ("em", "f1", *COSTS):
                runs[metric] = [sets[k][metric] for sets in seeds]
            f1 = mean(runs["f1"])
            first = f1 if first is None else first
            change = f"{f1 / first - 1:+.1%}" if first else ""
            row = [k, name, str(len(seeds)), spread(runs["em"]), spread(runs["f1"]), change]
            row += [f"{mean(runs['peak']):.0f}", f"{mean(runs['dependency']):.0f}"]
            rows.append([*row, f"{mean(runs['seconds']):.3f}"])
    return markdown(columns, rows)


def by_set(found, metric):
    """One metric of every result of {model: results, one per seed}, greedy / sampled: a line per
    model, a column per set."""
    names = list(next(iter(found.values()))[0]["sets"]["greedy"])
    rows = []
    for model, results in found.items():
        row = [model]
        for k in names:
            both = []
            for mode in MODES:
                both.append(spread([mean_of(r["sets"][mode][k][metric]) for r in results]))
            row.append(" / ".join(both))
        rows.append(row)
    return markdown([f"{metric.replace('f1', 'F1')}, {' / '.join(MODES)}", *names], rows)


def mean_of(x):
    """Of a list task by task, or a mean already."""
    return mean(x) if isinstance(x, list) else x


def means_of_all(found, mode):
    """{model: [{set: {metric: mean}}, a dict per seed]}, as `table1` takes it."""
    means = {}
    for model, results in found.items():
        means[model] = []
        for r in results:
            sets = r["sets"][mode]
            means[model].append({k: row | {"f1": mean(row["f1"])} for k, row in sets.items()})
    return means


def paired(found):
    """Figure 3a as a table: the change of F1 from one model to another of the same seed on the same
    tasks, its 95 % interval over seeds and tasks, and how many seeds agree with its sign."""
    columns = ["set", "F1 of", "less that of"]
    for mode in MODES:
        columns += [mode, "95 % interval", "agree"]
    rows = []
    for k in found["PPO"][0]["sets"]["greedy"]:
        for a, b in PAIRS:
            row = [k, a, b]
            for mode in MODES:
                f1 = [f1_of(found[model], mode, k) for model in (a, b)]
                change = f1[0] - f1[1]  # (seeds, tasks)
                low, high = interval(change)
                seeds = change.mean(1)
                agree = (seeds * seeds.mean() > 0).sum()
                row += [f"{change.mean():+.3f}", f"{low:+.3f} to {high:+.3f}"]
                row.append(f"{agree}/{len(seeds)}")
            rows.append(row)
    return markdown(columns, rows)


def f1_of(results, mode, k):
    """F1 of every task, (seeds, tasks)."""
    rows = [r["sets"][mode][k]["f1"] for r in results]
    return torch.tensor(rows, dtype=torch.float64)


def interval(change):
    """Bootstrap interval of the mean of (seeds, tasks): both are drawn again with replacement."""
    n_seeds, n_tasks = change.shape
    rng = torch.Generator().manual_seed(0)
    seeds = torch.randint(n_seeds, (BOOTSTRAPS, n_seeds), generator=rng)
    tasks = torch.randint(n_tasks, (BOOTSTRAPS, n_tasks), generator=rng)
    by_task = change[seeds].mean(1)  # (BOOTSTRAPS, tasks)
    means = by_task.gather(1, tasks).mean(1)
    return means.quantile(torch.tensor([0.025, 0.975], dtype=means.dtype)).tolist()


def habit_table(found, mode):
    """How often each of HABITS is had, in percent of its chances, over all seeds."""
    names = list(found["warm start"][0]["sets"][mode])
    rows = []
    for model, results in found.items():
        row = [model]
        for k in names:
            shares = []
            for habit in HABITS:
                counts = [r["sets"][mode][k]["habits"][habit] for r in results]
                slips, chances = (sum(column) for column in zip(*counts))
                shares.append(f"{100 * slips / max(chances, 1):.1f}")
            row.append(" / ".join(shares))
        rows.append(row)
    return markdown([f"{' / '.join(HABITS)}, % {mode}", *names], rows)


def kl_table(found):
    """Where the KL to the teacher sits on what a model samples: means over seeds."""
    columns = ["set", "student", "tokens", "KL"]
    columns += ["sure and not the teacher's: % of tokens", "of the KL", "of its gradient"]
    rows = []
    for k in found["warm start"][0]["kl"]:
        for model, results in found.items():
            of = [r["kl"][k] for r in results if k in r["kl"]]
            if of:
                row = [k, model, f"{mean(x['tokens'] for x in of):.0f}"]
                row.append(spread([x["mean_kl"] for x in of]))
                for share in ("sure", "sure_kl", "sure_gradient"):
                    row.append(f"{100 * mean(x[share] for x in of):.1f}")
                rows.append(row)
    return markdown(columns, rows)


def mechanism(states):
    """Where the teacher's two targets differ: means over seeds."""
    columns = ["teacher on history against exact state", "tokens", "KL", "top-1 agreement"]
    rows = []
    for name in max(states, key=len):  # a seed may have no call 5
        of = [state[name] for state in states if name in state]
        tokens = f"{mean(x['tokens'] for x in of):.0f}"
        kl, top1 = [x["mean_kl"] for x in of], [x["top1"] for x in of]
        rows.append([name, tokens, spread(kl), spread(top1)])
    return markdown(columns, rows)


def spread(x, form="z.3f"):
    """Mean and standard deviation."""
    deviation = f" ± {stdev(x):.3f}" if len(x) > 1 else ""
    return f"{mean(x):{form}}{deviation}"


def draw(found, folder):
    """curves.png: what each variant's training looked like; bars.png: Figure 3a."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    colors = dict(zip(found, ("0.6", "tab:blue", "tab:orange", "tab:green", "0.3")))
    figure, axes = plt.subplots(1, len(CURVES), figsize=(15, 3.2), layout="constrained")
    for axis, (curve, title) in zip(axes, CURVES.items()):
        for name, results in found.items():
            runs = [r["curves"][curve] for r in results]
            asked = curve != "teacher_kl" or any(runs[0])  # PPO asks no teacher
            if not runs[0] or not asked:
                continue
            for run in runs:
                axis.plot(run, color=colors[name], alpha=0.2, linewidth=0.8)
            means = [mean(step) for step in zip(*runs)]
            axis.plot(means, color=colors[name], label=name)
        scale = "log" if curve == "logp_mismatch" else "linear"
        axis.set(title=title, xlabel="step", yscale=scale)
    axes[0].legend()
    figure.savefig(folder / "curves.png", dpi=110)
    sets = list(found["PPO"][0]["sets"]["greedy"])
    size, shape = (3 * len(sets), 5.6), (len(MODES), len(sets))
    figure, axes = plt.subplots(*shape, figsize=size, layout="constrained", squeeze=False)
    for mode, row in zip(MODES, axes):
        for axis, k in zip(row, sets):
            for x, (name, results) in enumerate(found.items()):
                f1 = f1_of(results, mode, k).mean(1).tolist()
                deviation = stdev(f1) if len(f1) > 1 else None
                axis.bar(x, mean(f1), yerr=deviation, color=colors[name], capsize=3)
                axis.plot([x] * len(f1), f1, "k.", markersize=4)
            axis.set_xticks(range(len(found)), found, rotation=20)
            axis.set(title=f"F1 on {k}, {mode}", ylim=(0, None))
    figure.savefig(folder / "bars.png", dpi=110)


@command("experiments.study", "; the same command continues the study")
def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["train"]:
        return train_by(argv[1], argv[2:])
    if argv[:1] == ["compare"]:
        groups = {}
        for group in argv[1:]:
            name, _, folders = group.partition("=")
            groups[name] = [Path(folder) for folder in folders.split(",") if folder]
        if not groups or not all(groups.values()):
            raise ValueError("compare takes NAME=FOLDER,FOLDER,... for each group of runs")
        lines = compare(groups)
    else:
        lines = study(argv)
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    main()
