"""Evaluation (Section 4.1): EM, F1, peak context, dependency and seconds on Q2, Q8 and Q16.

    EM, F1       summed over the questions of a task; by SQuAD's definition, HotpotQA's, or MEM1's
    peak         the most tokens that one call reads and writes: max_t |z_t| + |a_t|
    dependency   sum over generated segments s of |s| (|p_s| + floor(|s| / 2)), p_s = z_t
    seconds      wall-clock time of the batched rollout, divided by the number of tasks

All are means over tasks. In peak and dependency q counts here, as in the cost of a call (the paper
does not say); --without_q leaves it out, as MEM1 does.

    python eval.py RUN    # warm start, student, teacher of a run of train.py, under its settings
    python eval.py MODEL --questions FILE --corpus INDEX --horizons 2 8 --records FOLDER
    python eval.py MODEL --questions FILE --corpus INDEX --keep_correct OUT.jsonl     # data for SFT
"""

import argparse
import hashlib
import json
import os
import sys
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from statistics import mean

import torch
from tqdm import tqdm

from env import RULES, SearchEnv, compose, load_questions, open_retriever, toy_envs
from rollout import Environment, Trajectory, check_environment, command, encode_prompt, encode_text
from rollout import end_ids, generate, load, max_positions, read_lines, rollout, stop_on
from rollout import task_generators, update_rule, update_rules, without_end

COSTS = ("peak", "dependency", "seconds")


def evaluate(
    model, tokenizer, envs: list[Environment], update="mem1", max_new_tokens=128, max_len=640,
    batch_size=256, progress=None, temperature=0.0, seed=0, with_q=True, records=None,
    keep_correct=None,
) -> tuple[dict[str, float], list[Trajectory | None]]:  # fmt: skip
    """Roll out all environments, batch_size at a time: the means of their scores and of COSTS, and
    the trajectories, None for a task that was too long: only the scores count it. update: a rule or
    its name. records: a JSONL file with a line per task; tasks in it are not run again.
    keep_correct: a JSONL file to add the text of every episode with the score `solved` to, for
    SFT."""
    if not envs:
        raise ValueError("evaluate needs at least one environment: the task list is empty")
    for env in envs:
        check_environment(env, "score")
    rule = update_rule(update, tokenizer)
    names, scores = task_names(envs), list(envs[0].score())
    ends = end_ids(tokenizer, model)
    stop = stop_on(tokenizer, getattr(envs[0], "stop", ()), ends)
    for path in (keep_correct, records):  # that they can be written is known before the first call
        append(path, [])
    done = read_records(records, scores)
    kept = read_lines(keep_correct, name_of_episode, "not an episode", grows=True)
    asked = [digest(env.prompt()) for env in envs]
    for name, digest_now in zip(names, asked):
        if name in done and done[name].get("asked", digest_now) != digest_now:
            raise ValueError(f"{records}: its task {name} asks something else; take another file")
    todo = [i for i, name in enumerate(names) if name not in done]
    trajectories = []
    for i in range(0, len(todo), batch_size):
        places = todo[i : i + batch_size]
        batch = [envs[place] for place in places]
        start = time.perf_counter()
        noise = task_generators(seed, 0, places)

        def sample(prompts, rows):
            generators = [noise[row] for row in rows]
            return generate(model, prompts, max_new_tokens, temperature, stop, generators)

        longest = min(max_len, max_positions(model)) - max_new_tokens
        new = rollout(sample, tokenizer, batch, rule, longest, progress, ends, show_rejected)
        seconds = (time.perf_counter() - start) / len(batch)
        right, lines = [], []
        for place, env, trajectory in zip(places, batch, new):
            line = {"task": names[place], "asked": asked[place], **env.score()}
            line |= {"peak": 0.0, "dependency": 0.0, "seconds": seconds, "calls": 0, "said": ""}
            if trajectory is not None:
                last = without_end(trajectory.calls[-1].action_ids, ends)
                line["peak"] = peak(trajectory, with_q)
                line["dependency"] = dependency(trajectory, with_q)
                line["calls"] = len(trajectory.calls)
                line["said"] = tokenizer.decode(last)
            done[names[place]] = line
            lines.append(line)
            if trajectory is not None and line.get("solved"):
                episode = as_text(env, trajectory, tokenizer, ends)
                episode["task"] = names[place]
                if name_of_episode(episode) not in kept:
                    right.append(episode)
        append(keep_correct, right)  # before the records, which say that a task is done
        append(records, lines)
        trajectories += new
    means = {}
    for name in (*scores, *COSTS):
        lines = [done[task] for task in names]
        if name in COSTS:
            lines = [line for line in lines if line.get("calls", 1)]
        means[name] = mean(line[name] for line in lines) if lines else 0.0
    return means, trajectories


def task_names(envs):
    """What each task is called in files: its id, and from the second time on which time it is."""
    names, times = [], Counter()
    for env in envs:
        name = env.task.id
        times[name] += 1
        names.append(name if times[name] == 1 else f"{name} #{times[name]}")
    return names


def digest(prompt):
    """A short name for what a task asks."""
    return hashlib.sha256(prompt.encode()).hexdigest()[:8]


def name_of_episode(episode):
    """What tells an episode of --keep_correct from others."""
    return episode["task"], episode["prompt"]


def show_rejected(why):
    """Say on stderr which task was left out."""
    tqdm.write(f"rejected: {why}", file=sys.stderr)


def check_room(tokenizer, envs, max_new_tokens, max_obs, max_len):
    """Raise ValueError where not even the shortest q fits into max_len with a response, its
    observation and the next response: the second call of every task would be rejected."""
    q = min(len(encode_prompt(tokenizer, env.prompt())) for env in envs)
    if q + 2 * max_new_tokens + max_obs > max_len:
        parts = f"q of {q} tokens, two responses of {max_new_tokens}, an observation of {max_obs}"
        raise ValueError(f"{parts}: they do not fit into --max_len {max_len}")


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
    """Lines in the layout of Tables 1 and 2, from (set, model, metrics), each as soon as its row is
    known."""
    titles = {"em": "EM", "f1": "F1", "seconds": "s / task"}
    forms = {"peak": ".0f", "dependency": ".0f"}
    for i, (name, model, metrics) in enumerate(rows):
        cells = [format(x, forms.get(metric, ".3f")) for metric, x in metrics.items()]
        columns = [titles.get(metric, metric) for metric in metrics]
        lines = markdown(["set", "model", *columns], [[name, model, *cells]])
        yield from islice(lines, 2 if i else 0, None)  # one header for all


def as_text(env, trajectory, tokenizer, ends=None):
    """An episode without token ids: those of one tokenizer mean nothing to another."""
    turns = []
    for call in trajectory.calls:
        words = without_end(call.action_ids, ends or end_ids(tokenizer))
        observation = tokenizer.decode(call.observation_ids)
        turn = {"response": tokenizer.decode(words), "observation": observation}
        ended = words != call.action_ids  # by a token, which another tokenizer has, too
        turns.append(turn | ({"ended": True} if ended else {}))
    return {"task": env.task.id, "prompt": env.prompt(), "turns": turns}


def append(path, lines):
    """Add JSON lines to a file; each batch is on disk before the next begins. A last line that a
    crash cut off goes first, or the next one would be glued to it."""
    if path is None:
        return
    with open(path, "a+b") as f:
        f.seek(0)
        last = f.read().rpartition(b"\n")[2]
        try:
            ending = b"\n" if last and json.loads(last) else b""
        except ValueError:
            ending = b""
            f.truncate(f.tell() - len(last))
        f.write(ending + "".join(json.dumps(line) + "\n" for line in lines).encode())


def read_records(path, scores=("em", "f1")):
    """{task: record} of a records file, {} where there is none. A last line that a crash cut off is
    passed over; other damage is a ValueError naming the line."""

    def read(record):
        numbers = {name: float(record[name]) for name in (*scores, *COSTS)}
        return record["task"], record | numbers

    return dict(read_lines(path, read, "not a record of eval.py", grows=True))


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
    add("--max_obs", type=int, default=128, help="tokens of an observation, in whole passages")
    add("--top_k", type=int, help="passages of a search (default: 2 for the toy, else 3)")
    add("--batch_size", type=int, default=256, help="tasks that run at once")
    add("--records", type=Path, help="folder for a line per task; what it holds is not run again")
    add("--keep_correct", type=Path, help="JSONL for right episodes, as text; records beside it")
    add("--seed", type=int, default=0, help="random seed of the question order and of sampling")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    named, _ = parser.parse_known_args(argv)
    parser.set_defaults(**settings_of_run(named.model))
    args = parser.parse_args(argv)
    counts = [*args.horizons, args.n, args.batch_size, args.max_new_tokens, args.max_obs]
    if args.top_k is not None:
        counts.append(args.top_k)
    if min(counts) < 1:
        parser.error("--horizons, --n, --batch_size and all limits must be positive")
    if not 0 <= args.temperature < float("inf"):
        parser.error("--temperature must be a number, at least 0")
    if args.max_len <= args.max_new_tokens:
        parser.error("--max_len must leave room for a prompt next to --max_new_tokens")
    if bool(args.questions) != bool(args.corpus):
        parser.error("--questions and --corpus go together")
    if args.keep_correct:
        args.records = args.records or Path(f"{args.keep_correct}.records")
    return args


def settings_of_run(model):
    """What a run of train.py was trained with: the defaults here; {} for any other folder or name.
    Raises ValueError for a run on tasks or with a rule of a script, which only the script has."""
    file = Path(model) / "config.json"
    try:
        saved = json.loads(file.read_text()) if file.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}): name a model folder in it") from None
    if "run_dir" not in saved:  # the config of a model
        return {}
    if saved.get("own_tasks") or saved["update"] not in update_rules(None):
        raise ValueError(f"{model} has tasks or a memory rule of a script: see its table.md")
    names = ["update", "max_new_tokens", "max_len", "max_obs", "top_k"]
    if saved["test_questions"]:
        saved["questions"] = saved["test_questions"]
        names += ["questions", "corpus"]
    return {name: saved[name] for name in names}


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

    def envs_of(k, n, tokenizer):
        settings = {"budget": args.max_obs}
        settings["top_k"] = args.top_k or (3 if questions else 2)
        settings["length"] = lambda text: len(encode_text(tokenizer, text))
        settings["scores"] = args.scores
        if not questions:
            return toy_envs("test", n, k, **settings)
        tasks = compose(questions, k, args.seed)[:n]
        return [SearchEnv(task, retriever, **settings) for task in tasks]

    for k in args.horizons:
        for name, path in models.items():
            tokenizer, model = load(path, args.device)
            if max_positions(model) < args.max_len:
                show_rejected(f"calls of {name} beyond its {max_positions(model)} positions")
            for other in args.horizons:  # what cannot be is known before the first line
                some = envs_of(other, 8, tokenizer)
                check_room(tokenizer, some, args.max_new_tokens, args.max_obs, args.max_len)
            envs = envs_of(k, max(1, args.n // k), tokenizer)
            records = None
            if args.records:
                folder = args.records / name if len(models) > 1 else args.records
                free = ("horizons", "n", "batch_size", "records", "keep_correct", "device")
                ours = {flag: value for flag, value in vars(args).items() if flag not in free}
                ours["model"] = os.path.abspath(path) if os.path.exists(path) else path
                records = same_settings(folder, ours) / f"Q{k}.jsonl"
            metrics, _ = evaluate(
                model, tokenizer, envs, args.update, args.max_new_tokens, args.max_len,
                args.batch_size, f"Q{k}, {name}", args.temperature, args.seed,
                not args.without_q, records, args.keep_correct,
            )  # fmt: skip
            yield f"Q{k}", name, metrics


@command("eval.py", "; the same command with --records resumes")
def main():
    for line in table(evaluate_all(parse())):
        print(line, flush=True)


if __name__ == "__main__":
    main()
