"""Evaluation (Section 4.1): EM, F1, peak context, dependency and seconds on Q2, Q8 and Q16, in the columns of Table 1.

    EM, F1       summed over the questions of a task, mean over tasks
    peak         the most tokens that one call reads and writes: max_t |z_t| + |a_t|, mean over tasks
    dependency   sum over generated segments s of |s| (|p_s| + floor(|s| / 2)), p_s = z_t; mean over tasks
    seconds      wall-clock time of the batched rollout, divided by the number of tasks

    python eval.py RUN                            # warm start, student and teacher of a run of train.py
    python eval.py RUN/student --horizons 2 4     # any model folder or hub name
"""
import argparse
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from env import STOP, SearchEnv, step_all, toy_envs
from rollout import Trajectory, generate, load, rollout, stop_on, update_rules


def peak(trajectory: Trajectory) -> int:
    """The longest call, in tokens."""
    return max(len(call.prompt_ids) + len(call.action_ids) for call in trajectory.calls)


def dependency(trajectory: Trajectory) -> int:
    """How many earlier tokens the generated ones depend on, in all."""
    return sum(len(c.action_ids) * (len(c.prompt_ids) + len(c.action_ids) // 2) for c in trajectory.calls)


def evaluate(model, tokenizer, envs: list[SearchEnv], update: str = "mem1", max_new_tokens: int = 128,
             max_len: int = 640, batch_size: int = 256, progress: str | None = None
             ) -> tuple[dict[str, float], list[Trajectory]]:
    """Greedy rollouts of all environments, batch_size at a time: the metrics above, and the trajectories."""
    rule, stop = update_rules(tokenizer)[update], stop_on(tokenizer, STOP)

    def sample(prompts, rows):
        return generate(model, prompts, max_new_tokens, temperature=0, stop=stop)

    trajectories, start, n = [], time.perf_counter(), len(envs)
    for i in range(0, n, batch_size):
        batch = envs[i:i + batch_size]
        trajectories += rollout(sample, tokenizer, batch, step_all, rule, max_len - max_new_tokens, progress)
    seconds, scores = time.perf_counter() - start, [env.score() for env in envs]
    return {"em": sum(em for em, _ in scores) / n, "f1": sum(f1 for _, f1 in scores) / n,
            "peak": sum(map(peak, trajectories)) / n, "dependency": sum(map(dependency, trajectories)) / n,
            "seconds": seconds / n}, trajectories


def table(rows: Iterable[tuple[str, str, dict[str, float]]]) -> Iterator[str]:
    """The lines of a Markdown table, as soon as each (set, model, metrics) is known."""
    yield from ("| set | model | EM | F1 | peak | dependency | s / task |", "|---|---|---|---|---|---|---|")
    for name, model, m in rows:
        yield (f"| {name} | {model} | {m['em']:.3f} | {m['f1']:.3f} | {m['peak']:.0f} | {m['dependency']:.0f} "
               f"| {m['seconds']:.3f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a run folder of train.py, a model folder, or a hub name")
    parser.add_argument("--horizons", type=int, nargs="+", default=[2, 8, 16], help="questions per task")
    parser.add_argument("--questions", type=int, default=640, help="held-out questions per horizon (Q2: 320 tasks)")
    parser.add_argument("--update", choices=list(update_rules(None)), default="mem1", help="the update rule U of Eq. 1")
    parser.add_argument("--max_new_tokens", type=int, default=128, help="tokens of a response at most")
    parser.add_argument("--max_len", type=int, default=640, help="tokens of a call at most")
    parser.add_argument("--batch_size", type=int, default=256, help="episodes that advance together")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if min(args.horizons) < 1 or args.questions < 1:
        parser.error("--horizons and --questions must be positive")
    try:
        for line in table(rows(args)):
            print(line, flush=True)
    except ValueError as error:
        raise SystemExit(f"eval.py: {error}") from None


def rows(args) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Evaluate what the command asks for, one model on one horizon at a time."""
    run = Path(args.model)
    models = {name: str(run / name) for name in ("warm_start", "student", "teacher") if (run / name).is_dir()}
    models = models or {run.name: args.model}
    for k in args.horizons:
        for name, path in models.items():
            tokenizer, model = load(path, args.device)
            envs = toy_envs("test", max(1, args.questions // k), k)
            metrics, _ = evaluate(model, tokenizer, envs, args.update, args.max_new_tokens, args.max_len,
                                  args.batch_size, progress=f"Q{k}, {name}")
            yield f"Q{k}", name, metrics


if __name__ == "__main__":
    main()
