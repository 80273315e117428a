"""Metrics by hand, records that resume, and the command."""

import json
from dataclasses import asdict
from statistics import mean

import pytest

import eval as eval_file
import rollout
from conftest import here
from env import ToyWiki, toy_envs
from eval import COSTS, dependency, evaluate, markdown, peak, read_records, same_settings, table
from rollout import Call, Trajectory
from test_rce import TOKENIZER
from tiny import tiny
from train import Config


def speak(monkeypatch, respond, asked=None):
    """respond(env) instead of the model; notes the tasks that were asked for."""

    def run(sample, tokenizer, envs, *rest):
        if asked is not None:
            asked.extend(env.task.id for env in envs)
        sample = rollout.scripted(respond, tokenizer, envs)
        return rollout.rollout(sample, tokenizer, envs, *rest)

    monkeypatch.setattr(eval_file, "rollout", run)


def task_ids(envs):
    return [env.task.id for env in envs]


# ---- metrics -------------------------------------------------------------------------------------
def test_peak_and_dependency_by_hand():
    """Two calls, |z| = 3 and 6, |a| = 2 and 5: peak 11; dependency 2 (3 + 1) + 5 (6 + 2) = 48.
    Without q, as MEM1 counts: 8, and 2 (0 + 1) + 5 (3 + 2) = 27. Would catch a history where a
    compact context stood, and a prefix that leaves out q."""
    calls = [Call([1] * z, [2] * a, [0.0] * a, []) for z, a in ((3, 2), (6, 5))]
    trajectory = Trajectory("t", 3, calls)
    assert peak(trajectory) == 11 and dependency(trajectory) == 48
    assert peak(trajectory, with_q=False) == 8
    assert dependency(trajectory, with_q=False) == 27


def first_only(env):
    """Answers the first question, and no other."""
    return f"<answer> {env.task.answers[0][0]} </answer>"


@pytest.mark.parametrize("respond, expected", [(ToyWiki.expert, 2.0), (first_only, 1.0)])
def test_evaluate_sums_over_questions_and_means_over_tasks(respond, expected, monkeypatch):
    """The expert instead of the model scores 2 of 2 on every task; one that answers only the first
    question scores 1."""
    envs = toy_envs("test", 10, 2)
    speak(monkeypatch, respond)
    metrics, trajectories = evaluate(None, TOKENIZER, envs, max_len=10_000, batch_size=4)
    assert list(metrics) == ["em", "f1", "answered", "solved", *COSTS]
    assert metrics["em"] == metrics["f1"] == expected and metrics["seconds"] > 0
    assert [trajectory.task_id for trajectory in trajectories] == task_ids(envs)
    assert metrics["peak"] == mean(map(peak, trajectories))
    assert metrics["dependency"] == mean(map(dependency, trajectories))


def test_another_definition_of_the_scores_and_of_the_costs(monkeypatch):
    """By MEM1's rule one answer to two questions scores nothing, and q costs nothing."""
    speak(monkeypatch, first_only)
    envs = toy_envs("test", 4, 2, scores="mem1")
    settings = {"max_len": 10_000, "with_q": False}
    metrics, trajectories = evaluate(None, TOKENIZER, envs, **settings)
    assert metrics["em"] == metrics["f1"] == 0
    assert metrics["peak"] == mean(peak(trajectory, False) for trajectory in trajectories)


def test_batches_do_not_change_what_is_sampled():
    """Greedy, and with noise, which belongs to the task."""
    model, settings = tiny(vocab_size=len(TOKENIZER)), {"max_new_tokens": 8, "max_len": 5000}
    for temperature in (0.0, 1.0):
        found = []
        for batch_size in (2, 5):
            envs = toy_envs("test", 5, 1)
            sizes = {"batch_size": batch_size, "temperature": temperature}
            _, trajectories = evaluate(model, TOKENIZER, envs, **settings, **sizes)
            calls = [call for trajectory in trajectories for call in trajectory.calls]
            found.append([(call.prompt_ids, call.action_ids) for call in calls])
        assert found[0] == found[1]


# ---- files ---------------------------------------------------------------------------------------
def test_a_crashed_evaluation_resumes_where_it_was(tmp_path, monkeypatch):
    """Three batches of two; the file is cut in the middle of its fourth line. The three whole tasks
    are not run again, and the means are those of an uninterrupted run."""
    asked, records, everything = [], tmp_path / "Q2.jsonl", task_ids(toy_envs("test", 6, 2))
    speak(monkeypatch, ToyWiki.expert, asked)

    def run():
        settings = {"max_len": 10_000, "batch_size": 2, "records": records}
        metrics, trajectories = evaluate(None, TOKENIZER, toy_envs("test", 6, 2), **settings)
        del metrics["seconds"]
        return metrics, trajectories

    first, _ = run()
    lines = records.read_bytes().splitlines(keepends=True)
    assert len(lines) == 6 and asked == everything
    records.write_bytes(b"".join(lines[:3]) + lines[3][:20])
    asked.clear()
    again, trajectories = run()
    assert asked == everything[3:] and len(trajectories) == 3
    assert again == first and list(read_records(records)) == everything
    records.write_bytes(b'{"task": "x"}\n')
    with pytest.raises(ValueError, match="Q2.jsonl, line 1: not a record"):
        run()


def test_records_of_nothing_are_empty(tmp_path):
    assert read_records(None) == read_records(tmp_path / "nothing.jsonl") == {}


def test_right_episodes_are_kept_as_text(tmp_path, monkeypatch):
    """Only those with every answer right; each turn as the environment saw it, without token ids.
    A line that a crash cut off goes."""
    out, envs = tmp_path / "kept.jsonl", toy_envs("test", 4, 2)
    wrong = envs[2]

    def respond(env):
        if env is wrong:
            return f"<answer> {env.task.answers[0][0]} ; nothing </answer>"
        return ToyWiki.expert(env)

    speak(monkeypatch, respond)
    out.write_text('{"task": "cut off by a cra')
    evaluate(None, TOKENIZER, envs, max_len=10_000, keep_correct=out)
    kept = [json.loads(line) for line in out.read_text().splitlines()]
    assert [episode["task"] for episode in kept] == task_ids([envs[0], envs[1], envs[3]])
    replayed = toy_envs("test", 4, 2)[0]
    assert kept[0]["prompt"] == replayed.prompt()
    for turn in kept[0]["turns"]:
        observation, _, _ = replayed.step(turn["response"])
        assert turn == {"response": turn["response"], "observation": observation}
    assert replayed.score()["em"] == 2


def test_records_of_other_settings_are_not_mixed(tmp_path):
    ours, folder = {"seed": 0, "scores": "squad"}, tmp_path / "new" / "folder"
    assert same_settings(folder, ours) == folder
    assert same_settings(folder, dict(ours)) == folder
    with pytest.raises(ValueError, match="holds records with scores 'squad', not 'mem1'"):
        same_settings(folder, {**ours, "scores": "mem1"})
    assert json.loads((folder / "settings.json").read_text()) == ours


# ---- tables --------------------------------------------------------------------------------------
def test_table_is_markdown():
    """One column per metric, in the layout of Tables 1 and 2."""
    metrics = {"em": 1.5, "f1": 1.625, "peak": 200.4, "dependency": 12345.4, "seconds": 0.5}
    header, rule, row = table([("Q2", "student", metrics)])
    assert header == "| set | model | EM | F1 | peak | dependency | s / task |"
    assert row == "| Q2 | student | 1.500 | 1.625 | 200 | 12345 | 0.500 |"
    assert header.count("|") == rule.count("|") == row.count("|")


def test_a_row_is_printed_as_soon_as_it_is_known():
    """A run that is interrupted has shown what it found."""

    def rows():
        yield "a", "b"
        raise KeyboardInterrupt

    lines = markdown(("x", "y"), rows())
    assert [next(lines) for _ in range(3)] == ["| x | y |", "|---|---|", "| a | b |"]
    with pytest.raises(KeyboardInterrupt):
        next(lines)


# ---- the command ---------------------------------------------------------------------------------
def command(folder, *args):
    """`python eval.py` in this folder."""
    return here(eval_file, *args, cwd=folder)


def test_command(runs, monkeypatch):
    """All models of a run, one of them, and what cannot be evaluated."""
    folder, _ = runs
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    short = ("--n", 3, "--max_new_tokens", 16)
    out = command(folder, "a", *short, "--horizons", 1)
    assert out.returncode == 0, out.stderr
    models = [line.split("|")[2].strip() for line in out.stdout.splitlines()[2:]]
    assert models == ["warm_start", "student", "teacher"]
    out = command(folder, "a/student", *short, "--horizons", 1, 2)
    assert out.returncode == 0 and out.stdout.count("| student |") == 2
    out = command(folder, "a/nothing")
    assert out.returncode == 1 and "a/nothing: no model and tokenizer" in out.stderr
    assert "Traceback" not in out.stderr


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--horizons 0", "--horizons"),
        ("--top_k 0", "must be positive"),
        ("--max_len 128", "--max_len must leave room"),
        ("--questions q.jsonl", "--questions and --corpus go together"),
        ("--corpus c.jsonl", "--questions and --corpus go together"),
    ],
)
def test_flags_that_cannot_be_are_refused(flags, message, capsys):
    with pytest.raises(SystemExit) as stop:
        eval_file.parse(["model", *flags.split()])
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_a_run_is_measured_under_its_own_settings(tmp_path):
    """Its rule, limits and held-out files, unless a flag says otherwise; a model folder, which has
    a config.json of its own, changes nothing; tasks of a script are refused."""
    saved = asdict(
        Config(update="sliding_window", max_obs=77, test_questions=["q.jsonl"], corpus="c.db")
    )
    (tmp_path / "config.json").write_text(json.dumps(saved | {"own_tasks": False}))
    args = eval_file.parse([str(tmp_path), "--max_len", "5000"])
    assert (args.update, args.max_obs, args.max_len) == ("sliding_window", 77, 5000)
    assert (args.questions, args.corpus, args.top_k) == (["q.jsonl"], "c.db", saved["top_k"])
    for own in ({"own_tasks": True}, {"update": "<function rule>"}):
        (tmp_path / "config.json").write_text(json.dumps(saved | own))
        with pytest.raises(ValueError, match="of a script"):
            eval_file.parse([str(tmp_path)])
    (tmp_path / "config.json").write_text('{"run_dir": ')
    with pytest.raises(ValueError, match="config.json is damaged"):
        eval_file.parse([str(tmp_path)])
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert eval_file.parse([str(tmp_path)]).max_obs == 128


def test_command_on_files(tmp_path):
    """Questions and passages of files; records that continue, and are not mixed with those of other
    settings."""
    world, questions, passages = ToyWiki(0), [], []
    for i, task in enumerate(world.tasks(6, 1)):
        (question,), ((answer, *_),) = task.questions, task.answers
        record = {"id": str(i), "question": question, "golden_answers": [answer]}
        questions.append(json.dumps(record) + "\n")
    for passage in world.passages:
        record = {"contents": f"{passage.title}\n{passage.text}"}
        passages.append(json.dumps(record) + "\n")
    (tmp_path / "q.jsonl").write_text("".join(questions))
    (tmp_path / "c.jsonl").write_text("".join(passages))
    tiny("llama", vocab_size=len(TOKENIZER)).save_pretrained(tmp_path / "student")
    TOKENIZER.save_pretrained(tmp_path / "student")
    flags = ["--questions", "q.jsonl", "--corpus", "c.jsonl", "--horizons", 1, 2]
    flags += ["--max_new_tokens", 8, "--max_len", 5000, "--records", "r"]
    out = command(tmp_path, "student", *flags)
    assert out.returncode == 0 and out.stdout.count("| student |") == 2, out.stderr
    assert [len(read_records(tmp_path / f"r/Q{k}.jsonl")) for k in (1, 2)] == [6, 3]
    again = command(tmp_path, "student", *flags)
    assert again.stdout == out.stdout  # the seconds, too: nothing was run again
    other = command(tmp_path, "student", *flags, "--scores", "mem1")
    assert other.returncode == 1
    assert "holds records with scores 'squad', not 'mem1'" in other.stderr
