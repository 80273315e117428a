"""Metrics by hand, and the command."""

import os
import subprocess
import sys

import eval as eval_file
from env import ToyWiki, toy_envs
from eval import dependency, evaluate, peak, table
from rollout import Call, Trajectory
from test_rce import TOKENIZER
from tiny import tiny


def test_peak_and_dependency_by_hand():
    """Two calls, |z| = 3 and 6, |a| = 2 and 5: peak 11; dependency 2 (3 + 1) + 5 (6 + 2) = 48. Would catch a
    history where a compact context stood, and a prefix that leaves out q."""
    call = lambda z, a: Call([1] * z, [2] * a, [0.0] * a, [])
    trajectory = Trajectory("t", 3, [call(3, 2), call(6, 5)])
    assert peak(trajectory) == 11 and dependency(trajectory) == 48


def test_evaluate_sums_over_questions_and_means_over_tasks(monkeypatch):
    """The expert in the model's place scores k of k on every task; one that answers only the first question
    of two scores 1."""
    import rollout

    for k, respond, expected in (
        (2, ToyWiki.expert, 2.0),
        (2, lambda env: f"<answer> {env.task.answers[0][0]} </answer>", 1.0),
    ):
        envs = toy_envs("test", 10, k)
        monkeypatch.setattr(
            eval_file,
            "rollout",
            lambda sample, tokenizer, part, *rest: rollout.rollout(
                rollout.scripted(respond, tokenizer, part), tokenizer, part, *rest
            ),
        )
        metrics, trajectories = evaluate(tiny(), TOKENIZER, envs, max_len=10_000, batch_size=4)
        assert metrics["em"] == metrics["f1"] == expected and [t.task_id for t in trajectories] == [
            e.task.id for e in envs
        ]
        assert metrics["peak"] == sum(map(peak, trajectories)) / 10 and metrics["seconds"] > 0


def test_batches_do_not_change_scores():
    model = tiny(vocab_size=len(TOKENIZER))
    results = [
        evaluate(model, TOKENIZER, toy_envs("test", 5, 1), max_new_tokens=8, max_len=5000, batch_size=b)
        for b in (2, 5)
    ]
    assert results[0][1] == results[1][1] or [[c.action_ids for c in t.calls] for t in results[0][1]] == [
        [c.action_ids for c in t.calls] for t in results[1][1]
    ]


def test_table_is_markdown():
    """One column a metric; and each row comes as soon as it is known."""
    metrics = dict(em=1.5, f1=1.625, peak=200.4, dependency=12345.4, seconds=0.5)
    header, rule, row = table([("Q2", "student", metrics)])
    assert row == "| Q2 | student | 1.500 | 1.625 | 200 | 12345 | 0.500 |"
    assert header.count("|") == rule.count("|") == row.count("|")
    endless = table(("Q2", "student", metrics) for _ in iter(int, 1))
    assert [next(endless) for _ in range(4)][3] == row


def test_command(runs):
    folder, _ = runs
    run = lambda *args: subprocess.run(
        [sys.executable, eval_file.__file__, *args],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    out = run("a", "--questions", "3", "--horizons", "1", "--max_new_tokens", "16")
    assert out.returncode == 0 and [line.split("|")[2].strip() for line in out.stdout.splitlines()[2:]] == [
        "warm_start",
        "student",
        "teacher",
    ]
    out = run("a/student", "--questions", "3", "--horizons", "1", "2", "--max_new_tokens", "16")
    assert out.returncode == 0 and out.stdout.count("| student |") == 2
    out = run("a/nothing")
    assert (
        out.returncode == 1
        and "a/nothing: no model and tokenizer" in out.stderr
        and "Traceback" not in out.stderr
    )
    out = run("a", "--horizons", "0")
    assert out.returncode == 2 and "--horizons" in out.stderr
