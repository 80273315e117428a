"""Evaluation (Section 4.1): EM, F1, peak context, dependency and seconds on Q2, Q8 and Q16.

    EM, F1       summed over the questions of a task; by SQuAD's definition, HotpotQA's, or MEM1's
    peak         the most tokens that one call reads and writes: max_t |z_t| + |a_t|
    dependency   sum over generated segments s of |s| (|p_s| + floor(|s| / 2)), p_s = z_t
    seconds      wall-clock time of the batched rollout, divided by the number of tasks

All are means over tasks. In peak and dependency q counts here, as in the cost of a call (the paper
does not say); --without_q leaves it out, as MEM1 does.

    python eval.py RUN                   # warm start, student and teacher of a run of train.py
    python eval.py MODEL --questions FILE --corpus INDEX --horizons 2 8 --records FOLDER
    python eval.py MODEL --questions FILE --corpus INDEX --keep_correct OUT.jsonl     # data for SFT
"""

import argparse
import json
import os
import time

from pathlib import Path
from statistics import mean

import torch

from env import RULES, STOP, SearchEnv, compose, load_questions, open_retriever, toy_envs
from rollout import Trajectory, generate, load, read_lines, rollout, stop_on, task_generators
from rollout import update_rules

METRICS = ("em", "f1", "peak", "dependency", "seconds")


def evaluate(
    model, tokenizer, envs: list[SearchEnv], update="mem1", max_new_tokens=128, max_len=640,
    batch_size=256, progress=None, temperature=0.0, seed=0, scores="squad", with_q=True,
    records=None, keep_correct=None,
) -> tuple[dict[str, float], list[Trajectory]]:  # fmt: skip
    """Roll out all environments, batch_size at a time: the means of METRICS, and the trajectories.
    records: a JSONL file with a line per task; tasks in it are not run again. keep_correct: a JSONL
    file to add the text of every episode with all answers right to, for SFT."""
    rule = update_rules(tokenizer)[update]
    stop = stop_on(tokenizer, STOP)
    done, trajectories = read_records(records), []
    todo = [env for env in envs if env.task.id not in done]
    for i in range(0, len(todo), batch_size):
        batch = todo[i : i + batch_size]
        start = time.perf_counter()
        noise = task_generators(seed, 0, [env.task.id for env in batch])

        def sample(prompts, rows):
            generators = [noise[row] for row in rows]
            return generate(model, prompts, max_new_tokens, temperature, stop, generators)

        new = rollout(sample, tokenizer, batch, rule, max_len - max_new_tokens, progress)
        seconds = (time.perf_counter() - start) / len(batch)
        right, lines = [], []
        for env, trajectory in zip(batch, new):
            em, f1 = env.score(scores)
            line = {"task": env.task.id, "em": em, "f1": f1, "peak": peak(trajectory, with_q)}
            line |= {"dependency": dependency(trajectory, with_q), "seconds": seconds}
            line |= {"calls": len(trajectory.calls), "answers": env.answers}
            done[env.task.id] = line
            lines.append(line)
            if env.score()[0] == len(env.task.questions):  # a right answer ends a valid episode
                right.append(as_text(env, trajectory, tokenizer))
        append(keep_correct, right)  # before the records, which say that a task is done
        append(records, lines)
        trajectories += new
    means = {}
    for name in METRICS:
        means[name] = mean(done[env.task.id][name] for env in envs)
    return means, trajectories


def peak(trajectory, with_q=True):
    """The longest call, in tokens."""
    q = 0 if with_q else trajectory.prefix_len
    return max(len(call.prompt_ids) - q + len(call.action_ids) for call in trajectory.calls)


def dependency(trajectory, with_q=True):
    """How many earlier tokens the generated ones depend on, in all."""
    q = 0 if with_q else trajectory.prefix_len
    total = 0
    for call in trajectory.calls:
        n = len(call.action_ids)
        total += n * (len(call.prompt_ids) - q + n // 2)
    return total


def markdown(columns, rows):
    """The lines of a Markdown table, each as soon as its row is known."""
    columns = list(columns)
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def table(rows):
    """Lines in the layout of Tables 1 and 2, from (set, model, metrics)."""
    forms = {"em": ".3f", "f1": ".3f", "peak": ".0f", "dependency": ".0f", "seconds": ".3f"}

    def cells():
        for name, model, metrics in rows:
            yield name, model, *(format(metrics[m], form) for m, form in forms.items())

    return markdown(["set", "model", "EM", "F1", "peak", "dependency", "s / task"], cells())


def as_text(env, trajectory, tokenizer):
    """An episode without token ids: those of one tokenizer mean nothing to another."""
    turns = []
    for call in trajectory.calls:
        response = tokenizer.decode(call.action_ids, skip_special_tokens=True)
        observation = tokenizer.decode(call.observation_ids)
        turns.append({"response": response, "observation": observation})
    return {"task": env.task.id, "prompt": env.prompt(), "turns": turns}


def append(path, lines):
    """Add JSON lines to a file; each batch is on disk before the next begins."""
    if path is None:
        return
    drop_cut_line(path)
    with open(path, "a", encoding="utf-8") as f:
        for line in lines:
            f.write(json.dumps(line) + "\n")


def drop_cut_line(path):
    """Remove a last line that a crash cut off, or the next one would be glued to it."""
    if os.path.exists(path):
        data = Path(path).read_bytes()
        os.truncate(path, data.rfind(b"\n") + 1)


def read_records(path):
    """{task: record} of a records file, {} where there is none. A last line that a crash cut off is
    removed from the file; other damage is a ValueError naming the line."""
    if path is None or not os.path.exists(path):
        return {}
    drop_cut_line(path)

    def read(record):
        return record["task"], {**record, **{name: float(record[name]) for name in METRICS}}

    return dict(read_lines(path, read, "not a record of eval.py"))


def same_settings(folder, ours):
    """Write the settings to the folder; ValueError names one that differs from what is there."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "settings.json"
    if not file.exists():
        file.write_text(json.dumps(ours, indent=1) + "\n")
    theirs = json.loads(file.read_text())
    for name, value in ours.items():
        if value != theirs.get(name):
            problem = f"holds records with {name} {theirs.get(name)!r}, not {value!r}"
            raise ValueError(f"{folder} {problem}; choose another folder")
    return folder


def parse(argv=None):
    """The command line, checked."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    add = parser.add_argument
    add("model", help="a run folder of train.py, a model folder, or a hub name")
    add("--questions", nargs="+", help="files of questions (env.load_questions); default: the toy")
    add("--corpus", help="an index of env.py, a JSONL of passages, or a retrieval server's URL")
    add("--horizons", type=int, nargs="+", default=[2, 8, 16], help="questions per task")
    add("--n", type=int, default=640, help="held-out questions per horizon (Q2: 320 tasks)")
    add("--update", choices=list(update_rules(None)), default="mem1", help="the rule U of Eq. 1")
    add("--temperature", type=float, default=0.0, help="of sampling; 0 is greedy")
    add("--scores", choices=RULES, default="squad", help="whose definition of EM and F1")
    add("--without_q", action="store_true", help="leave q out of peak and dependency, as MEM1 does")
    add("--max_new_tokens", type=int, default=128, help="tokens of a response at most")
    add("--max_len", type=int, default=640, help="tokens of a call at most")
    add("--max_obs", type=int, default=1000, help="tokens of an observation, in whole passages")
    add("--top_k", type=int, help="passages of a search (default: 2 for the toy, else 3)")
    add("--batch_size", type=int, default=256, help="tasks that run at once")
    add("--records", type=Path, help="folder for a line per task; what it holds is not run again")
    add("--keep_correct", type=Path, help="JSONL to add right episodes to, as text, for SFT")
    add("--seed", type=int, default=0, help="random seed of the question order and of sampling")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    counts = [*args.horizons, args.n, args.batch_size, args.max_new_tokens, args.max_obs]
    if args.top_k is not None:
        counts.append(args.top_k)
    if min(counts) < 1:
        parser.error("--horizons, --n, --batch_size and all limits must be positive")
    if args.max_len <= args.max_new_tokens:
        parser.error("--max_len must leave room for a prompt next to --max_new_tokens")
    if bool(args.questions) != bool(args.corpus):
        parser.error("--questions and --corpus go together")
    return args


def evaluate_all(args):
    """(set, model, metrics) of what the command asks for, one model on one horizon at a time."""
    run = Path(args.model)
    questions = []
    models = {}
    for name in ("warm_start", "student", "teacher"):
        if (run / name).is_dir():
            models[name] = str(run / name)
    models = models or {run.name: args.model}
    for path in args.questions or []:
        questions += load_questions(path)
    retriever = open_retriever(args.corpus) if args.corpus else None
    for k in args.horizons:
        n = max(1, args.n // k)
        for name, path in models.items():
            tokenizer, model = load(path, args.device)
            settings = {"length": lambda text: len(tokenizer.encode(text)), "budget": args.max_obs}
            if questions:
                settings["top_k"] = args.top_k or 3
                tasks = compose(questions, k, args.seed)[:n]
                envs = [SearchEnv(task, retriever, **settings) for task in tasks]
            else:
                envs = toy_envs("test", n, k, top_k=args.top_k or 2, **settings)
            records = None
            if args.records:
                folder = args.records / name if len(models) > 1 else args.records
                free = ("horizons", "n", "batch_size", "records", "keep_correct", "device")
                ours = {flag: value for flag, value in vars(args).items() if flag not in free}
                ours["model"] = os.path.abspath(path)
                records = same_settings(folder, ours) / f"Q{k}.jsonl"
            metrics, _ = evaluate(
                model, tokenizer, envs, args.update, args.max_new_tokens, args.max_len,
                args.batch_size, f"Q{k}, {name}", args.temperature, args.seed, args.scores,
                not args.without_q, records, args.keep_correct,
            )  # fmt: skip
            yield f"Q{k}", name, metrics


def main():
    try:
        for line in table(evaluate_all(parse())):
            print(line, flush=True)
    except (ValueError, OSError) as error:
        raise SystemExit(f"eval.py: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit("\ninterrupted; the same command with --records resumes") from None


if __name__ == "__main__":
    main()
