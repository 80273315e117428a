"""The training loop: what must be exact, what must be equal, and what a wrong flag or a kill leaves
behind."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from unittest.mock import ANY

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import train as train_file
from losses import gae
from pack import action_hidden, pack
from env import ToyWiki, step_all, toy_envs
from eval import append, as_text
from rollout import load_trajectories, mem1, rollout, scripted, train_tokenizer
from conftest import FAST, command
from test_rce import TOKENIZER, trajectories
from tiny import tiny
from train import (
    Clock,
    Batch,
    Config,
    advantages_of,
    check_tokenizers,
    checkpoints,
    head,
    load_model,
    make_critic,
    make_envs,
    open_data,
    pack_calls,
    pack_histories,
    parse_config,
    policy_scores,
    replay,
    resume,
    save_checkpoint,
    update_policy,
    values_of,
)


def metrics(folder, stage=None):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [m for m in lines if stage in (None, m["stage"])]


def test_run_leaves_what_it_says(runs):
    """Models that load anywhere with their tokenizer, metrics, trajectories, the table, two decoded episodes;
    nothing half-written."""
    folder, out = runs
    assert sorted(p.name for p in (folder / "a").iterdir()) == [
        "checkpoints",
        "config.json",
        "metrics.jsonl",
        "student",
        "table.md",
        "teacher",
        "trajectories.jsonl",
        "warm_start",
    ]
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder / "a/student"),
        AutoTokenizer.from_pretrained(folder / "a/student"),
    )
    # AutoTokenizer replaces the tokenizer saved with some model types by the type's own, without a word
    text = "<think> known next river of Guso </think> ( 9 ) 😀"
    trained = Tokenizer.from_file(str(folder / "a/student/tokenizer.json"))
    assert (
        tokenizer.encode(text) == trained.encode(text).ids
        and tokenizer.decode(tokenizer.encode(text)) == text
    )
    assert (
        len(tokenizer) == model.config.vocab_size
        and tokenizer.encode("<think> known")[0] == tokenizer.get_vocab()["<think>"]
    )
    assert len(load_trajectories(folder / "a/trajectories.jsonl")) == 6
    assert len(metrics(folder / "a", "warm_start")) == 14 and len(metrics(folder / "a", "rl")) == 3
    stdout = out["a"].stdout
    assert (
        "before training" in stdout
        and "after training" in stdout
        and stdout.count("| Q1 |") == 3
        and "| Q2 | teacher |" in stdout
    )
    assert "teacher |" not in out["none"].stdout
    config = json.loads((folder / "a/config.json").read_text())
    assert config["sft_steps"] == 12 and config["actor_lr"] == train_file.PRESETS["tiny"]["actor_lr"]


def test_first_ratio_is_exactly_one_and_sampling_agrees(runs):
    """Before the first update of a step the ratio is 1 in every token and nothing is clipped, after it not;
    what was sampled agrees with the pack. Would catch a state that differs anywhere between rollout, old and
    new scores."""
    folder, _ = runs
    for name in ("a", "history", "none"):
        for m in metrics(folder / name, "rl"):
            assert m["first_max_logratio"] == 0 and m["first_clipfrac"] == 0 and m["max_logratio"] > 0
            assert m["logp_mismatch"] <= m["logp_mismatch_max"] <= 1e-4


def test_same_seed_same_metrics(runs):
    folder, _ = runs
    strip = lambda ms: [{k: v for k, v in m.items() if not k.startswith("seconds")} for m in ms]
    assert strip(metrics(folder / "a")) == strip(metrics(folder / "b"))


def test_variants_share_all_but_the_teacher(tmp_path, monkeypatch):
    """The matched control: from the same models and the same episodes (the expert's, of several calls)
    everything before the update is equal but the teacher's KL; and PPO alone has none."""
    tokenizer = train_tokenizer(train_file.toy_texts(), 600)
    for name, seed in (("student", 0), ("teacher", 1)):
        tiny("llama", seed=seed, vocab_size=len(tokenizer)).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    monkeypatch.setattr(
        train_file,
        "rollout",
        lambda sample, tok, envs, *rest: rollout(scripted(ToyWiki.expert, tok, envs), tok, envs, *rest),
    )
    first = {}
    for variant in ("aligned", "history", "none"):
        flags = f"--distill {variant} --run_dir {tmp_path}/{variant} "
        flags += f"--student {tmp_path}/student --teacher {tmp_path}/teacher"
        config = parse_config(
            [*flags.split(), *"--steps 1 --ppo_epochs 1 --tasks_per_step 3 --eval_questions 0".split()]
        )
        allowed = dict(allow_mismatch=True)  # the expert has no log-probs
        train_file.train(replace(config, max_len=2000, max_new_tokens=16, device="cpu", **allowed))
        (first[variant],) = metrics(tmp_path / variant, "rl")
    expert = first["aligned"]
    assert (
        expert["calls"] > 6
        and expert["reward"] == expert["em"] == expert["f1"] == 2
        and expert["answered"] == 1
    )
    calls = [c for t in load_trajectories(tmp_path / "aligned/trajectories.jsonl") for c in t.calls]
    whole = [tuple(c.prompt_ids + c.action_ids) for c in calls]
    stored = {
        call[:n] for call in whole for n in range(1, len(call) + 1)
    }  # every distinct prefix is one token of the tree
    assert expert["action_tokens"] == sum(len(c.action_ids) for c in calls)
    assert expert["tokens_saved"] == pytest.approx(1 - len(stored) / sum(map(len, whole)))
    for name in ("history", "none"):
        for key in (
            "reward",
            "calls",
            "action_tokens",
            "logp_mismatch",
            "first_max_logratio",
            "ppo_loss",
            "entropy",
        ):
            assert first[name][key] == pytest.approx(first["aligned"][key], abs=1e-6)
    assert first["aligned"]["teacher_kl"] > 0 and first["none"]["teacher_kl"] == 0
    assert abs(first["history"]["teacher_kl"] - first["aligned"]["teacher_kl"]) > 0.01


def batch_of(student, critic, teacher, packs, config):
    """Scores and arbitrary advantages for recorded trajectories."""
    with torch.no_grad():
        logp = torch.cat([policy_scores(student, p, 1.0)[0] for p in packs])
        values = torch.cat([values_of(critic, p) for p in packs])
        hidden = torch.cat([action_hidden(teacher, p) for p in packs])
    g = torch.Generator().manual_seed(0)
    advantages, noise = torch.randn(2, len(logp), generator=g)
    return Batch(logp + 0.1 * noise, values, advantages, advantages + values, hidden)


@pytest.mark.parametrize("change", [dict(max_tokens=110), dict(share="q"), dict(share="q", max_tokens=150)])
def test_gradients_depend_on_neither_packs_nor_share(change):
    """Loss and gradient within 1e-5 relative: sums are divided by the N of the batch. Would catch a mean of
    means and a second division."""
    records, results = trajectories("mem1"), []
    base = replace(Config(), max_len=200, ppo_epochs=1, max_grad_norm=1e9, distill_coef=0.5, device="cpu")
    teacher = tiny(seed=1, vocab_size=len(TOKENIZER)).requires_grad_(False)
    for config in (base, replace(base, **change)):
        student = tiny(vocab_size=len(TOKENIZER))
        critic = make_critic(student)
        torch.nn.init.ones_(critic.score.weight)
        packs = pack_calls(records, config)
        grads = {}

        class Keep(torch.optim.SGD):
            def step(self):
                grads[self] = [p.grad.clone() for group in self.param_groups for p in group["params"]]

        optimizers = [Keep(student.parameters(), lr=0), Keep(critic.parameters(), lr=0)]
        found = update_policy(
            student,
            critic,
            optimizers,
            packs,
            batch_of(student, critic, teacher, packs, config),
            head(teacher),
            config,
            Clock("cpu"),
        )
        results.append((found, [g for o in optimizers for g in grads[o]], len(packs)))
    (a, grads_a, n_a), (b, grads_b, n_b) = results
    assert n_a == 1 and (n_b > 1) == ("max_tokens" in change)
    for key in a:
        assert a[key] == pytest.approx(b[key], rel=1e-5, abs=1e-6), key
    for x, y in zip(grads_a, grads_b, strict=True):
        assert (x - y).norm() <= 1e-5 * max(x.norm(), 1e-3)


def test_clock_sums_laps_by_name(monkeypatch):
    times = iter([0.0, 1.0, 3.0, 7.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    clock = Clock("cpu")
    for name in ("a", "b", "a"):
        clock.lap(name)
    assert clock.cost == {"seconds_a": 5.0, "seconds_b": 2.0}


def test_rewards_stand_on_the_last_token_of_their_call_and_stay_in_their_trajectory():
    """Eq. 8 and 9 on three episodes with reward 1 a call: with gamma = lambda = 1, V = 0 and the policy at
    its reference, a token's advantage is the number of calls of its own trajectory from its own on; the
    penalty is beta times the growth that is still to come; whitened it has mean 0 and deviation 1."""
    records = trajectories("mem1")
    tokens = [(t, i) for t in records for i, call in enumerate(t.calls) for _ in call.action_ids]
    expected = torch.tensor([float(len(t.calls) - i) for t, i in tokens])
    zero = torch.zeros(len(tokens))
    config = replace(Config(), whiten_advantages=False, kl_coef=0.5)
    advantages, returns = advantages_of(records, zero, zero, zero, config)
    assert advantages.equal(expected) and returns.equal(expected)
    last_only, _ = advantages_of(records, zero, zero, zero, replace(config, gamma=0.0))
    assert last_only.nonzero()[:, 0].tolist() == [
        n for n, (x, y) in enumerate(zip(tokens, [*tokens[1:], None])) if x != y
    ]
    penalised, _ = advantages_of(records, zero, zero - 1, zero, replace(config, gamma=0.0))
    torch.testing.assert_close(penalised, last_only - 0.5)
    white, _ = advantages_of(records, zero, zero, zero, Config())
    torch.testing.assert_close(white, (expected - expected.mean()) / expected.std(correction=0))


def test_curriculum_and_schedule():
    """Short tasks first, every length on the way, none beyond the horizon; a learning rate that is never
    0."""
    lengths = [train_file.sft_longest(step / 1000, 16) for step in range(1000)]
    assert lengths == sorted(lengths) and set(lengths) == set(range(3, 17)) and lengths.count(3) > 300
    assert {train_file.sft_longest(p, 2) for p in (0.0, 0.5, 1.0)} == {2}
    rates = [train_file.sft_rate(step / 1000) for step in range(1001)]
    assert 0 < min(rates) and max(rates) == 1.0 and rates[0] < 0.1 and rates[-1] < 0.1


def test_gae_with_two_trajectories_in_one_pack_in_interleaved_call_order():
    """Calls a0 b0 a1 b1 in one pack: read V in call order, follow each trajectory by call_idx, and Eq. 9 is
    that of each trajectory packed alone. Would catch physical order taken for time, and values that leak
    across."""
    model = make_critic(tiny())
    torch.nn.init.normal_(model.score.weight)
    calls = {"a": [([1, 2], [3, 4]), ([1, 2, 9], [5])], "b": [([1, 3], [3]), ([1, 3, 8, 9], [6, 7, 8])]}
    order = [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    packed = pack(*zip(*[calls[name][t] for name, t in order]))
    with torch.no_grad():
        values = values_of(model, packed)
        owner = torch.tensor(["ab".index(name) for name, _ in order])[packed.call_idx]
        by_trajectory = owner.argsort(stable=True)
        together, _ = gae(
            torch.ones(7),
            values[by_trajectory],
            torch.tensor([False] * 2 + [True] + [False] * 3 + [True]),
            0.9,
            0.8,
        )
        for name, part in (("a", slice(0, 3)), ("b", slice(3, 7))):
            alone = pack(*zip(*calls[name]))
            n = len(alone.action_ids)
            expected, _ = gae(torch.ones(n), values_of(model, alone), torch.arange(n) == n - 1, 0.9, 0.8)
            torch.testing.assert_close(together[part], expected)


def test_critic_shares_nothing_with_the_student():
    """A shared config flips the other's attention; a shared tensor trains both."""
    student = tiny()
    critic = make_critic(student)
    assert (
        critic.config is not student.config
        and critic.config.num_labels == 1
        and not any(isinstance(m, torch.nn.Dropout) and m.p for m in critic.modules())
    )
    assert not {p.data_ptr() for p in critic.parameters()} & {p.data_ptr() for p in student.parameters()}
    packed = pack([[1, 2]], [[3, 4]])
    assert values_of(critic, packed).tolist() == [0, 0]
    torch.testing.assert_close(action_hidden(critic, packed), action_hidden(student, packed))


def test_history_packs_keep_the_order_of_the_calls():
    """Teacher rows of the control line up with the aligned ones: same actions, same calls, and before the
    first rewrite the same state."""
    records, config = trajectories("mem1"), replace(Config(), device="cpu")
    (aligned,), histories = pack_calls(records, config), pack_histories(records, config)
    assert torch.cat([h.action_ids for h in histories]).equal(aligned.action_ids)
    model = tiny(vocab_size=len(TOKENIZER))
    with torch.no_grad():
        a, h = action_hidden(model, aligned), torch.cat([action_hidden(model, p) for p in histories])
    first = len(records[0].calls[0].action_ids)
    torch.testing.assert_close(a[:first], h[:first], rtol=0, atol=1e-4)
    assert (a - h).abs()[first:].max() > 0.1


@pytest.mark.parametrize(
    "args, message",
    [
        (["--preset", "huge"], "invalid choice: 'huge'"),
        (["--distill", "both"], "invalid choice: 'both'"),
        (["--stepz", "3"], "unknown arguments: --stepz 3"),
        (["--steps", "many"], "invalid int value: 'many'"),
        (["--steps", "0"], "--steps must be positive"),
        (["--horizons", "2,x"], "--horizons"),
        (["--max_len", "100"], "leaves no room for a prompt"),
        (["--student", "x"], "go together"),
        (["--update", "forget"], "invalid choice: 'forget'"),
        (["--sft_student", "5000"], "--sft_student"),
        (["--device", "toaster"], "--device toaster is not there"),
        (["--hidden_size", "40"], "no multiple"),
    ],
)
def test_wrong_flags_end_with_a_message(args, message, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_config(args)
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_help_explains_every_field():
    """Each flag with its symbol or meaning, its source and its default in the preset."""
    text = " ".join(command("--help").stdout.split())
    for name, field in Config.__dataclass_fields__.items():
        assert f"--{name}" in text and " ".join(field.metadata["help"].split())[:40] in text, name
    for symbol in (
        "lambda of Eq. 11",
        "alpha of Eq. 11",
        "beta of Eq. 8",
        "epsilon of Eq. 10",
        "gamma of Eq. 9",
    ):
        assert symbol in text


def test_precedence_is_defaults_preset_flags():
    assert parse_config([]).ppo_epochs == train_file.PRESETS["tiny"]["ppo_epochs"] != Config().ppo_epochs
    assert parse_config(["--preset", "3b"]) == replace(Config(), preset="3b", **train_file.PRESETS["3b"])
    assert parse_config(["--ppo_epochs", "7"]).ppo_epochs == 7 and parse_config([]).gamma == Config().gamma
    assert parse_config(["--no_whiten_advantages"]).whiten_advantages is False


def test_an_existing_run_is_never_overwritten(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/metrics.jsonl").write_text("precious\n")
    out = command(*FAST, "--run_dir", "mine", cwd=tmp_path)
    assert out.returncode == 1 and "mine exists already" in out.stderr and "Traceback" not in out.stderr
    assert (tmp_path / "mine/metrics.jsonl").read_text() == "precious\n"


def test_a_horizon_beyond_the_toy_is_refused_before_any_work(tmp_path):
    out = command(*FAST, "--horizons", "2,300", "--run_dir", "r", cwd=tmp_path)
    assert out.returncode == 1 and "no 300 questions" in out.stderr and "Traceback" not in out.stderr
    assert not (tmp_path / "r").exists()


def test_models_from_folders(tmp_path):
    """--student and --teacher skip the warm start; another width and vocabulary padding of the teacher are
    fine, another tokenizer is not."""
    for name, model in (
        ("student", tiny("llama", vocab_size=300)),
        ("teacher", tiny("llama", vocab_size=310, hidden_size=64)),
    ):
        model.save_pretrained(tmp_path / name)
        TOKENIZER.save_pretrained(tmp_path / name)
    args = [
        *FAST,
        "--max_len",
        "2000",
        "--run_dir",
        "r",
        "--steps",
        "1",
        "--student",
        "student",
        "--teacher",
        "teacher",
    ]
    out = command(*args, cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    assert metrics(tmp_path / "r", "rl")[0]["teacher_kl"] > 0 and not (tmp_path / "r/warm_start").exists()
    out = command(*args, "--max_len", "100", "--run_dir", "r2", cwd=tmp_path)
    assert out.returncode == 1 and "raise max_len" in out.stderr and "Traceback" not in out.stderr
    train_tokenizer(["quite another text"], 280).save_pretrained(tmp_path / "teacher")
    out = command(*args, "--run_dir", "r3", cwd=tmp_path)
    assert out.returncode == 1 and "different tokenizers" in out.stderr and "Traceback" not in out.stderr
    out = command(
        *args,
        "--run_dir",
        "r4",
        "--teacher",
        "nowhere",
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert out.returncode == 1 and "nowhere" in out.stderr and "Traceback" not in out.stderr
    tiny("llama", vocab_size=100).save_pretrained(tmp_path / "student")
    with pytest.raises(ValueError, match="the model only 100"):
        load_model(str(tmp_path / "student"), Config(device="cpu"))


def test_tokenizers_are_compared_by_id():
    check_tokenizers(TOKENIZER, TOKENIZER)
    with pytest.raises(ValueError, match="is id .* to the student,"):
        check_tokenizers(TOKENIZER, train_tokenizer(["z y x w"], 290))


def test_uninterrupted_delays_and_does_not_lose():
    """SIGINT in the middle of a write arrives after it."""
    done = []
    with pytest.raises(KeyboardInterrupt):
        with train_file.uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("written")
    assert done == ["written"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("moment", ["sft", "rl", "save"])
def test_sigint_leaves_whole_files(tmp_path, moment):
    """Killed in the warm start, in a step and while a model is saved: every line of metrics.jsonl parses, no
    temporary file stays, and what is called a model loads."""
    process = subprocess.Popen(
        [
            sys.executable,
            train_file.__file__,
            *FAST,
            "--run_dir",
            "r",
            "--steps",
            "1000",
            "--save_every",
            "1",
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    run, deadline = tmp_path / "r", time.time() + 120

    def reached():
        text = (run / "metrics.jsonl").read_text() if (run / "metrics.jsonl").exists() else ""
        return {
            "sft": '"warm_start"' in text,
            "rl": text.count('"rl"') >= 2,
            "save": '"rl"' in text and any(run.glob(".saving-*/new")),
        }[moment]

    while not reached() and process.poll() is None and time.time() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert (
        process.returncode == 1
        and "interrupted; what was computed so far is in r" in stderr
        and "Traceback" not in stderr
    )
    assert metrics(run) and all("stage" in m for m in metrics(run))
    assert not [p for p in run.iterdir() if p.name.startswith(".") or p.suffix == ".part"]
    assert all(p.name.startswith("step-") for p in run.glob("checkpoints/*"))
    for folder in run.iterdir():
        if folder.is_dir() and folder.name != "checkpoints":
            AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def toy_files(folder):
    """A world as files: questions in FlashRAG's format, half for training, and passages in wiki-18's."""
    world = ToyWiki(0)
    tasks = list({task.questions: task for task in world.tasks(60, 1)}.values())
    for name, part in (("train", tasks[:20]), ("test", tasks[20:30])):
        lines = [{"id": t.id, "question": t.questions[0], "golden_answers": list(t.answers[0])} for t in part]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    (folder / "corpus.jsonl").write_text(
        "".join(json.dumps({"contents": f'"{p.title}"\n{p.text}'}) + "\n" for p in world.passages)
    )
    return ["--questions", str(folder / "train.jsonl"), "--test_questions", str(folder / "test.jsonl"),
            "--corpus", str(folder / "corpus.jsonl")]  # fmt: skip


def test_tasks_of_files(tmp_path):
    """Every training question once an epoch, in another order each; the held-out ones the same for every seed; a
    question in both is refused."""
    files = toy_files(tmp_path)
    config = parse_config([*files, "--student", "x", "--teacher", "x", "--horizons", "2"])
    tasks = open_data(config)
    used = [q for step in range(5) for task, _ in tasks("train", 2, 2, step) for q in task.questions]
    assert len(used) == len(set(used)) == 20
    again = [q for step in range(5, 10) for task, _ in tasks("train", 2, 2, step) for q in task.questions]
    assert set(again) == set(used) and again != used
    assert len(tasks("train", 15, 2, 0)) == 15  # more than an epoch has
    assert len(tasks("test", 99, 2)) == 5
    config = parse_config([*files, "--student", "x", "--teacher", "x", "--horizons", "2", "--seed", "1"])
    assert open_data(config)("test", 99, 2) == [(t, ANY) for t, _ in tasks("test", 99, 2)]
    (env, *_) = make_envs(tasks("train", 1, 2), TOKENIZER, config)
    assert env.budget == 1000 and env.length("a b") == len(TOKENIZER.encode("a b"))
    (tmp_path / "test.jsonl").write_text((tmp_path / "train.jsonl").read_text().splitlines()[3] + "\n")
    with pytest.raises(ValueError, match="is a training question too"):
        open_data(config)


@pytest.mark.parametrize(
    "args, message",
    [
        (["--stage", "warm_start", "--student", "x", "--teacher", "y"], "takes no --student"),
        (["--questions", "q"], "go together"),
        (["--questions", "q", "--corpus", "c"], "needs a --student"),
        (["--test_questions", "q"], "go together"),
        (["--stage", "sft", "--student", "x"], "needs --sft_data"),
        (["--sft_data", "x"], "needs --sft_data and a --student"),
    ],
)
def test_data_flags_that_do_not_fit(args, message, capsys):
    with pytest.raises(SystemExit):
        parse_config(args)
    assert message in capsys.readouterr().err


def test_train_on_files(runs, tmp_path):
    """Real questions, passages and models by their flags, from the sizes that are printed to the last table."""
    folder, _ = runs
    models = ["--student", str(folder / "a/warm_start"), "--teacher", str(folder / "a/teacher")]
    out = command(*FAST, *toy_files(tmp_path), *models, "--run_dir", "r", "--steps", "2", cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    assert "train: 20 questions make 10 tasks of 2" in out.stdout and "| Q2 | student |" in out.stdout
    assert "test: 10 questions make 10 tasks of 1" in out.stdout
    out = command(*FAST, *toy_files(tmp_path)[:2], "--corpus", str(tmp_path / "corpus.jsonl"), *models,
                  "--run_dir", "s", "--steps", "1", cwd=tmp_path)  # fmt: skip
    assert out.returncode == 0 and "one training task after training" in out.stdout + out.stderr


def test_episodes_kept_as_text_are_learned_by_another_tokenizer(runs, tmp_path):
    """The contexts are those of a rollout with the learner's own tokenizer; the stage lowers its loss on them and
    leaves a student that loads."""
    folder, _ = runs
    envs = toy_envs("sft", 6, 2)
    kept = rollout(scripted(ToyWiki.expert, TOKENIZER, envs), TOKENIZER, envs, step_all, mem1)
    path = tmp_path / "kept.jsonl"
    append(path, (as_text(env, t, TOKENIZER) for env, t in zip(envs, kept)))
    other = AutoTokenizer.from_pretrained(folder / "a/warm_start")
    envs = toy_envs("sft", 6, 2)
    expected = rollout(scripted(ToyWiki.expert, other, envs), other, envs, step_all, mem1)
    found = replay(str(path), other, mem1)
    assert other.get_vocab() != TOKENIZER.get_vocab()
    for a, b in zip(found, expected, strict=True):
        assert [(c.prompt_ids, c.action_ids) for c in a.calls] == [
            (c.prompt_ids, c.action_ids) for c in b.calls
        ]
    args = [
        "--stage",
        "sft",
        "--sft_data",
        str(path),
        "--student",
        str(folder / "a/warm_start"),
        "--device",
        "cpu",
    ]
    out = command(
        *args,
        "--run_dir",
        "r",
        "--sft_epochs",
        "8",
        "--tasks_per_step",
        "3",
        "--sft_lr",
        "1e-2",
        cwd=tmp_path,
    )
    assert out.returncode == 0, out.stderr
    losses = [json.loads(line)["loss"] for line in (tmp_path / "r/metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 16 and losses[-1] < 0.7 * losses[0]
    AutoModelForCausalLM.from_pretrained(tmp_path / "r/student")
    with open(path, "a") as f:
        f.write('{"task": "x", "prompt": "q", "turns": [{"response": "", "observation": ""}]}\n')
    with pytest.raises(ValueError, match="kept.jsonl, line 7: no episode"):
        replay(str(path), other, mem1)


def test_sft_does_not_depend_on_packs(runs, tmp_path):
    """One update from two packs is the update from one: weighted by tokens, not by packs."""
    folder, _ = runs
    envs = toy_envs("sft", 4, 2)
    kept = rollout(scripted(ToyWiki.expert, TOKENIZER, envs), TOKENIZER, envs, step_all, mem1)
    append(tmp_path / "kept.jsonl", (as_text(env, t, TOKENIZER) for env, t in zip(envs, kept)))
    student = str(folder / "a/warm_start")
    args = [
        "--stage",
        "sft",
        "--sft_data",
        str(tmp_path / "kept.jsonl"),
        "--student",
        student,
        "--device",
        "cpu",
    ]
    losses = []
    for name, tokens in (("one", "100000"), ("many", "700")):
        out = command(
            *args,
            "--run_dir",
            name,
            "--max_tokens",
            tokens,
            "--tasks_per_step",
            "4",
            "--sft_epochs",
            "2",
            cwd=tmp_path,
        )
        assert out.returncode == 0, out.stderr
        losses.append(
            [
                json.loads(line)["loss"]
                for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
            ]
        )
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def start_from(folder):
    """Flags of a run that needs no warm start."""
    return [
        *FAST,
        "--student",
        str(folder / "a/warm_start"),
        "--teacher",
        str(folder / "a/teacher"),
        "--eval_questions",
        "0",
    ]


def without_seconds(folder):
    return [{k: v for k, v in m.items() if not k.startswith("seconds")} for m in metrics(folder)]


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "student").state_dict()


def killed_at(file, *args, cwd):
    """Start train.py, and kill it as soon as the file is there."""
    process = subprocess.Popen(
        [sys.executable, train_file.__file__, *args],
        cwd=cwd,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not (cwd / file).exists() and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.wait()


def test_a_killed_run_goes_on_bit_for_bit(runs, tmp_path):
    """4 steps at once, and 2 steps, SIGKILL, and 2 more: the same metrics and weights; other settings are refused."""
    folder, _ = runs
    args = [*start_from(folder), "--steps", "4", "--save_every", "2"]
    out = command(*args, "--run_dir", "whole", cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    killed_at("killed/checkpoints/step-000002", *args, "--run_dir", "killed", cwd=tmp_path)
    assert len(checkpoints(tmp_path / "killed")) == 1
    (tmp_path / "killed/checkpoints/.saving-x").mkdir()  # what a kill in the middle of a save leaves
    out = command(*args, "--run_dir", "killed", "--resume", "--actor_lr", "1", cwd=tmp_path)
    assert out.returncode == 1 and "was made with --actor_lr" in out.stderr
    out = command(*args, "--run_dir", "killed", "--resume", cwd=tmp_path)
    assert out.returncode == 0 and "goes on after 2 steps" in out.stdout + out.stderr, out.stderr
    assert without_seconds(tmp_path / "killed") == without_seconds(tmp_path / "whole")
    whole, killed = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert whole.keys() == killed.keys() and all(whole[k].equal(killed[k]) for k in whole)
    assert [p.name for p in checkpoints(tmp_path / "killed")] == ["step-000002", "step-000004"]
    assert not list((tmp_path / "killed").glob("checkpoints/.saving-*"))


def test_a_warm_start_that_was_killed_begins_anew(runs, tmp_path):
    """Before the first checkpoint; and one that was finished is not made again. What models from files then do is what
    those in memory did in the uninterrupted run."""
    warm = [*range(6), 6, 7, *range(6, 12)]  # the student's branch, and the teacher's steps
    killed_at("r/metrics.jsonl", *FAST, "--run_dir", "r", cwd=tmp_path)
    out = command(*FAST, "--run_dir", "r", "--resume", "--steps", "1", cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    assert [m["step"] for m in metrics(tmp_path / "r")] == [*warm, 0]
    before = (tmp_path / "r/teacher/model.safetensors").stat().st_mtime_ns
    out = command(*FAST, "--run_dir", "r", "--resume", "--steps", "2", cwd=tmp_path)
    assert out.returncode == 0 and [m["step"] for m in metrics(tmp_path / "r")] == [*warm, 0, 1], out.stderr
    assert (tmp_path / "r/teacher/model.safetensors").stat().st_mtime_ns == before
    assert without_seconds(tmp_path / "r") == without_seconds(runs[0] / "a")[:16]


def test_the_student_is_a_branch_that_leaves_the_teacher_as_it_was(runs, tmp_path):
    """Its own steps change nothing in the teacher's run, to the last bit."""
    out = command(*FAST, "--stage", "warm_start", "--sft_anneal", "5", "--run_dir", "r", cwd=tmp_path)
    assert out.returncode == 0 and sorted(p.name for p in (tmp_path / "r").iterdir()) == [
        "config.json", "metrics.jsonl", "teacher", "warm_start"
    ], out.stderr  # fmt: skip
    losses = [
        [(m["step"], m["loss"]) for m in metrics(folder, "warm_start") if m["model"] == "teacher"]
        for folder in (runs[0] / "a", tmp_path / "r")
    ]
    assert losses[0] == losses[1]
    models = [
        AutoModelForCausalLM.from_pretrained(folder / name).state_dict()
        for name in ("teacher", "warm_start")
        for folder in (runs[0] / "a", tmp_path / "r")
    ]
    assert all(models[0][k].equal(models[1][k]) for k in models[0])
    assert not all(models[2][k].equal(models[3][k]) for k in models[2])
    branch = [m["step"] for m in metrics(tmp_path / "r", "warm_start") if m["model"] == "student"]
    assert branch == [6, 7, 8, 9, 10]


def test_only_the_last_checkpoints_stay(tmp_path):
    student, critic = tiny(), make_critic(tiny())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (student, critic)]
    for step in range(1, 5):
        for model, optimizer in zip((student, critic), optimizers):
            sum(p.square().sum() for p in model.parameters()).backward()
            optimizer.step()
        trained = {"student": (student, optimizers[0]), "critic": (critic, optimizers[1])}
        save_checkpoint(tmp_path, step, trained, keep=2)
    assert [p.name for p in checkpoints(tmp_path)] == ["step-000003", "step-000004"]
    expected = [p.clone() for p in [*student.parameters(), *critic.parameters()]]
    moments = [s["exp_avg_sq"].clone() for o in optimizers for s in o.state.values()]
    fresh, fresh_critic = tiny(seed=1), make_critic(tiny(seed=1))
    new = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (fresh, fresh_critic)]
    assert resume(tmp_path, {"student": (fresh, new[0]), "critic": (fresh_critic, new[1])}) == 4
    assert all(
        a.equal(b) for a, b in zip(expected, [*fresh.parameters(), *fresh_critic.parameters()], strict=True)
    )
    assert all(
        a.equal(s["exp_avg_sq"])
        for a, s in zip(moments, [s for o in new for s in o.state.values()], strict=True)
    )
    assert {int(s["step"]) for o in new for s in o.state.values()} == {4}


def test_what_is_not_finite_stops_before_it_reaches_a_weight():
    """The metric and the first parameter are named, and no optimizer steps."""
    records = trajectories("mem1")
    config = parse_config(["--device", "cpu"])
    student, teacher = (tiny(vocab_size=len(TOKENIZER), seed=s) for s in (0, 1))
    critic, packs = make_critic(student), pack_calls(records, config)
    batch = batch_of(student, critic, teacher, packs, config)
    batch.advantages[3] = torch.inf

    class Never(torch.optim.SGD):
        def step(self):
            raise AssertionError("stepped")

    optimizers = [Never(m.parameters(), lr=0) for m in (student, critic)]
    with pytest.raises(FloatingPointError, match="is (nan|-?inf), and so is the gradient of model"):
        update_policy(student, critic, optimizers, packs, batch, head(teacher), config, Clock("cpu"))


def test_guards_stop_a_run(runs, tmp_path, monkeypatch):
    """A sampler that disagrees with the packs, unless it may; a gradient that is not finite, with the step and
    the last good checkpoint."""
    folder, _ = runs
    monkeypatch.chdir(tmp_path)
    args = [*start_from(folder), "--steps", "2", "--save_every", "1"]
    real = train_file.generate

    def off(*args):
        ids, logprobs = real(*args)
        return ids, [[x - 0.01 for x in row] for row in logprobs]

    monkeypatch.setattr(train_file, "generate", off)
    with pytest.raises(ValueError, match="step 0: logp_mismatch p99 1.0e-02 is over 0.001"):
        train_file.train(parse_config([*args, "--run_dir", "x"]))
    train_file.train(parse_config([*args, "--run_dir", "y", "--allow_mismatch"]))
    monkeypatch.setattr(train_file, "generate", real)
    values = train_file.advantages_of

    def infinite(trajectories, *args):
        advantages, returns = values(trajectories, *args)
        infinite.calls += 1
        return (advantages + (torch.inf if infinite.calls == 2 else 0)), returns

    infinite.calls = 0
    monkeypatch.setattr(train_file, "advantages_of", infinite)
    with pytest.raises(
        ValueError,
        match=r"step 1: .* is (nan|-?inf).*the last good checkpoint is z/checkpoints/step-000001",
    ):
        train_file.train(parse_config([*args, "--run_dir", "z"]))
