"""The study: its tables by hand, its refusals, and one seed from nothing to the tables."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch

import losses
import train as train_file
from conftest import FAST, here
from eval import COSTS
from experiments import study
from env import ToyWiki, toy_envs
from experiments.study import CURVES, by_set, compare, habit_table, habits_of, interval, kl_table
from experiments.study import means_of_all, mechanism, paired, table1, where_kl_sits
from losses import reverse_kl
from rollout import Call, Trajectory, mem1, rollout, scripted
from test_rce import TOKENIZER
from tiny import tiny


def test_compare_by_hand(tmp_path):
    """F1 of two seeds 1 and 2 against 3 and 5: 1.5 ± 0.707, 4 ± 1.414, +166.7 %; sets by their
    horizon."""
    for folder, f1 in (("a0", 1), ("a1", 2), ("b0", 3), ("b1", 5)):
        (tmp_path / folder).mkdir()
        for k in (2, 16):
            record = dict(em=1, f1=f1, peak=10, dependency=20, seconds=0.5)
            lines = []
            for i, d in enumerate((-1, 1)):
                lines.append(json.dumps({"task": str(i), **record, "f1": f1 + d}) + "\n")
            (tmp_path / folder / f"Q{k}.jsonl").write_text("".join(lines))
    # what --keep_correct may leave there
    (tmp_path / "a0" / "kept.jsonl").write_text("no record\n")
    groups = {"A": [tmp_path / "a0", tmp_path / "a1"], "B": [tmp_path / "b0", tmp_path / "b1"]}
    _, _, *rows = compare(groups)
    titles = [row.split(" | ")[:2] for row in rows]
    assert titles == [["| Q2", "A"], ["| Q2", "B"], ["| Q16", "A"], ["| Q16", "B"]]
    assert rows[1] == "| Q2 | B | 2 | 1.000 ± 0.000 | 4.000 ± 1.414 | +166.7% | 10 | 20 | 0.500 |"
    assert "1.500 ± 0.707 | +0.0%" in rows[0]
    (tmp_path / "b1" / "Q16.jsonl").write_text("")
    with pytest.raises(ValueError, match="b1/Q16.jsonl: no records"):
        list(compare(groups))
    (tmp_path / "b1" / "Q16.jsonl").unlink()
    with pytest.raises(ValueError, match="b1: its sets are"):
        list(compare(groups))


def test_compare_command(tmp_path, capsys):
    record = {"task": "a", **dict.fromkeys(("em", "f1", *COSTS), 1)}
    (tmp_path / "Q2.jsonl").write_text(json.dumps(record) + "\n")
    study.main(["compare", f"x={tmp_path}"])
    assert "| Q2 | x | 1 | 1.000 | 1.000 |" in capsys.readouterr().out
    for wrong in (["compare"], ["compare", "x"], ["compare", "x="]):
        with pytest.raises(SystemExit, match="NAME=FOLDER"):
            study.main(wrong)


KL = {"tokens": 10, "mean_kl": 0.5, "sure": 0.01, "sure_kl": 0.3, "sure_gradient": 0.02}


def invented(**f1):
    """Results of models on Q2 and Q8: a number per seed for each, which is the F1 of three tasks on
    Q2, and half of what they have on Q8; all have 0.1 more if they are sampled."""
    curves = {name: [1.0, 2.0, 1.5] for name in CURVES}
    found = {}
    for name, values in f1.items():
        results = []
        for x in values:
            sets = {}
            for mode, more in (("greedy", 0.0), ("sampled", 0.1)):
                sets[mode] = {}
                for k, scale in (("Q2", 1), ("Q8", 2)):
                    rest = {"peak": 9, "dependency": 8, "seconds": 0.5, "answered": 0.75}
                    rest["habits"] = {"first hop": [1, 4], "gave up": [0, 0], "miscopied": [1, 8]}
                    f1 = [x * scale + more + d for d in (-0.5, 0.0, 0.5)]
                    sets[mode][k] = {"em": x - 0.1, "f1": f1, **rest}
            kl = {} if name == "teacher" else {"Q2": KL}
            results.append({"sets": sets, "kl": kl, "curves": curves})
        found[name.replace("_", " ")] = results
    return found


def test_tables_by_hand():
    """Means, deviations, changes with their interval, and how many seeds agree with their sign."""
    found = invented(
        warm_start=[1, 1], PPO=[1.2, 0.8], history=[1.1, 1.3], aligned=[1.5, 1.7], teacher=[2, 2]
    )
    row = "| Q2 | aligned | 2 | 1.500 ± 0.141 | 1.600 ± 0.141 | +60.0% | 9 | 8 | 0.500 |"
    assert row in list(table1(means_of_all(found, "greedy")))
    lines = list(by_set(found, "f1"))
    assert lines[0] == "| F1, greedy / sampled | Q2 | Q8 |"
    on_2, on_8 = "1.600 ± 0.141 / 1.700 ± 0.141", "3.200 ± 0.283 / 3.300 ± 0.283"
    assert f"| aligned | {on_2} | {on_8} |" in lines
    answered = "0.750 ± 0.000 / 0.750 ± 0.000"
    assert list(by_set(found, "answered"))[2] == f"| warm start | {answered} | {answered} |"
    lines = list(paired(found))
    title = (
        "| set | F1 of | less that of | greedy | 95 % interval | agree | sampled | 95 % interval"
    )
    assert lines[0] == f"{title} | agree |"
    change = "+0.600 | +0.300 to +0.900 | 2/2"  # 0.3 and 0.9, the same for every task
    assert f"| Q2 | aligned | PPO | {change} | {change} |" in lines
    change = "+0.400 | -0.200 to +1.000 | 1/2"
    assert f"| Q8 | history | PPO | {change} | {change} |" in lines
    titles, _, first, *_ = habit_table(found, "sampled")
    assert titles == "| first hop / gave up / miscopied, % sampled | Q2 | Q8 |"
    assert first == "| warm start | 25.0 / 0.0 / 12.5 | 25.0 / 0.0 / 12.5 |"
    lines = list(kl_table(found))
    assert "| Q2 | aligned | 10 | 0.500 ± 0.000 | 1.0 | 30.0 | 2.0 |" in lines and len(lines) == 6
    states = []
    for n, kl in ((10, 1.0), (20, 3.0)):
        states.append({"call 2": {"tokens": n, "mean_kl": kl, "top1": 0.5}})
    # not every seed has late calls
    states[1]["call 3"] = {"tokens": 5, "mean_kl": -1e-9, "top1": 1.0}
    assert list(mechanism(states))[-2:] == [
        "| call 2 | 15 | 2.000 ± 1.414 | 0.500 ± 0.000 |",
        "| call 3 | 5 | 0.000 | 1.000 |",
    ]


def test_the_interval_covers_seeds_and_tasks():
    """Against the normal approximation: the variance of the mean is that of the seeds' effects over
    their number, and of the tasks' over theirs."""
    rng = torch.Generator().manual_seed(1)
    seeds = torch.linspace(-1, 1, 40, dtype=torch.float64)[:, None]
    tasks = 3 * torch.randn(1, 300, generator=rng, dtype=torch.float64)
    for change in (seeds + tasks * 0, seeds * 0 + tasks, seeds + tasks):
        by_seed, by_task = change.mean(1), change.mean(0)
        error = (by_seed.var() / 40 + by_task.var() / 300).sqrt()
        low, high = interval(change)
        expected = torch.tensor([change.mean() - 1.96 * error, change.mean() + 1.96 * error])
        assert [low, high] == pytest.approx(expected.tolist(), abs=0.05)


def habits_played(k, **habits):
    """What is counted of the expert's episodes."""
    envs = toy_envs("test", 48, k)
    sample = scripted(lambda env: ToyWiki.expert(env, **habits), TOKENIZER, envs)
    return habits_of(envs, rollout(sample, TOKENIZER, envs, mem1), TOKENIZER)


def test_habits_are_counted():
    """The expert has none; one with a habit has it at every chance, or in its share of them; and of
    turns by hand each is what it is."""
    for k in (1, 4):
        right = habits_played(k)
        assert [slips for slips, _ in right.values()] == [0, 0, 0]
        chances = {habit: n for habit, (_, n) in right.items()}
        assert chances["first hop"] > 5 and (chances["gave up"] > 5) == (k > 1)
    always = habits_played(4, first_hop=1.0)
    assert always["first hop"][0] == always["first hop"][1] > 20 and always["miscopied"][0] == 0
    half = habits_played(4, first_hop=0.5, give_up=0.2)
    for habit, share in (("first hop", 0.5), ("gave up", 0.2)):
        slips, n = half[habit]
        assert abs(slips / n - share) < 3 * (share * (1 - share) / n) ** 0.5
    assert half["miscopied"][0] == 0
    begin = "<think> known A ; B ; next home of mayor of C </think> <search> mayor of C </search>"
    more = "</think> <search> x </search>"
    end = "</think> <answer> x </answer>"
    found = "<think> mayor of C is D ; known"
    turns = {
        f"{found} A ; B ; next home of mayor of C {more}": ([0, 1], [0, 1], [0, 1]),
        f"{found} A ; B ; D ; next craft of E {more}": ([1, 1], [0, 1], [0, 1]),
        f"{found} A ; D ; next craft of E {more}": ([0, 1], [0, 1], [1, 1]),
        f"{found} A ; B ; D ; done {end}": ([1, 1], [1, 1], [0, 1]),
        f"{found} A ; B ; D ; E ; done {end}": ([0, 1], [0, 0], [1, 1]),
        "of of of": ([0, 0], [0, 0], [1, 1]),
    }
    (env,) = toy_envs("test", 1, 4)
    for hint in ("7 turns left", "last turn : answer now"):
        for text, expected in turns.items():
            calls = []
            for said in (begin, text):
                ids, seen = (TOKENIZER.encode(x, add_special_tokens=False) for x in (said, hint))
                calls.append(Call([1], ids, [0.0] * len(ids), seen))
            counted = tuple(habits_of([env], [Trajectory("a", 1, calls)], TOKENIZER).values())
            if "last turn" in hint:  # then nothing is given up
                expected = (expected[0], [0, 0], expected[2])
            assert counted == expected, text


def test_where_the_kl_sits():
    """Against Eq. 7 of losses.py and its gradient by autograd, on single calls: one token where the
    student is sure and the teacher would say something else, and others where it is not."""
    student, teacher = tiny(seed=0), tiny(seed=1)
    with torch.no_grad():
        student.get_output_embeddings().weight.mul_(20)  # so that it is sure now and then
    calls = [Call([5, 6, 7], [8, 9, 4], [0.0] * 3, []), Call([5, 6], [3, 3, 7, 1], [0.0] * 4, [])]
    found = where_kl_sits(student, teacher, [Trajectory("a", 2, calls)])
    kls, gradients, sure = [], [], []
    for call in calls:
        ids = torch.tensor([call.prompt_ids + call.action_ids])
        rows = slice(len(call.prompt_ids) - 1, -1)
        z, t = (model(ids).logits[0, rows].detach().double() for model in (student, teacher))
        for logits, others in zip(z, t):
            logits = logits.clone().requires_grad_()
            kl = reverse_kl(logits[None], others[None])[0]
            kl.backward()
            kls.append(kl.item())
            gradients.append(logits.grad.norm().item())
            p = logits.softmax(-1)
            sure.append(p.max().item() > 0.95 and p.argmax().item() != others.argmax().item())
    assert 0 < sum(sure) < 7
    expected = {"tokens": 7, "mean_kl": sum(kls) / 7, "sure": sum(sure) / 7}
    for name, values in (("sure_kl", kls), ("sure_gradient", gradients)):
        expected[name] = sum(x for x, at in zip(values, sure) if at) / sum(values)
    assert found == pytest.approx(expected, rel=1e-3)


def test_study_refuses_before_any_run(tmp_path, monkeypatch, capsys):
    """A seed for all seeds, or a state for all variants, would be a wrong table; a damaged result
    is named."""
    monkeypatch.setattr(study, "make_run", None)  # nothing is run

    def ask(*args):
        return list(study.study(["--folder", str(tmp_path / "s"), *args]))

    for flags in (["--seed", "3"], ["--seed=3"], ["--distill", "none"], ["--student", "x"]):
        with pytest.raises(SystemExit):
            ask(*flags)
        flag = flags[0].partition("=")[0]
        assert f"{flag}: study sets this itself" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        ask("--sweep", "steps")
    assert "takes a flag and values" in capsys.readouterr().err
    monkeypatch.setattr(study, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs matplotlib"):
        ask("--figures", "f")
    assert not (tmp_path / "s").exists()
    (tmp_path / "s/seed-0").mkdir(parents=True)
    (tmp_path / "s/seed-0/warm_start.json").write_text("{")
    with pytest.raises(ValueError, match="warm_start.json: not a result"):
        ask("--seeds", "0")


def test_states_of_a_teacher_whose_packs_fail_are_refused(tmp_path, monkeypatch):
    """Without RCE the exact states are not exact, and no number about them is kept."""
    packs = SimpleNamespace(holds=lambda: False)
    rows = {"call 2": {"tokens": 3, "mean_kl": 0.5, "top1": 0.75, "changed": 1}}
    monkeypatch.setattr(study, "load", lambda *args: (None, None))
    monkeypatch.setattr(study, "load_trajectories", lambda file: [])
    monkeypatch.setattr(study, "audit_teacher", lambda *args, **settings: (rows, packs))
    args = SimpleNamespace(folder=tmp_path, start=None)
    with pytest.raises(ValueError, match="start/teacher: RCE .* fails"):
        study.states_of(0, args)
    assert not list(tmp_path.iterdir())
    packs.holds = lambda: True
    kept = {"call 2": {"tokens": 3, "mean_kl": 0.5, "top1": 0.75}}
    assert study.states_of(0, args) == kept
    assert json.loads((tmp_path / "seed-0/states.json").read_text()) == kept


def test_study(tmp_path, monkeypatch):
    """One seed from nothing to the tables; then from its files alone, and with a second seed's;
    other settings, and a run that fails, are named."""

    def train_here(command, stdout, stderr):
        done = here(train_file, *command[2:])
        stdout.write(done.stdout + done.stderr)
        return done

    def run(*args, folder="s"):
        return here(study, "--folder", tmp_path / folder, "--n", 4, *args)

    monkeypatch.setattr(study.subprocess, "run", train_here)

    flags = list(FAST)
    at = flags.index("--eval_questions")
    del flags[at : at + 2]
    at = flags.index("--horizons")
    del flags[at : at + 3]
    args = ["--horizons", "1", "2", *flags]
    out = run("--seeds", "0", *args)
    assert out.returncode == 0, out.stderr
    assert "| Q2 | aligned | history |" in out.stdout
    assert "| before the first memory update |" in out.stdout
    configs = []
    for name in ("PPO", "aligned"):
        file = tmp_path / f"s/seed-0/{name}/config.json"
        configs.append(json.loads(file.read_text()))
    changed = {name for name in configs[0] if configs[0][name] != configs[1][name]}
    assert changed == {"distill", "run_dir"}
    result = json.loads((tmp_path / "s/seed-0/aligned.json").read_text())
    assert len(result["curves"]["reward"]) == 3 and set(result["sets"]["greedy"]) == {"Q1", "Q2"}
    assert len(result["sets"]["sampled"]["Q2"]["f1"]) == 2 and set(result["kl"]) == {"Q1", "Q2"}
    start = ["--start", str(tmp_path / "s")]
    sweep = run("--seeds", "0", *start, "--sweep", "distill_coef", "0.5", *args, folder="w")
    assert sweep.returncode == 0, sweep.stderr
    assert sweep.stdout.count("| distill_coef 0.5 |") == 2  # F1, habits
    made = tmp_path / "w/seed-0"
    config = json.loads((made / "distill_coef_0.5/config.json").read_text())
    assert config["distill_coef"] == 0.5
    assert config["student"] == str(tmp_path / "s/seed-0/start/warm_start")
    assert not (made / "start").exists() and (made / "distill_coef_0.5.log").exists()
    for name in ("start", "PPO", "history", "aligned"):
        shutil.rmtree(tmp_path / "s/seed-0" / name)
    shutil.copytree(tmp_path / "s/seed-0", tmp_path / "s/seed-1")
    again = run("--seeds", "0", "1", *args)
    assert again.returncode == 0 and "| Q2 | aligned | 2 |" in again.stdout, again.stderr
    other = run("--seeds", "0", *args, "--actor_lr", "1")
    assert other.returncode == 1 and "choose another folder" in other.stderr
    failed = run("--seeds", "5", "--horizons", "1", "--steps", "none", folder="v")
    assert failed.returncode == 1 and "invalid int value" in failed.stderr
    log = tmp_path / "v/seed-5/start.log"
    assert f"what it said is in {log}" in failed.stderr
    assert "invalid int value" in log.read_text()


def test_figures(tmp_path):
    """Two pictures, from numbers alone."""
    pytest.importorskip("matplotlib")
    trained = dict(PPO=[1.2, 0.8], history=[1.1, 1.3], aligned=[1.5, 1.7])
    found = invented(warm_start=[1, 1], **trained, teacher=[2, 2])
    for name in ("warm start", "teacher"):
        for result in found[name]:
            result["curves"] = {curve: [] for curve in CURVES}
    study.draw(found, tmp_path)
    for name in ("curves", "bars"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", study.DIVERGENCES)
def test_a_divergence_takes_the_place_of_the_loss(name, monkeypatch):
    """Each by its definition in float64, with a teacher whose vocabulary is padded; whatever
    train.py calls then is that."""
    torch.manual_seed(0)
    ours, theirs = torch.randn(3, 7).double(), torch.randn(3, 9).double()
    p, q = ours.softmax(-1), theirs[:, :7].softmax(-1)
    m = (p + q) / 2

    def kl(a, b):
        return (a * (a.log() - b.log())).sum(-1)

    right = {"reverse": kl(p, q), "forward": kl(q, p), "jensen_shannon": (kl(p, m) + kl(q, m)) / 2}
    seen = []
    monkeypatch.setattr(losses, "reverse_kl", reverse_kl)  # what is changed is changed back
    monkeypatch.setattr(
        train_file, "main", lambda flags: seen.append(losses.reverse_kl(ours, theirs))
    )
    study.main(["train", name, "--steps", "1"])
    torch.testing.assert_close(seen[0], right[name])


def test_an_unknown_divergence_is_named():
    with pytest.raises(SystemExit, match="backward is no divergence; take one of reverse, forward"):
        study.main(["train", "backward"])
