"""Pictures of runs: what training looked like, and what every call of a trajectory read and wrote.

    python -m experiments.plot RUN [RUN ...]                # metrics.jsonl -> RUN/metrics.png
    python -m experiments.plot --trajectories RUN/trajectories.jsonl    # -> RUN/trajectories.html

The first needs matplotlib (pip install '.[figures]'). The second takes the tokenizer, student and
teacher of the file's run folder, or --student and --teacher; with both it colours every sampled
token by the KL to the teacher (Eq. 7) in the state in which it was sampled.
"""

import argparse
import html
from pathlib import Path

import torch

from losses import chunks, head_logits, reverse_kl
from pack import action_hidden, pack_all
from rollout import call_ids, check_tokenizers, command, load, load_trajectories, read_lines, write

CURVES = {
    "reward": "reward",
    "teacher_kl": "KL to the teacher (Eq. 7)",
    "entropy": "entropy",
    "clipfrac": "share of clipped ratios",
    "logp_mismatch": "logp_mismatch, p99",
}
PHASES = ("rollout", "pack", "score", "audit", "update")


# ---- metrics.jsonl -------------------------------------------------------------------------------
def plot_runs(runs, out):
    """Every curve of CURVES with a line per run, and the seconds of a step by phase."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    named = [run.name for run in runs]
    names = named if len(set(named)) == len(runs) else list(map(str, runs))
    steps = {name: steps_of(run) for name, run in zip(names, runs)}
    figure, axes = plt.subplots(2, 3, figsize=(13, 6), layout="constrained")
    for axis, (curve, title) in zip(axes.flat, CURVES.items()):
        for run, lines in steps.items():
            axis.plot([line["step"] for line in lines], [line[curve] for line in lines], label=run)
        axis.set(title=title, xlabel="step")
        if curve == "logp_mismatch":
            axis.set_yscale("log")
    axes.flat[0].legend()
    axis = axes.flat[-1]
    left = [0.0] * len(steps)
    for phase in PHASES:
        seconds = []
        for lines in steps.values():
            seconds.append(sum(line[f"seconds_{phase}"] for line in lines) / len(lines))
        axis.barh(list(steps), seconds, left=left, label=phase)
        left = [before + x for before, x in zip(left, seconds)]
    axis.set(title="seconds of a step, mean", xlabel="seconds", xlim=(0, 1.4 * max(left)))
    axis.invert_yaxis()
    axis.legend(loc="right")
    figure.savefig(out, dpi=110)


def steps_of(run):
    """The steps of RL in a run's metrics.jsonl. Raises ValueError if there are none."""
    lines = read_lines(run / "metrics.jsonl", lambda record: record, "not a line of metrics", True)
    steps = [line for line in lines if line.get("stage") == "rl"]
    if not steps:
        raise ValueError(f"{run}: no metrics.jsonl with steps of RL in it")
    return steps


# ---- trajectories --------------------------------------------------------------------------------
STYLE = """
body { font: 14px/1.5 sans-serif; max-width: 68em; margin: 2em auto; padding: 0 1em; color: #222 }
pre { white-space: pre-wrap; font: 13px/1.6 monospace; background: #fafafa; padding: .6em 1em }
summary { cursor: pointer; font-weight: bold; margin: 1em 0 }
h3 { margin: 1em 0 0; font-size: 14px }
.q { color: #999 } .memory { color: #1f5fa8 } .observation { color: #2c7a3f }
.action { border-bottom: 1px solid #555 }
"""
LEGEND = (
    '<p><span class="q">q</span>, <span class="memory">what the context kept</span>, '
    '<span class="observation">observation</span>, <span class="action">sampled tokens</span>'
)


def page(trajectories, tokenizer, kls=None):
    """The HTML of trajectories, a section each. kls: the KL of every action token, in call order;
    without it they have no colour."""
    legend = f"{LEGEND}, red by their KL to the teacher</p>" if kls else f"{LEGEND}</p>"
    parts = [f'<!doctype html><meta charset="utf-8"><style>{STYLE}</style>{legend}']
    rest = iter(kls or [])
    for n, trajectory in enumerate(trajectories):
        reward = sum(call.reward for call in trajectory.calls)
        title = f"{trajectory.task_id}: {len(trajectory.calls)} calls, reward {reward:g}"
        parts.append(f"<details{'' if n else ' open'}><summary>{html.escape(title)}</summary>")
        observations = []
        for t, call in enumerate(trajectory.calls):
            q = call.prompt_ids[: trajectory.prefix_len]
            context = call.prompt_ids[trajectory.prefix_len :]
            sizes = f"reads {len(call.prompt_ids)} tokens, writes {len(call.action_ids)}"
            parts.append(f"<h3>call {t}: {sizes}</h3><pre>")
            parts.append(span("q", tokenizer.decode(q) if t == 0 else "[ q ]\n"))
            for kind, ids in context_parts(context, observations):
                parts.append(span(kind, tokenizer.decode(ids)))
            for token, logp in zip(call.action_ids, call.logprobs):
                kl = next(rest, None)
                parts.append(span("action", tokenizer.decode([token]), logp, kl))
            parts.append("</pre>")
            observations.append(call.observation_ids)
        parts.append("</details>")
    return "\n".join(parts).replace("</span>\n<span", "</span><span") + "\n"


def context_parts(context, observations):
    """x_t in parts, [("memory" or "observation", ids)]: an observation is where the ids of an
    earlier one stand."""
    kinds = ["memory"] * len(context)
    for observed in filter(None, observations):
        for start in range(len(context) - len(observed) + 1):
            if context[start : start + len(observed)] == observed:
                kinds[start : start + len(observed)] = ["observation"] * len(observed)
    parts = []
    for kind, token in zip(kinds, context):
        if not parts or parts[-1][0] != kind:
            parts.append((kind, []))
        parts[-1][1].append(token)
    return parts


def span(kind, text, logp=None, kl=None):
    """Text in the colour of what it is; sampled tokens say their numbers under the pointer."""
    text = html.escape(text)
    if logp is None:
        return f'<span class="{kind}">{text}</span>'
    title, style = f"log-prob {logp:.3f}", ""
    if kl is not None:
        title += f", KL {kl:.3f}"
        style = f' style="background: rgba(220, 30, 30, {min(1.0, kl):.2f})"'
    return f'<span class="{kind}" title="{title}"{style}>{text}</span>'


@torch.no_grad()
def teacher_kl(student, teacher, trajectories):
    """Eq. 7 on every sampled token, in call order, as a list."""
    prompts, actions, _ = call_ids(trajectories)
    found = []
    for packed in pack_all(prompts, actions, 8192):
        hidden, theirs = action_hidden(student, packed), action_hidden(teacher, packed)
        head, their_head = (m.get_output_embeddings().weight for m in (student, teacher))
        for rows in chunks(len(hidden), len(head)):
            logits = head_logits(hidden[rows], head)
            found += reverse_kl(logits, head_logits(theirs[rows], their_head)).tolist()
    return found


# ---- the command ---------------------------------------------------------------------------------
def parse(argv):
    """The command line, checked."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("experiments.plot", None, __doc__, formatter_class=formatter)
    add = parser.add_argument
    add("runs", nargs="*", type=Path, metavar="RUN", help="run folders of train.py")
    add("--trajectories", type=Path, metavar="FILE", help="trajectories.jsonl of a run")
    add("--student", help="whose trajectories they are (default: the run's student)")
    add("--teacher", help="for the colours (default: the run's teacher; none: no colours)")
    add("--n", type=int, default=8, help="how many trajectories, from the first on")
    add("--out", type=Path, help="the file to write (default: beside what is read)")
    args = parser.parse_args(argv)
    if bool(args.runs) == bool(args.trajectories):
        parser.error("give either run folders or --trajectories")
    if args.n < 1:
        parser.error("--n must be positive")
    return args


@command("experiments.plot")
def main(argv=None):
    args = parse(argv)
    if args.runs:
        out = args.out or args.runs[0] / "metrics.png"
        plot_runs(args.runs, out)
    else:
        out = args.out or args.trajectories.with_suffix(".html")
        write(out, page_of(args))
    print(out)


def page_of(args):
    """The page of --trajectories, with colours where there is a teacher."""
    run = args.trajectories.parent
    teacher_folder = args.teacher or (run / "teacher").is_dir() and run / "teacher"
    tokenizer, student = load(str(args.student or run / "student"), "cpu", "packed", torch.float32)
    trajectories = load_trajectories(args.trajectories, tokenizer)[: args.n]
    if not teacher_folder:
        return page(trajectories, tokenizer)
    their_tokenizer, teacher = load(str(teacher_folder), "cpu", "packed", torch.float32)
    check_tokenizers(tokenizer, their_tokenizer)
    return page(trajectories, tokenizer, teacher_kl(student, teacher, trajectories))


if __name__ == "__main__":
    main()
