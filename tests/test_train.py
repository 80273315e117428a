"""The training loop: what must be exact, what must be equal, and what a wrong flag or a kill leaves
behind."""

import json
import re
import shutil
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
from conftest import FAST, command, here
from env import ToyWiki, toy_envs, toy_texts
from eval import append, as_text
from losses import gae
from pack import action_hidden, pack
from rollout import Call, Trajectory, check_tokenizers, load_trajectories, mem1, replay, rollout
from rollout import scripted, train_tokenizer, uninterrupted
from test_rce import TOKENIZER, trajectories
from tiny import tiny
from train import (
    Batch,
    Config,
    Models,
    advantages_of,
    checkpoints,
    clock,
    hidden_of,
    load_model,
    log_prob_of,
    make_critic,
    open_data,
    pack_calls,
    pack_histories,
    parse_config,
    print_learned,
    search_tasks,
    resume,
    save_checkpoint,
    update_policy,
    values_of,
)


def metrics(run, stage=None):
    """The lines of metrics.jsonl, all or those of one stage."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if stage in (None, line["stage"])]


def without_seconds(run):
    """The lines without what depends on the clock."""
    found = []
    for line in metrics(run):
        found.append({k: v for k, v in line.items() if not k.startswith("seconds")})
    return found


def weights(run, name="student"):
    return AutoModelForCausalLM.from_pretrained(run / name).state_dict()


def same_weights(a, b):
    """To the last bit."""
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


def pair(folder):
    """Flags that take the models of a run of the fixture `runs`."""
    student, teacher = folder / "a/warm_start", folder / "a/teacher"
    return ["--student", str(student), "--teacher", str(teacher)]


def start_from(folder, *more):
    """Flags of a run that needs no warm start and prints no table."""
    return [*FAST, *pair(folder), "--eval_questions", "0", *more]


def expert_rollout(sample, tokenizer, envs, *rest):
    """Episodes of several calls that do not depend on a model."""
    return rollout(scripted(ToyWiki.expert, tokenizer, envs), tokenizer, envs, *rest)


# ---- a run ---------------------------------------------------------------------------------------
def test_run_leaves_what_it_says(runs):
    """Models that load anywhere with their tokenizer, metrics, trajectories, the table, two decoded
    episodes; nothing half-written."""
    folder, out = runs
    run, printed = folder / "a", out["a"].stdout
    expected = "checkpoints config.json metrics.jsonl student table.md teacher trajectories.jsonl"
    assert sorted(p.name for p in run.iterdir()) == [*expected.split(), "warm_start"]
    model = AutoModelForCausalLM.from_pretrained(run / "student")
    tokenizer = AutoTokenizer.from_pretrained(run / "student")
    # AutoTokenizer silently replaces the tokenizer saved with some model types by the type's own
    text = "<think> known next river of Guso </think> ( 9 ) 😀"
    trained = Tokenizer.from_file(str(run / "student/tokenizer.json"))
    assert tokenizer.encode(text) == trained.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<think> known")[0] == tokenizer.get_vocab()["<think>"]
    assert len(tokenizer) == model.config.vocab_size
    assert len(load_trajectories(run / "trajectories.jsonl")) == 6
    assert len(metrics(run, "warm_start")) == 14 and len(metrics(run, "rl")) == 3
    assert printed.count("| Q1 |") == 3 and "| Q2 | teacher |" in printed
    assert "teacher |" not in out["none"].stdout
    config = json.loads((run / "config.json").read_text())
    assert config["sft_steps"] == 12
    assert config["actor_lr"] == train_file.PRESETS["tiny"]["actor_lr"]


def test_the_same_task_is_printed_before_and_after(runs):
    for out in runs[1].values():
        pattern = r"--- one held-out task (before|after) training: em .*\n(q: (?:.*\n)+?)a_0"
        (before, question), (after, same) = re.findall(pattern, out.stdout)
        assert (before, after) == ("before", "after") and question == same


def test_every_step_notes_the_seconds_of_its_paragraphs(runs):
    for name in ("a", "history", "none"):
        for line in metrics(runs[0] / name, "rl"):
            seconds = {key: x for key, x in line.items() if key.startswith("seconds")}
            paragraphs = "rollout pack score audit update".split()
            assert sorted(seconds) == sorted(f"seconds_{part}" for part in paragraphs)
            assert min(seconds.values()) > 0


def test_first_ratio_is_exactly_one_and_sampling_agrees(runs):
    """Before the first update of a step the ratio is 1 in every token and nothing is clipped, after
    it not; what was sampled agrees with the pack. Would catch a state that differs anywhere between
    rollout, old and new scores."""
    for name in ("a", "history", "none"):
        for line in metrics(runs[0] / name, "rl"):
            assert line["first_max_logratio"] == line["first_clipfrac"] == 0
            assert line["max_logratio"] > 0
            assert line["logp_mismatch"] <= line["logp_mismatch_max"] <= 1e-4


def test_same_seed_same_metrics(runs):
    folder, _ = runs
    assert without_seconds(folder / "a") == without_seconds(folder / "b")


def test_variants_share_all_but_the_teacher(tmp_path, monkeypatch):
    """The matched control: from the same models and the same episodes (the expert's, of several
    calls) everything before the update is equal but the teacher's KL; and PPO alone has none."""
    tokenizer = train_tokenizer(toy_texts(), 600)
    for name, seed in (("student", 0), ("teacher", 1)):
        tiny("llama", seed=seed, vocab_size=len(tokenizer)).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    monkeypatch.setattr(train_file, "rollout", expert_rollout)
    settings = (
        "--device cpu --steps 1 --ppo_epochs 1 --horizon 2 --tasks_per_step 3 --eval_questions 0 "
        "--max_len 2000 --max_new_tokens 16 --allow_mismatch"  # the expert has no log-probs
    )
    args = ["--student", str(tmp_path / "student"), "--teacher", str(tmp_path / "teacher")]
    args += settings.split()
    first = {}
    for variant in ("aligned", "history", "none"):
        more = ["--distill", variant, "--run_dir", str(tmp_path / variant)]
        train_file.train(parse_config([*args, *more]))
        (first[variant],) = metrics(tmp_path / variant, "rl")
    aligned = first["aligned"]
    assert aligned["reward"] == aligned["em"] == aligned["f1"] == 2
    assert aligned["calls"] > 6 and aligned["answered"] == 1
    prefixes, actions, tokens = set(), 0, 0  # every distinct prefix is one token of the tree
    for trajectory in load_trajectories(tmp_path / "aligned/trajectories.jsonl"):
        for call in trajectory.calls:
            path = tuple(call.prompt_ids + call.action_ids)
            prefixes |= {path[: n + 1] for n in range(len(path))}
            actions += len(call.action_ids)
            tokens += len(path)
    assert aligned["action_tokens"] == actions
    assert aligned["tokens_saved"] == pytest.approx(1 - len(prefixes) / tokens)
    equal = "reward calls action_tokens logp_mismatch first_max_logratio ppo_loss entropy"
    for name in ("history", "none"):
        for key in equal.split():
            assert first[name][key] == pytest.approx(aligned[key], abs=1e-6), (name, key)
    assert aligned["teacher_kl"] > 0 and first["none"]["teacher_kl"] == 0
    assert abs(first["history"]["teacher_kl"] - aligned["teacher_kl"]) > 1e-3


# ---- the parts of a step -------------------------------------------------------------------------
def models_of(student, critic, teacher, optimizer):
    """What an update needs, with an optimizer of this class for each that is trained."""
    trained = {}
    for name, model in (("student", student), ("critic", critic)):
        trained[name] = (model, optimizer(model.parameters(), lr=0))
    teacher_head = teacher.get_output_embeddings().weight.detach()
    return Models(None, student, critic, None, teacher, teacher_head, trained)


@torch.no_grad()
def batch_of(models, packs):
    """Scores and arbitrary advantages for recorded trajectories."""
    logp = torch.cat([log_prob_of(models.student, packed, 1.0) for packed in packs])
    values = torch.cat([values_of(models.critic, packed) for packed in packs])
    hidden = torch.cat([hidden_of(models.teacher, packed) for packed in packs])
    generator = torch.Generator().manual_seed(0)
    advantages, noise = torch.randn(2, len(logp), generator=generator)
    mask = torch.ones(len(logp), dtype=torch.bool)
    return Batch(logp + 0.1 * noise, values, advantages, advantages + values, hidden, mask)


@pytest.mark.parametrize(
    "change", [{"max_tokens": 110}, {"share": "q"}, {"share": "q", "max_tokens": 150}]
)
def test_gradients_depend_on_neither_packs_nor_share(change):
    """Loss and gradient within 1e-5 relative: sums are divided by the N of the batch. Would catch a
    mean of means and a second division."""
    records, results = trajectories("mem1"), []
    settings = {"max_len": 200, "ppo_epochs": 1, "max_grad_norm": 1e9, "distill_coef": 0.5}
    base = Config(device="cpu", **settings)
    teacher = tiny(seed=1, vocab_size=len(TOKENIZER)).requires_grad_(False)
    for config in (base, replace(base, **change)):
        gradients = []

        class Keep(torch.optim.SGD):
            def step(self):
                for group in self.param_groups:
                    gradients.extend(p.grad.clone() for p in group["params"])

        student = tiny(vocab_size=len(TOKENIZER))
        critic = make_critic(student)
        torch.nn.init.ones_(critic.score.weight)
        models, packs = models_of(student, critic, teacher, Keep), pack_calls(records, config)
        found = update_policy(models, packs, batch_of(models, packs), config)
        results.append((found, gradients, len(packs)))
    (a, gradients_a, n_a), (b, gradients_b, n_b) = results
    assert n_a == 1 and (n_b > 1) == ("max_tokens" in change)
    for key in a:
        assert a[key] == pytest.approx(b[key], rel=1e-5, abs=1e-6), key
    for x, y in zip(gradients_a, gradients_b, strict=True):
        assert (x - y).norm() <= 1e-5 * max(x.norm(), 1e-3)


def test_what_is_not_finite_stops_before_it_reaches_a_weight():
    """Step, metric and the first parameter are named, and no optimizer steps."""

    class Never(torch.optim.SGD):
        def step(self):
            raise AssertionError("stepped")

    config = parse_config(["--device", "cpu"])
    student, teacher = (tiny(vocab_size=len(TOKENIZER), seed=seed) for seed in (0, 1))
    models = models_of(student, make_critic(student), teacher, Never)
    packs = pack_calls(trajectories("mem1"), config)
    batch = batch_of(models, packs)
    batch.advantages[3] = torch.inf
    message = "step 7: .* is (nan|-?inf), and so is the gradient of model"
    with pytest.raises(FloatingPointError, match=message):
        update_policy(models, packs, batch, config, step=7)


def test_clock_notes_the_seconds_of_each_block(monkeypatch):
    times, cost = iter([0.0, 1.0, 3.0, 7.0]), {}
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    for name in ("a", "b"):
        with clock(cost, name):
            pass
    assert (cost["seconds_a"], cost["seconds_b"]) == (1.0, 4.0)


def test_rewards_stand_on_the_last_token_of_their_call_and_stay_in_their_trajectory():
    """Eq. 8 and 9 on three episodes with reward 1 a call: with gamma = lambda = 1, V = 0 and the
    policy at its reference, a token's advantage is the number of calls of its own trajectory from
    its own on; the penalty is beta times the growth that is still to come; whitened it has mean 0
    and deviation 1."""
    records, calls_left, ends = trajectories("mem1"), [], []
    for trajectory in records:
        for i, call in enumerate(trajectory.calls):
            calls_left += [float(len(trajectory.calls) - i)] * len(call.action_ids)
            ends.append(len(calls_left) - 1)
    expected = torch.tensor(calls_left)
    zero = torch.zeros_like(expected)
    config = Config(whiten_advantages=False, kl_coef=0.5)
    advantages, returns = advantages_of(records, zero, zero, zero, config)
    assert advantages.equal(expected) and returns.equal(expected)
    config = replace(config, gamma=0.0)
    last_only, _ = advantages_of(records, zero, zero, zero, config)
    assert last_only.nonzero()[:, 0].tolist() == ends
    penalised, _ = advantages_of(records, zero, zero - 1, zero, config)
    torch.testing.assert_close(penalised, last_only - 0.5)
    white, _ = advantages_of(records, zero, zero, zero, Config())
    torch.testing.assert_close(white, (expected - expected.mean()) / expected.std(correction=0))


def test_gae_with_two_trajectories_in_one_pack_in_interleaved_call_order():
    """Calls a0 b0 a1 b1 in one pack: read V in call order, follow each trajectory by call_idx, and
    Eq. 9 is that of each trajectory packed alone. Would catch physical order taken for time, and
    values that leak across."""
    model = make_critic(tiny())
    torch.nn.init.normal_(model.score.weight)
    a = [([1, 2], [3, 4]), ([1, 2, 9], [5])]
    b = [([1, 3], [3]), ([1, 3, 8, 9], [6, 7, 8])]
    packed = pack(*zip(a[0], b[0], a[1], b[1]))
    owner = torch.tensor([0, 1, 0, 1])[packed.call_idx]
    by_trajectory = owner.argsort(stable=True)
    last = torch.tensor([0, 0, 1, 0, 0, 0, 1]).bool()
    with torch.no_grad():
        values = values_of(model, packed)[by_trajectory]
        together, _ = gae(torch.ones(7), values, last, 0.9, 0.8)
        for calls, part in ((a, slice(0, 3)), (b, slice(3, 7))):
            alone = values_of(model, pack(*zip(*calls)))
            expected, _ = gae(torch.ones(len(alone)), alone, last[part], 0.9, 0.8)
            torch.testing.assert_close(together[part], expected)


def test_critic_shares_nothing_with_the_student():
    """A shared config flips the other's attention; a shared tensor trains both."""
    student = tiny()
    critic = make_critic(student)
    assert critic.body.config is not student.config
    ours = {p.data_ptr() for p in critic.parameters()}
    assert not ours & {p.data_ptr() for p in student.parameters()}
    packed = pack([[1, 2]], [[3, 4]])
    assert values_of(critic, packed).tolist() == [0, 0]
    torch.testing.assert_close(action_hidden(critic.body, packed), action_hidden(student, packed))


def test_history_packs_keep_the_order_of_the_calls():
    """Teacher rows of the control line up with the aligned ones: same actions, same calls, and
    before the first rewrite the same state."""
    records, config = trajectories("mem1"), Config(device="cpu")
    (aligned,), histories = pack_calls(records, config), pack_histories(records, config)
    assert torch.cat([h.action_ids for h in histories]).equal(aligned.action_ids)
    model = tiny(vocab_size=len(TOKENIZER))
    with torch.no_grad():
        a = action_hidden(model, aligned)
        h = torch.cat([action_hidden(model, packed) for packed in histories])
    first = len(records[0].calls[0].action_ids)
    torch.testing.assert_close(a[:first], h[:first], rtol=0, atol=1e-4)
    assert (a - h).abs()[first:].max() > 0.1


def test_curriculum_and_schedule():
    """Short tasks first, every length on the way, none beyond the horizon; a learning rate that is
    never 0."""
    lengths = [train_file.sft_longest(step / 1000, 16) for step in range(1000)]
    assert lengths == sorted(lengths) and set(lengths) == set(range(3, 17))
    assert lengths.count(3) > 300
    assert {train_file.sft_longest(done, 2) for done in (0.0, 0.5, 1.0)} == {2}
    rates = [train_file.sft_rate(step / 1000) for step in range(1001)]
    assert 0 < min(rates) and max(rates) == 1.0 and rates[0] < 0.1 and rates[-1] < 0.1


def texts_of(step, longest, respond, **settings):
    """What a batch of SFT shows and teaches, as text."""
    batch = train_file.sft_batch(step, longest, respond, TOKENIZER, Config(**settings))
    return [[TOKENIZER.decode(ids) for ids in part] for part in batch]


def test_a_batch_of_sft_is_an_expert_s_tasks():
    """At least as many questions as asked for, none longer than the curriculum allows, the same for
    any expert; with tight budgets the last turn is seen, and what is known answered there."""
    prompts, actions = texts_of(3, 4, ToyWiki.expert, sft_tight=0.0)
    questions = {prompt.split("\n")[1] for prompt in prompts}
    sizes = [question.count(" ; ") + 1 for question in questions]
    assert 32 <= sum(sizes) < 36 and max(sizes) <= 4
    assert not any("last turn" in prompt for prompt in prompts)

    def habit(env):
        return ToyWiki.expert(env, first_hop=1.0)

    wrong_prompts, wrong_actions = texts_of(3, 4, habit, sft_tight=0.0)
    assert {prompt.split("\n")[1] for prompt in wrong_prompts} == questions
    assert set(actions) != set(wrong_actions) and len(wrong_actions) < len(actions)
    tight_prompts, tight_actions = texts_of(3, 4, ToyWiki.expert, sft_tight=1.0)
    last = [a for p, a in zip(tight_prompts, tight_actions) if "last turn" in p]
    assert len(last) >= 5 and all("<answer>" in action for action in last)
    assert texts_of(3, 4, ToyWiki.expert, sft_tight=1.0) == [tight_prompts, tight_actions]


def test_muon_takes_steps_whose_singular_values_are_equal():
    """After two gradients, by the eigenvectors of M M^T in float64: lr sqrt(rows / columns) U V^T
    for a high matrix and lr U V^T for a wide one, where M is the Nesterov momentum."""
    rng = torch.Generator().manual_seed(0)
    for shape, scale in (((6, 3), 2**0.5), ((3, 6), 1.0), ((4, 4), 1.0)):
        p = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))
        optimizer, momentum = train_file.Muon([p]), torch.zeros_like(p)
        optimizer.param_groups[0]["lr"] = 0.25
        for _ in range(2):
            before = p.detach().clone()
            p.grad = torch.randn(shape, generator=rng, dtype=torch.float64)
            momentum = 0.95 * momentum + 0.05 * p.grad
            M = 0.05 * p.grad + 0.95 * momentum
            optimizer.step()
            moved = (before - p.detach()) / (0.25 * scale)
            values, vectors = torch.linalg.eigh(M @ M.T)
            kept = values > 1e-9 * values.max()
            root = vectors[:, kept] * values[kept].rsqrt() @ vectors[:, kept].T
            torch.testing.assert_close(moved, root @ M)


class Agent(torch.nn.Module):
    """Answers the first right[i] questions of task i, in the order in which it meets the tasks."""

    def __init__(self, name, *right):
        super().__init__()
        self.name, self.right = name, right


def answer(model, tokenizer, envs, *settings, progress=None):
    """Instead of `evaluate`: episodes of one call, whose text says whose they are."""
    trajectories = []
    for i, env in enumerate(envs):
        n = model.right[i] if i < len(model.right) else 0
        env.answers = [accepted[0] for accepted in env.task.answers[:n]]
        ids = tokenizer.encode(f"{model.name} on task {i}")
        call = Call([1], ids, [0.0] * len(ids), [])
        trajectories.append(Trajectory(env.task.id, 1, [call]))
    return {}, trajectories


def printed_task(monkeypatch, capsys, reference, student, tasks, config):
    """(kind, when, scores, episode) of both episodes that a run prints at its end."""
    monkeypatch.setattr(train_file, "evaluate", answer)
    old, new = Agent("old", *reference), Agent("new", *student)
    print_learned(Models(TOKENIZER, new, None, old, None, None, {}), tasks, config)
    layout = r"--- one (.*) task (.*) training: (.*), f1 .*\nq: .*\na_0 .*: (.*)"
    return re.findall(layout, capsys.readouterr().out)


@pytest.mark.parametrize(
    "reference, student, expected",
    [
        ((2, 0, 0, 0), (2, 1, 2, 2), 2),  # the first of those that rose most
        ((1, 2, 2), (1, 1, 2), 0),  # nothing was learned
        ((0,) * 32, (0,) * 31 + (2,), 31),
        ((0,) * 33, (0,) * 32 + (2,), 0),  # it does not look further
    ],
)
def test_the_printed_task_is_one_that_was_learned(
    monkeypatch, capsys, reference, student, expected
):
    """Of 32 held-out tasks the one whose EM rose most, as reference and student do it."""
    config = parse_config(["--device", "cpu", "--horizon", "2"])
    tasks = search_tasks(open_data(config), TOKENIZER, config)
    found = printed_task(monkeypatch, capsys, reference, student, tasks, config)
    em = [right[expected] if expected < len(right) else 0 for right in (reference, student)]
    assert found == [
        ("held-out", "before", f"em {em[0]}", f"old on task {expected}"),
        ("held-out", "after", f"em {em[1]}", f"new on task {expected}"),
    ]


def test_a_training_task_is_printed_where_none_is_held_out(monkeypatch, capsys):
    config = parse_config("--device cpu --distill none --offload".split())
    toy = search_tasks(open_data(config), TOKENIZER, config)

    def tasks(split, *args):
        return [] if split == "test" else toy(split, *args)

    found = printed_task(monkeypatch, capsys, (0,), (2,), tasks, config)
    assert [(kind, episode) for kind, _, _, episode in found] == [
        ("training", "old on task 0"),
        ("training", "new on task 0"),
    ]


# ---- the command line ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    "args, message",
    [
        ("--preset huge", "invalid choice: 'huge'"),
        ("--distill both", "invalid choice: 'both'"),
        ("--stepz 3", "unknown arguments: --stepz 3"),
        ("--steps many", "invalid int value: 'many'"),
        ("--steps 0", "--steps must be positive"),
        ("--horizons 2 x", "argument --horizons: invalid int value: 'x'"),
        ("--horizons 2 0", "--horizons takes question counts"),
        ("--max_len 100", "leaves no room for a prompt"),
        ("--student x", "go together"),
        ("--update forget", "invalid choice: 'forget'"),
        ("--sft_give_up 2", "--sft_give_up"),
        ("--device toaster", "--device toaster is not there"),
        ("--hidden_size 40", "must be a multiple of 32"),
        ("--stage warm_start --student x --teacher y", "takes no --student"),
        ("--questions q", "go together"),
        ("--questions q --corpus c", "needs a --student"),
        ("--test_questions q", "go together"),
        ("--stage sft --student x", "needs --sft_data"),
        ("--sft_data x", "needs --sft_data and a --student"),
    ],
)
def test_wrong_flags_end_with_a_message(args, message, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_config(args.split())
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_help_explains_every_field():
    """Each flag with its symbol or meaning, its source and its default in the preset."""
    text = " ".join(here(train_file, "--help").stdout.split())
    for name, field in Config.__dataclass_fields__.items():
        assert f"--{name}" in text, name
        assert " ".join(field.metadata["help"].split())[:40] in text, name
    symbols = {"lambda": 11, "alpha": 11, "beta": 8, "epsilon": 10, "gamma": 9}
    for symbol, equation in symbols.items():
        assert f"{symbol} of Eq. {equation}" in text
    assert f"(default: {train_file.PRESETS['tiny']['actor_lr']})" in text


def test_precedence_is_defaults_preset_flags():
    presets, plain = train_file.PRESETS, Config()
    assert parse_config([]).ppo_epochs == presets["tiny"]["ppo_epochs"] != plain.ppo_epochs
    assert parse_config([]).gamma == plain.gamma
    assert parse_config(["--preset", "3b"]) == replace(plain, preset="3b", **presets["3b"])
    assert parse_config(["--ppo_epochs", "7"]).ppo_epochs == 7
    assert parse_config(["--no_whiten_advantages"]).whiten_advantages is False
    assert parse_config(["--horizons", "3", "1"]).horizons == [3, 1]


def in_process(monkeypatch, *args):
    """The command, in this process: a message that it ends with is SystemExit's."""
    monkeypatch.setattr("sys.argv", ["train.py", *args])
    train_file.main()


def test_an_existing_run_is_never_overwritten(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/metrics.jsonl").write_text("precious\n")
    out = here(train_file, *FAST, "--run_dir", "mine", cwd=tmp_path)
    assert out.returncode == 1 and "mine exists already" in out.stderr
    assert "Traceback" not in out.stderr
    assert (tmp_path / "mine/metrics.jsonl").read_text() == "precious\n"


def test_a_horizon_beyond_the_toy_is_refused_before_any_work(tmp_path, monkeypatch):
    args = [*FAST, "--horizons", "2", "300", "--run_dir", str(tmp_path / "r")]
    with pytest.raises(SystemExit, match="^train.py: .*no 300 questions"):
        in_process(monkeypatch, *args)
    assert not (tmp_path / "r").exists()


# ---- models and data from files ------------------------------------------------------------------
def test_models_from_folders(tmp_path, monkeypatch):
    """--student and --teacher skip the warm start; another width and vocabulary padding of the
    teacher are fine, another tokenizer is not."""
    student = tiny("llama", vocab_size=300)
    teacher = tiny("llama", vocab_size=310, hidden_size=64)
    for name, model in (("student", student), ("teacher", teacher)):
        model.save_pretrained(tmp_path / name)
        TOKENIZER.save_pretrained(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    more = "--max_len 2000 --steps 1 --student student --teacher teacher"
    args = [*FAST, *more.split()]
    in_process(monkeypatch, *args, "--run_dir", "r")
    assert metrics(tmp_path / "r", "rl")[0]["teacher_kl"] > 0
    assert not (tmp_path / "r/warm_start").exists()
    with pytest.raises(SystemExit, match="^train.py: q of .* do not fit into --max_len 180"):
        in_process(monkeypatch, *args, "--max_len", "180", "--run_dir", "r2")
    assert not (tmp_path / "r2").exists()
    train_tokenizer(["quite another text"], 280).save_pretrained("teacher")
    with pytest.raises(SystemExit, match="^train.py: .*different tokenizers"):
        in_process(monkeypatch, *args, "--run_dir", "r3")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    out = here(train_file, *args, "--teacher", "nowhere", "--run_dir", "r4")
    assert out.returncode == 1 and "nowhere" in out.stderr and "Traceback" not in out.stderr
    tiny("llama", vocab_size=100).save_pretrained("student")
    with pytest.raises(ValueError, match="the model only 100"):
        load_model("student", Config(device="cpu"))


def test_tokenizers_are_compared_by_id():
    check_tokenizers(TOKENIZER, TOKENIZER)
    with pytest.raises(ValueError, match="is id .* to the student,"):
        check_tokenizers(TOKENIZER, train_tokenizer(["z y x w"], 290))


def toy_files(folder):
    """A world as files: questions in FlashRAG's format, those for training in two files, and
    passages in wiki-18's. The flags that name them: for training, held out, and the passages."""
    world = ToyWiki(0)
    tasks = list({task.questions: task for task in world.tasks(60, 1)}.values())
    names = []
    for name, part in (("a", tasks[:12]), ("b", tasks[12:20]), ("test", tasks[20:30])):
        names.append(str(folder / f"{name}.jsonl"))
        with open(names[-1], "w") as f:
            for task in part:
                line = {"id": task.id, "question": task.questions[0]}
                f.write(json.dumps(line | {"golden_answers": list(task.answers[0])}) + "\n")
    with open(folder / "corpus.jsonl", "w") as f:
        for passage in world.passages:
            f.write(json.dumps({"contents": f'"{passage.title}"\n{passage.text}'}) + "\n")
    training, held_out = ["--questions", *names[:2]], ["--test_questions", names[2]]
    return training, held_out, ["--corpus", str(folder / "corpus.jsonl")]


def test_tasks_of_files(tmp_path):
    """Every training question once an epoch, in another order each; the held-out ones the same for
    every seed; a question in both is refused."""
    training, held_out, corpus = toy_files(tmp_path)
    args = "--student x --teacher x --horizons 2".split() + training + held_out + corpus
    config = parse_config(args)
    tasks = open_data(config)

    def epoch(steps):
        """The questions of these steps of 2 tasks each."""
        found = []
        for step in steps:
            for task, _ in tasks("train", 2, 2, step):
                found += task.questions
        return found

    used, again = epoch(range(5)), epoch(range(5, 10))
    assert len(used) == len(set(used)) == 20
    assert set(again) == set(used) and again != used
    assert len(tasks("train", 15, 2, 0)) == 15  # more than an epoch has
    test = tasks("test", 99, 2)
    other_seed = open_data(parse_config([*args, "--seed", "1"]))
    assert len(test) == 5 and other_seed("test", 99, 2) == [(task, ANY) for task, _ in test]
    (env,) = search_tasks(tasks, TOKENIZER, config)("train", 1, 2)
    assert env.budget == config.max_obs == 128 and env.length("a b") == len(TOKENIZER.encode("a b"))
    known = (tmp_path / "b.jsonl").read_text().splitlines()[3]
    (tmp_path / "test.jsonl").write_text(known + "\n")
    with pytest.raises(ValueError, match="is a training question too"):
        open_data(config)


def test_train_on_files(runs, tmp_path, monkeypatch, capsys):
    """Real questions, passages and models by their flags, from the sizes that are printed to the
    last table; without held-out questions a training task is printed instead."""
    training, held_out, corpus = toy_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    args = [*FAST, *training, *corpus, *pair(runs[0])]
    in_process(monkeypatch, *args, *held_out, "--run_dir", "r", "--steps", "2")
    printed = capsys.readouterr().out
    assert "train: 20 questions make 10 tasks of 2" in printed
    assert "test: 10 questions make 10 tasks of 1" in printed
    assert "one held-out task after training" in printed
    assert "| Q2 | student |" in printed
    in_process(monkeypatch, *args, "--run_dir", "s", "--steps", "1")
    assert "one training task after training" in capsys.readouterr().out


def kept_episodes(path, n):
    """Right episodes as `eval.py --keep_correct` writes them."""
    envs = toy_envs("sft", n, 2)
    kept = expert_rollout(None, TOKENIZER, envs, mem1)
    append(path, [as_text(env, t, TOKENIZER) for env, t in zip(envs, kept)])


def sft_losses(monkeypatch, run, *args):
    """The losses of a run of this stage on the CPU."""
    flags = ["--stage", "sft", "--device", "cpu", "--run_dir", str(run)]
    in_process(monkeypatch, *flags, *args)
    return [line["loss"] for line in metrics(run)]


def test_episodes_kept_as_text_are_learned_by_another_tokenizer(runs, tmp_path, monkeypatch):
    """The contexts are those of a rollout with the learner's own tokenizer; the stage lowers its
    loss on them and leaves a student that loads."""
    path, student = tmp_path / "kept.jsonl", str(runs[0] / "a/warm_start")
    kept_episodes(path, 6)
    other = AutoTokenizer.from_pretrained(student)
    assert other.get_vocab() != TOKENIZER.get_vocab()
    expected = expert_rollout(None, other, toy_envs("sft", 6, 2), mem1)
    for a, b in zip(replay(str(path), other, mem1), expected, strict=True):
        for ours, theirs in zip(a.calls, b.calls, strict=True):
            assert ours.prompt_ids == theirs.prompt_ids and ours.action_ids == theirs.action_ids
    args = ["--sft_data", str(path), "--student", student]
    args += "--sft_epochs 8 --tasks_per_step 3 --sft_lr 1e-2".split()
    losses = sft_losses(monkeypatch, tmp_path / "r", *args)
    assert len(losses) == 16 and losses[-1] < 0.7 * losses[0]
    AutoModelForCausalLM.from_pretrained(tmp_path / "r/student")
    empty = {"task": "x", "prompt": "q", "turns": [{"response": "", "observation": ""}]}
    append(path, [empty])
    with pytest.raises(ValueError, match="kept.jsonl, line 7: no"):
        replay(str(path), other, mem1)


def test_sft_does_not_depend_on_packs(runs, tmp_path, monkeypatch):
    """One update from two packs is the update from one: weighted by tokens, not by packs."""
    path = tmp_path / "kept.jsonl"
    kept_episodes(path, 4)
    args = ["--sft_data", str(path), "--student", str(runs[0] / "a/warm_start")]
    args += "--tasks_per_step 4 --sft_epochs 2".split()
    one = sft_losses(monkeypatch, tmp_path / "one", *args, "--max_tokens", "100000")
    many = sft_losses(monkeypatch, tmp_path / "many", *args, "--max_tokens", "700")
    assert one == pytest.approx(many, rel=1e-5)


# ---- what a signal, a kill and a resumed run leave -----------------------------------------------
def test_uninterrupted_delays_and_does_not_lose():
    """SIGINT in the middle of a write arrives after it."""
    done = []
    with pytest.raises(KeyboardInterrupt):
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("written")
    assert done == ["written"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("moment", ["sft", "rl", "save"])
def test_sigint_leaves_whole_files(tmp_path, moment):
    """Killed in the warm start, in a step and while a model is saved: every line of metrics.jsonl
    parses, no temporary file stays, and what is called a model loads."""
    args = [sys.executable, train_file.__file__, *FAST]
    args += "--run_dir r --steps 1000 --save_every 1".split()
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(args, cwd=tmp_path, **pipes)
    run, deadline = tmp_path / "r", time.time() + 120

    def reached():
        file = run / "metrics.jsonl"
        text = file.read_text() if file.exists() else ""
        if moment == "save":
            return '"rl"' in text and any(run.glob(".saving-new-*"))
        return '"warm_start"' in text if moment == "sft" else text.count('"rl"') >= 2

    while not reached() and process.poll() is None and time.time() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1, stderr
    assert "interrupted; what was computed is in r" in stderr and "Traceback" not in stderr
    assert metrics(run) and all("stage" in line for line in metrics(run))
    for path in run.iterdir():
        assert not path.name.startswith(".") and path.suffix != ".part"
        if path.is_dir() and path.name != "checkpoints":
            AutoModelForCausalLM.from_pretrained(path)
            AutoTokenizer.from_pretrained(path)
    assert all(path.name.startswith("step-") for path in run.glob("checkpoints/*"))


def killed_at(file, *args, cwd):
    """Start train.py, and kill it as soon as the file is there."""
    args = [sys.executable, train_file.__file__, *args]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(args, cwd=cwd, **silent)
    while not (cwd / file).exists() and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.wait()


def test_a_killed_run_resumes_bit_for_bit(runs, tmp_path):
    """4 steps at once, and 2 steps, SIGKILL, and 2 more by two flags alone, since a run knows its
    own settings: the same metrics and weights."""
    args = start_from(runs[0], "--steps", "4", "--save_every", "2")
    out = here(train_file, *args, "--run_dir", "whole", cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    newest = "killed/checkpoints/step-000002"
    killed_at(newest, *args, "--run_dir", "killed", cwd=tmp_path)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert len(checkpoints(killed)) == 1
    (killed / "checkpoints/.saving-new-x").mkdir()  # what a kill in the middle of a save leaves
    (killed / ".saving-new-student").mkdir(exist_ok=True)
    out = command("--run_dir", "killed", "--resume", cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    assert "resumes after 2 steps" in out.stdout and "is resumed with" not in out.stdout
    assert without_seconds(killed) == without_seconds(whole)
    assert same_weights(weights(whole), weights(killed))
    assert [path.name for path in checkpoints(killed)] == ["step-000002", "step-000004"]
    assert not list(killed.rglob(".saving-*"))


@pytest.mark.parametrize(
    "flags, change",
    [
        ("--seed 5", "--seed 5, not 0"),
        ("--horizon 3", "--horizon 3, not 2"),
        ("--student x --teacher y", "--student x, not"),
        ("--distill none", "--distill none, not aligned"),
    ],
)
def test_a_run_keeps_its_data_and_models(runs, monkeypatch, capsys, flags, change):
    """What would change them is refused before anything is touched."""
    monkeypatch.chdir(runs[0])
    files = [path for path in (runs[0] / "a").rglob("*") if path.is_file()]
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}
    with pytest.raises(SystemExit) as stop:
        in_process(monkeypatch, "--run_dir", "a", "--resume", *flags.split())
    message = capsys.readouterr().err
    assert stop.value.code == 2
    assert f"a cannot be resumed with {change}" in message and "new run" in message
    files = [path for path in (runs[0] / "a").rglob("*") if path.is_file()]
    after = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}
    assert after == before


def test_other_flags_of_a_resumed_run_are_printed_and_win(runs, tmp_path, monkeypatch, capsys):
    """One more step with a learning rate of 1, where a step moved no weight by more than 1e-3: the
    weights move far. Would catch a rate that the checkpoint's optimizer brings back."""
    shutil.copytree(runs[0] / "a", tmp_path / "r")
    monkeypatch.chdir(tmp_path)
    before = weights(tmp_path / "r")
    flags = "--actor_lr 1 --steps 4 --eval_questions 0".split()
    in_process(monkeypatch, "--run_dir", "r", "--resume", *flags)
    printed = capsys.readouterr()
    message = printed.out + printed.err
    assert "r is resumed with --actor_lr 1.0, not 5e-05" in message
    assert "r is resumed with --steps 4, not 3" in message
    assert "resumes after 3 steps" in message
    moved = [(w - before[name]).abs().max() for name, w in weights(tmp_path / "r").items()]
    assert max(moved) > 0.01
    assert json.loads((tmp_path / "r/config.json").read_text())["actor_lr"] == 1
    assert [line["step"] for line in metrics(tmp_path / "r", "rl")] == [0, 1, 2, 3]


def test_a_warm_start_that_was_killed_begins_anew(runs, tmp_path):
    """Before the first checkpoint; and one that was finished is not made again. What models from
    files then do is what those in memory did in the uninterrupted run."""
    warm = [*range(12), 12, 13]  # the teacher's steps, and the student's own
    run = tmp_path / "r"
    killed_at("r/metrics.jsonl", *FAST, "--run_dir", "r", cwd=tmp_path)
    for steps in ("1", "2"):
        out = command("--run_dir", "r", "--resume", "--steps", steps, cwd=tmp_path)
        assert out.returncode == 0, out.stderr
        assert [line["step"] for line in metrics(run)] == [*warm, *range(int(steps))]
        if steps == "1":
            made = (run / "teacher/model.safetensors").stat().st_mtime_ns
    assert (run / "teacher/model.safetensors").stat().st_mtime_ns == made
    assert without_seconds(run) == without_seconds(runs[0] / "a")[:16]


def test_a_warm_start_that_was_killed_between_its_models_makes_both(runs, tmp_path):
    """The teacher is there and the student is not: the same two come out."""
    shutil.copytree(runs[0] / "a", tmp_path / "r")
    for name in ("warm_start", "student", "checkpoints"):
        shutil.rmtree(tmp_path / "r" / name)
    out = command("--run_dir", "r", "--resume", cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    for name in ("warm_start", "teacher", "student"):
        assert same_weights(weights(runs[0] / "a", name), weights(tmp_path / "r", name)), name


def test_the_student_is_a_branch_that_leaves_the_teacher_as_it_was(runs, tmp_path):
    """Its own steps change nothing in the teacher's run, to the last bit."""
    args = [*FAST, *"--stage warm_start --sft_student 5 --run_dir r".split()]
    out = command(*args, cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    a, r = runs[0] / "a", tmp_path / "r"
    names = "config.json metrics.jsonl teacher warm_start"
    assert sorted(path.name for path in r.iterdir()) == names.split()
    losses = []
    for run in (a, r):
        lines = [line for line in metrics(run, "warm_start") if line["model"] == "teacher"]
        losses.append([(line["step"], line["loss"]) for line in lines])
    assert losses[0] == losses[1]
    assert same_weights(weights(a, "teacher"), weights(r, "teacher"))
    assert not same_weights(weights(a, "warm_start"), weights(r, "warm_start"))
    lines = [line for line in metrics(r, "warm_start") if line["model"] == "student"]
    assert [line["step"] for line in lines] == [12, 13, 14, 15, 16]


def small_pair(seed):
    """A student and a critic with an optimizer each, as a run saves them."""
    trained, student = {}, tiny(seed=seed)
    for name, model in (("student", student), ("critic", make_critic(student))):
        trained[name] = (model, torch.optim.AdamW(model.parameters(), lr=0.1))
    return trained


def state_of(trained):
    """All weights and second moments, and the steps that were taken."""
    tensors, steps = [], set()
    for model, optimizer in trained.values():
        tensors += [p.detach().clone() for p in model.parameters()]
        for state in optimizer.state.values():
            tensors.append(state["exp_avg_sq"].clone())
            steps.add(int(state["step"]))
    return tensors, steps


def test_only_the_last_checkpoints_stay(tmp_path):
    """And the newest brings back weights and moments, to the last bit."""
    trained = small_pair(0)
    for step in range(1, 5):
        for model, optimizer in trained.values():
            sum(p.square().sum() for p in model.parameters()).backward()
            optimizer.step()
        save_checkpoint(tmp_path, step, trained, keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000003", "step-000004"]
    fresh = small_pair(1)
    assert resume(tmp_path, fresh) == 4
    (expected, _), (found, steps) = state_of(trained), state_of(fresh)
    assert steps == {4}
    assert all(a.equal(b) for a, b in zip(expected, found, strict=True))


def test_guards_stop_a_run(runs, tmp_path, monkeypatch):
    """A sampler that disagrees with the packs, unless it may; a gradient that is not finite, with
    the step and the last good checkpoint."""
    monkeypatch.chdir(tmp_path)
    args = start_from(runs[0], "--steps", "2", "--save_every", "1")
    generate = train_file.generate

    def off(*args):
        ids, logprobs = generate(*args)
        return ids, [[x - 0.01 for x in row] for row in logprobs]

    monkeypatch.setattr(train_file, "generate", off)
    with pytest.raises(ValueError, match="step 0: logp_mismatch p99 1.0e-02 is over 0.001"):
        train_file.train(parse_config([*args, "--run_dir", "x"]))
    train_file.train(parse_config([*args, "--run_dir", "y", "--allow_mismatch"]))
    monkeypatch.setattr(train_file, "generate", generate)
    steps = []

    def infinite(*args):
        advantages, returns = advantages_of(*args)
        steps.append(len(steps))
        return advantages + (torch.inf if steps[-1] == 1 else 0), returns

    monkeypatch.setattr(train_file, "advantages_of", infinite)
    left = "the last good checkpoint is z/checkpoints/step-000001"
    message = rf"^train.py: step 1: .* is (nan|-?inf).*; {left}$"
    with pytest.raises(SystemExit, match=message) as stop:
        in_process(monkeypatch, *args, "--run_dir", "z")
    assert isinstance(stop.value.__context__, FloatingPointError)
