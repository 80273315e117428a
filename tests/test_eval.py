"""Metrics by hand, and the command."""

import json
import os
import shutil
import subprocess
import sys

import pytest

import eval as eval_file
from env import ToyWiki, toy_envs
from conftest import FAST
from eval import compare, dependency, evaluate, mechanism, paired, peak, table, table1
from rollout import Call, Trajectory
from test_rce import TOKENIZER
from tiny import tiny


def test_peak_and_dependency_by_hand():
    """Two calls, |z| = 3 and 6, |a| = 2 and 5: peak 11; dependency 2 (3 + 1) + 5 (6 + 2) = 48. Would catch a
    history where a compact context stood, and a prefix that leaves out q."""
    call = lambda z, a: Call([1] * z, [2] * a, [0.0] * a, [])
    trajectory = Trajectory("t", 3, [call(3, 2), call(6, 5)])
    assert peak(trajectory) == 11 and dependency(trajectory) == 48
    # without q, as MEM1 counts: 8; 2 (0 + 1) + 5 (3 + 2) = 27
    assert peak(trajectory, with_q=False) == 8 and dependency(trajectory, with_q=False) == 27


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


def expert_sample(monkeypatch, calls):
    """The expert in the place of the model; counts the tasks that it is asked for."""
    import rollout

    def run(sample, tokenizer, part, *rest):
        calls.extend(env.task.id for env in part)
        return rollout.rollout(rollout.scripted(ToyWiki.expert, tokenizer, part), tokenizer, part, *rest)

    monkeypatch.setattr(eval_file, "rollout", run)


def test_a_crashed_evaluation_goes_on_where_it_was(tmp_path, monkeypatch):
    """Three batches of two; the file is cut in the middle of its fourth line. The three whole tasks are not run again,
    and the means are those of an uninterrupted run."""
    calls, records = [], tmp_path / "Q2.jsonl"
    expert_sample(monkeypatch, calls)
    run = lambda: evaluate(
        None, TOKENIZER, toy_envs("test", 6, 2), max_len=10_000, batch_size=2, records=records
    )
    first, _ = run()
    lines = records.read_bytes().splitlines(keepends=True)
    assert len(lines) == 6 and calls == [env.task.id for env in toy_envs("test", 6, 2)]
    records.write_bytes(b"".join(lines[:3]) + lines[3][:20])
    calls.clear()
    again, trajectories = run()
    assert calls == [env.task.id for env in toy_envs("test", 6, 2)][3:] and len(trajectories) == 3
    assert {k: v for k, v in again.items() if k != "seconds"} == {
        k: v for k, v in first.items() if k != "seconds"
    }
    assert len(records.read_bytes().splitlines()) == 6
    records.write_bytes(b'{"task": "x"}\n')
    with pytest.raises(ValueError, match="Q2.jsonl, line 1: not a record"):
        run()


def test_right_episodes_are_kept_as_text(tmp_path, monkeypatch):
    """Only those with every answer right; each turn as the environment saw it, no token ids."""
    import rollout

    out = tmp_path / "kept.jsonl"
    envs = toy_envs("test", 4, 2)
    wrong = envs[2]
    half = f"<answer> {wrong.task.answers[0][0]} ; nothing </answer>"
    respond = lambda env: half if env is wrong else ToyWiki.expert(env)
    monkeypatch.setattr(
        eval_file,
        "rollout",
        lambda sample, tokenizer, part, *rest: rollout.rollout(
            rollout.scripted(respond, tokenizer, part), tokenizer, part, *rest
        ),
    )
    out.write_text('{"task": "cut off by a cra')
    evaluate(None, TOKENIZER, envs, max_len=10_000, keep_correct=out)
    kept = [json.loads(line) for line in out.read_text().splitlines()]
    assert [k["task"] for k in kept] == [e.task.id for e in envs if e is not wrong]
    replayed = toy_envs("test", 4, 2)[0]
    assert kept[0]["prompt"] == replayed.prompt()
    for turn in kept[0]["turns"]:
        assert turn == {"response": turn["response"], "observation": replayed.step(turn["response"])[0]}
    assert replayed.score() == (2, 2)


def test_compare_by_hand(tmp_path):
    """F1 of two seeds 1 and 2 against 3 and 5: 1.5 ± 0.707, 4 ± 1.414, +166.7 %; sets by their horizon."""
    for folder, f1 in (("a0", 1), ("a1", 2), ("b0", 3), ("b1", 5)):
        (tmp_path / folder).mkdir()
        for k in (2, 16):
            record = dict(em=1, f1=f1, peak=10, dependency=20, seconds=0.5)
            (tmp_path / folder / f"Q{k}.jsonl").write_text(
                "".join(
                    json.dumps({"task": str(i), **record, "f1": f1 + d}) + "\n" for i, d in enumerate((-1, 1))
                )
            )
    (tmp_path / "a0" / "kept.jsonl").write_text("no record\n")  # what --keep_correct may have left there
    groups = {"A": [tmp_path / "a0", tmp_path / "a1"], "B": [tmp_path / "b0", tmp_path / "b1"]}
    _, _, *rows = compare(groups)
    assert [row.split(" | ")[:2] for row in rows] == [
        ["| Q2", "A"],
        ["| Q2", "B"],
        ["| Q16", "A"],
        ["| Q16", "B"],
    ]
    assert rows[1] == "| Q2 | B | 2 | 1.000 ± 0.000 | 4.000 ± 1.414 | +166.7% | 10 | 20 | 0.500 |"
    assert "1.500 ± 0.707 | +0.0%" in rows[0]
    (tmp_path / "b1" / "Q16.jsonl").unlink()
    with pytest.raises(ValueError, match="b1: its sets are"):
        list(compare(groups))


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
    out = run("a", "--n", "3", "--horizons", "1", "--max_new_tokens", "16")
    assert out.returncode == 0 and [line.split("|")[2].strip() for line in out.stdout.splitlines()[2:]] == [
        "warm_start",
        "student",
        "teacher",
    ]
    out = run("a/student", "--n", "3", "--horizons", "1", "2", "--max_new_tokens", "16")
    assert out.returncode == 0 and out.stdout.count("| student |") == 2
    out = run("a/nothing")
    assert (
        out.returncode == 1
        and "a/nothing: no model and tokenizer" in out.stderr
        and "Traceback" not in out.stderr
    )
    out = run("a", "--horizons", "0")
    assert out.returncode == 2 and "--horizons" in out.stderr


def test_command_on_files(runs, tmp_path):
    """Questions and passages of files; records that continue, and are not mixed with those of other settings."""
    folder, _ = runs
    world = ToyWiki(0)
    questions = [
        {"id": str(i), "question": q, "golden_answers": [a[0]]}
        for i, task in enumerate(world.tasks(6, 1))
        for q, a in zip(task.questions, task.answers)
    ]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
    (tmp_path / "c.jsonl").write_text(
        "".join(json.dumps({"contents": f"{p.title}\n{p.text}"}) + "\n" for p in world.passages)
    )
    files = ["--questions", str(tmp_path / "q.jsonl"), "--corpus", str(tmp_path / "c.jsonl")]
    args = [
        "a/student",
        *files,
        "--horizons",
        "1",
        "2",
        "--max_new_tokens",
        "8",
        "--records",
        str(tmp_path / "r"),
    ]
    run = lambda *extra: subprocess.run(
        [sys.executable, eval_file.__file__, *args, *extra], capture_output=True, text=True, cwd=folder
    )
    out = run()
    assert out.returncode == 0 and out.stdout.count("| student |") == 2, out.stderr
    assert [len((tmp_path / "r" / f"Q{k}.jsonl").read_text().splitlines()) for k in (1, 2)] == [6, 3]
    again = run()
    assert again.stdout == out.stdout  # the seconds too: nothing was run again
    other = run("--scores", "mem1")
    assert other.returncode == 1 and "holds records with scores 'squad', not 'mem1'" in other.stderr
    compared = subprocess.run(
        [sys.executable, eval_file.__file__, "compare", f"x={tmp_path / 'r'}"], capture_output=True, text=True
    )
    assert compared.returncode == 0 and compared.stdout.count("| x | 1 |") == 2, compared.stderr
    wrong = subprocess.run(
        [sys.executable, eval_file.__file__, "compare", "x"], capture_output=True, text=True
    )
    assert wrong.returncode == 1 and "NAME=FOLDER" in wrong.stderr


def invented(**f1):
    """Results of models on Q2 and Q8, a number a seed for each."""
    sets = lambda x: {
        k: {"em": x - 0.1, "f1": x * scale, "peak": 9, "dependency": 8, "seconds": 0.5}
        for k, scale in (("Q2", 1), ("Q8", 2))
    }
    curves = {name: [1.0, 2.0, 1.5] for name in eval_file.CURVES}
    return {
        name.replace("_", " "): [{"sets": sets(x), "curves": curves} for x in values]
        for name, values in f1.items()
    }


def test_tables_of_the_study_by_hand():
    """Means, deviations, the changes seed by seed, and how many agree with the sign of their mean."""
    found = invented(warm_start=[1, 1], PPO=[1.2, 0.8], history=[1.1, 1.3], aligned=[1.5, 1.7])
    lines = list(table1({name: [r["sets"] for r in results] for name, results in found.items()}))
    assert "| Q2 | aligned | 2 | 1.500 ± 0.141 | 1.600 ± 0.141 | +60.0% | 9 | 8 | 0.500 |" in lines
    lines = list(eval_file.f1_table({name: [r["sets"] for r in results] for name, results in found.items()}))
    assert lines[0] == "| F1 | Q2 | Q8 |" and "| aligned | 1.600 ± 0.141 | 3.200 ± 0.283 |" in lines
    lines = list(paired(found, [4, 7]))
    assert "| set | F1 of | less that of | seed 4 | seed 7 | mean | agree |" in lines
    assert "| Q2 | aligned | PPO | +0.300 | +0.900 | +0.600 ± 0.424 | 2/2 |" in lines
    assert "| Q8 | history | PPO | -0.200 | +1.000 | +0.400 ± 0.849 | 1/2 |" in lines
    states = [{"call 2": {"tokens": n, "mean_kl": kl, "top1": 0.5}} for n, kl in ((10, 1.0), (20, 3.0))]
    states[1]["call 3"] = {"tokens": 5, "mean_kl": -1e-9, "top1": 1.0}  # not every seed has late calls
    assert list(mechanism(states))[-2:] == [
        "| call 2 | 15 | 2.000 ± 1.414 | 0.500 ± 0.000 |",
        "| call 3 | 5 | 0.000 | 1.000 |",
    ]


def test_study_refuses_before_any_run(tmp_path, monkeypatch, capsys):
    """A seed for all seeds, or a state for all variants, would be a wrong table; a damaged result is named."""
    monkeypatch.setattr(eval_file, "python", None)  # nothing is run
    ask = lambda *args: list(eval_file.study(["--folder", str(tmp_path / "s"), *args]))
    for flags in (["--seed", "3"], ["--seed=3"], ["--distill", "none"], ["--student", "x"]):
        with pytest.raises(SystemExit):
            ask(*flags)
        assert f"{flags[0].partition('=')[0]}: study sets this itself" in capsys.readouterr().err
    monkeypatch.setattr(eval_file, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs matplotlib"):
        ask("--figures", "f")
    assert not (tmp_path / "s").exists()
    (tmp_path / "s/seed-0").mkdir(parents=True)
    (tmp_path / "s/seed-0/warm_start.json").write_text("{")
    with pytest.raises(ValueError, match="warm_start.json: not a result"):
        ask("--seeds", "0")


def test_study(tmp_path):
    """One seed from nothing to the tables; then from its files alone, and with a second seed's; other settings, and a
    run that fails, are named."""

    def study(*args, folder="s"):
        command = [sys.executable, eval_file.__file__, "study", "--folder", folder, "--n", "4", *args]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    flags = [f for f in FAST if f not in ("--eval_questions", "4", "--horizons", "1,2")]
    args = ["--horizons", "1", "2", *flags]
    out = study("--seeds", "0", *args)
    assert out.returncode == 0, out.stderr
    assert "| Q2 | aligned | history |" in out.stdout and "| before the first memory update |" in out.stdout
    runs = {
        name: json.loads((tmp_path / f"s/seed-0/{name}/config.json").read_text())
        for name in ("PPO", "aligned")
    }
    changed = {name for name in runs["PPO"] if runs["PPO"][name] != runs["aligned"][name]}
    assert changed == {"distill", "run_dir"}
    result = json.loads((tmp_path / "s/seed-0/aligned.json").read_text())
    assert len(result["curves"]["reward"]) == 3 and set(result["sets"]) == {"Q1", "Q2"}
    sweep = study("--seeds", "0", "--start", "s", "--sweep", "distill_coef", "0.5", *args, folder="w")
    assert sweep.returncode == 0 and sweep.stdout.count("| distill_coef 0.5 |") == 1, sweep.stderr
    config = json.loads((tmp_path / "w/seed-0/distill_coef_0.5/config.json").read_text())
    assert config["distill_coef"] == 0.5 and config["student"] == "s/seed-0/start/warm_start"
    assert (
        not (tmp_path / "w/seed-0/start").exists() and (tmp_path / "w/seed-0/distill_coef_0.5.log").exists()
    )
    assert "takes a flag and values" in study("--sweep", "steps", folder="v").stderr
    for name in ("start", "PPO", "history", "aligned"):
        shutil.rmtree(tmp_path / "s/seed-0" / name)
    shutil.copytree(tmp_path / "s/seed-0", tmp_path / "s/seed-1")
    again = study("--seeds", "0", "1", *args)
    assert again.returncode == 0 and "| Q2 | aligned | 2 |" in again.stdout, again.stderr
    other = study("--seeds", "0", *args, "--actor_lr", "1")
    assert other.returncode == 1 and "choose another folder" in other.stderr
    (tmp_path / "s/settings.json").unlink()
    failed = study("--seeds", "5", "--horizons", "1", "--steps", "none")
    assert failed.returncode == 1 and "what it said is in s/seed-5/start.log" in failed.stderr
    assert "invalid int value" in (tmp_path / "s/seed-5/start.log").read_text()


def test_figures(tmp_path):
    """Two pictures, from numbers alone."""
    pytest.importorskip("matplotlib")
    found = invented(
        warm_start=[1, 1], PPO=[1.2, 0.8], history=[1.1, 1.3], aligned=[1.5, 1.7], teacher=[2, 2]
    )
    for name in ("warm start", "teacher"):
        for result in found[name]:
            result["curves"] = {curve: [] for curve in eval_file.CURVES}
    eval_file.draw(found, tmp_path)
    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in ("curves", "bars"))
