"""The study: its tables by hand, its refusals, and one seed from nothing to the tables."""

import json
import shutil
from types import SimpleNamespace

import pytest

import train as train_file
from conftest import FAST, here
from eval import METRICS
from experiments import study
from experiments.study import CURVES, compare, f1_table, mechanism, paired, table1


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
    record = {"task": "a", **dict.fromkeys(METRICS, 1)}
    (tmp_path / "Q2.jsonl").write_text(json.dumps(record) + "\n")
    study.main(["compare", f"x={tmp_path}"])
    assert "| Q2 | x | 1 | 1.000 | 1.000 |" in capsys.readouterr().out
    for wrong in (["compare"], ["compare", "x"], ["compare", "x="]):
        with pytest.raises(SystemExit, match="NAME=FOLDER"):
            study.main(wrong)


def invented(**f1):
    """Results of models on Q2 and Q8, a number per seed for each."""
    curves = {name: [1.0, 2.0, 1.5] for name in CURVES}
    found = {}
    for name, values in f1.items():
        results = []
        for x in values:
            sets = {}
            for k, scale in (("Q2", 1), ("Q8", 2)):
                rest = {"peak": 9, "dependency": 8, "seconds": 0.5}
                sets[k] = {"em": x - 0.1, "f1": x * scale, **rest}
            results.append({"sets": sets, "curves": curves})
        found[name.replace("_", " ")] = results
    return found


def test_tables_by_hand():
    """Means, deviations, the changes seed by seed, and how many agree with the sign of their
    mean."""
    found = invented(warm_start=[1, 1], PPO=[1.2, 0.8], history=[1.1, 1.3], aligned=[1.5, 1.7])
    sets = {}
    for name, results in found.items():
        sets[name] = [r["sets"] for r in results]
    row = "| Q2 | aligned | 2 | 1.500 ± 0.141 | 1.600 ± 0.141 | +60.0% | 9 | 8 | 0.500 |"
    assert row in list(table1(sets))
    lines = list(f1_table(sets))
    assert lines[0] == "| F1 | Q2 | Q8 |"
    assert "| aligned | 1.600 ± 0.141 | 3.200 ± 0.283 |" in lines
    lines = list(paired(found, [4, 7]))
    assert "| set | F1 of | less that of | seed 4 | seed 7 | mean | agree |" in lines
    assert "| Q2 | aligned | PPO | +0.300 | +0.900 | +0.600 ± 0.424 | 2/2 |" in lines
    assert "| Q8 | history | PPO | -0.200 | +1.000 | +0.400 ± 0.849 | 1/2 |" in lines
    states = []
    for n, kl in ((10, 1.0), (20, 3.0)):
        states.append({"call 2": {"tokens": n, "mean_kl": kl, "top1": 0.5}})
    # not every seed has late calls
    states[1]["call 3"] = {"tokens": 5, "mean_kl": -1e-9, "top1": 1.0}
    assert list(mechanism(states))[-2:] == [
        "| call 2 | 15 | 2.000 ± 1.414 | 0.500 ± 0.000 |",
        "| call 3 | 5 | 0.000 | 1.000 |",
    ]


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
    assert len(result["curves"]["reward"]) == 3 and set(result["sets"]) == {"Q1", "Q2"}
    start = ["--start", str(tmp_path / "s")]
    sweep = run("--seeds", "0", *start, "--sweep", "distill_coef", "0.5", *args, folder="w")
    assert sweep.returncode == 0, sweep.stderr
    assert sweep.stdout.count("| distill_coef 0.5 |") == 1
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
