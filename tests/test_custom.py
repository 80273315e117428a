"""Taken apart: environments, rules, m_T, replayed states, other trainers, adapters, pictures."""

import inspect
import json
import random
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import here
from test_rce import TOKENIZER
from test_rce import trajectories as recorded
from tiny import tiny
from transformers import AutoModelForCausalLM

import train as train_file
from env import SearchEnv
from eval import evaluate
from experiments import plot
from losses import chunked_log_prob, reverse_kl
from pack import action_hidden, pack
from rollout import (
    Call,
    Trajectory,
    load,
    load_trajectories,
    mem1,
    replay,
    rollout,
    save_trajectories,
    scripted,
    train_tokenizer,
    update_rule,
)
from train import (
    Batch,
    Config,
    Models,
    hidden_of,
    log_prob_of,
    make_critic,
    pack_calls,
    parse_config,
    pick_replay,
    teacher_mask,
    token_roles,
    update_policy,
    values_of,
)

ROOT = Path(train_file.__file__).parent


def block(mark, file="README.md"):
    """The Python block of a README in which this text stands."""
    found = re.findall(r"```python\n(.*?)```", (ROOT / file).read_text(), re.DOTALL)
    (code,) = [code for code in found if mark in code]
    return code


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tiny random model and its tokenizer."""
    folder = tmp_path_factory.mktemp("model") / "model"
    tiny("llama", vocab_size=len(TOKENIZER)).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


# ---- any environment -----------------------------------------------------------------------------
def test_the_environment_of_the_readme_is_trained(tmp_path):
    """The script as it stands, at most 40 lines: after three steps the reward is above where it
    began, and every call has a reward of its own."""
    code = block("class Count")
    assert len(code.splitlines()) <= 40
    settings = {"cwd": tmp_path, "env": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **settings)
    assert out.returncode == 0, out.stderr
    lines = (tmp_path / "runs/count/metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert len(steps) == 3 and steps[0]["reward"] < steps[1]["reward"] < steps[2]["reward"]
    assert all(step["right"] == step["reward"] and "em" not in step for step in steps)
    early = 0
    for trajectory in load_trajectories(tmp_path / "runs/count/trajectories.jsonl"):
        assert len(trajectory.calls) == 3
        early += sum(call.reward for call in trajectory.calls[:2])
        observed = []
        for call in trajectory.calls:  # the rule of the script
            assert call.prompt_ids[trajectory.prefix_len :] == sum(observed[-2:], [])
            observed.append(call.observation_ids)
    assert early > 0
    assert "task before training: right " in out.stdout


class Walk:
    """Three turns, a point for each."""

    def __init__(self, name="walk"):
        self.task, self.points = SimpleNamespace(id=name), 0

    def prompt(self):
        return "walk"

    def step(self, response):
        self.points += 1
        return " on", 0.5, self.points == 3

    def score(self):
        return {"points": self.points, "solved": 1.0}


def without(*names):
    """A Walk that lacks these."""
    return type("Lame", (Walk,), dict.fromkeys(names, None))()


@pytest.mark.parametrize("name", ["prompt", "step", "score", "task"])
def test_what_an_environment_lacks_is_named(name, tmp_path, model):
    """By rollout what it needs, by evaluation and training `score`, too; before any folder."""
    env = without(name)
    if name == "task":
        env.task = None
    lacks = "Lame has no task.id" if name == "task" else rf"Lame has no {name}\(\)"
    if name != "score":
        with pytest.raises(ValueError, match=lacks):
            rollout(None, TOKENIZER, [Walk(), env], mem1)
    with pytest.raises(ValueError, match=lacks):
        evaluate(None, TOKENIZER, [Walk(), env])
    run = tmp_path / "run"
    flags = ["--device", "cpu", "--student", str(model), "--distill", "none"]
    config = parse_config([*flags, "--run_dir", str(run)])
    with pytest.raises(ValueError, match=lacks):
        train_file.train(config, lambda split, n, k, step=0: [env] * n)
    assert not run.exists()


@pytest.mark.parametrize("result", [None, ("text", 1.0), (None, 1.0, True), "text"])
def test_a_step_that_returns_something_else_is_named(result):
    env = Walk("w")
    env.step = lambda response: result
    with pytest.raises(ValueError, match="task w, call 0: step returned .*, not .observation"):
        rollout(scripted(lambda env: "a", TOKENIZER, [env]), TOKENIZER, [env], mem1)


@pytest.mark.parametrize("scores", [None, {}, {"entropy": 1.0}, {"step": 1}, 0.5])
def test_scores_that_are_none_or_hide_a_metric_are_refused(scores, tmp_path, model):
    """Before the run folder is made: no metric is replaced by a score of its name."""
    env = Walk()
    env.score = lambda: scores
    run = tmp_path / "run"
    flags = ["--device", "cpu", "--student", str(model), "--distill", "none"]
    config = parse_config([*flags, "--run_dir", str(run)])
    with pytest.raises(ValueError, match=r"Walk.score\(\) returned .*taken are run, stage, step"):
        train_file.train(config, lambda split, n, k, step=0: [env] * n)
    assert not run.exists()


def test_every_metric_is_a_name_that_no_score_may_have(runs):
    """What a run notes of itself is in OURS, its seconds apart."""
    for name in ("a", "history", "none"):
        for line in (runs[0] / name / "metrics.jsonl").read_text().splitlines():
            step = json.loads(line)
            if step["stage"] == "rl":
                names = {key for key in step if not key.startswith("seconds_")}
                assert names - {"em", "f1", "answered", "solved"} <= set(train_file.OURS)


def test_environments_of_two_classes_are_not_mixed():
    """One class's step_all would be asked for the other's."""
    envs = [Walk(), type("Other", (Walk,), {})()]
    with pytest.raises(ValueError, match="one class at a time"):
        rollout(None, TOKENIZER, envs, mem1)
    one_string = type("Wrong", (Walk,), {"stop": "</search>"})()
    with pytest.raises(ValueError, match="Wrong.stop must be a tuple"):
        rollout(None, TOKENIZER, [one_string], mem1)


def test_a_run_on_tasks_of_a_script_goes_on_with_them_alone(tmp_path, model):
    """--resume from the command line would go on with the toy; a rule of one's own is asked for
    before anything is written; a batch without tasks is a sentence."""
    run = tmp_path / "run"
    flags = (
        "--distill none --steps 1 --tasks_per_step 2 --max_new_tokens 4 --max_len 2000 "
        "--eval_questions 0 --device cpu"
    ).split()
    flags += ["--student", str(model), "--run_dir", str(run)]

    def tasks(split, n, k, step=0):
        return [Walk(f"{split} {i}") for i in range(n)] if step < 2 else []

    def nothing(turns):
        return []

    train_file.main(flags, tasks, nothing)
    resume = ["--resume", "--run_dir", str(run), "--steps", "3"]
    kept = (run / "config.json").read_text()
    with pytest.raises(SystemExit, match="began with tasks of a script: resume it with them"):
        train_file.main(resume)
    with pytest.raises(SystemExit, match="is no update rule"):
        train_file.main(resume, tasks)
    assert (run / "config.json").read_text() == kept
    with pytest.raises(SystemExit, match="step 2: there are no tasks of length 4"):
        train_file.main(resume, tasks, nothing)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1] and lines[1]["points"] == 3


def test_the_token_that_ends_a_response_is_kept_for_sft(tmp_path, monkeypatch):
    """An environment without strings that end a response: what the model learns ends, too."""
    eos = TOKENIZER.eos_token_id
    monkeypatch.setattr("eval.generate", lambda *args: ([[5, eos]], [[0.0, 0.0]]))
    evaluate(None, TOKENIZER, [Walk()], keep_correct=tmp_path / "kept.jsonl")
    (trajectory,) = replay(tmp_path / "kept.jsonl", TOKENIZER, mem1)
    words = TOKENIZER.encode(TOKENIZER.decode([5]), add_special_tokens=False)
    assert [call.action_ids for call in trajectory.calls] == [[*words, eos]] * 3
    q = trajectory.prefix_len
    assert trajectory.calls[1].prompt_ids[q : q + len(words) + 1] != [*words, eos]


def test_scores_of_any_name_are_averaged(monkeypatch):
    """And an episode whose `solved` is 1 is a right one."""
    envs = [Walk("a"), Walk("b")]
    monkeypatch.setattr("eval.generate", lambda *args: ([[5]] * 2, [[0.0]] * 2))
    means, _ = evaluate(None, TOKENIZER, envs)
    assert list(means) == ["points", "solved", "peak", "dependency", "seconds"]
    assert means["points"] == 3 and means["solved"] == 1


def test_what_samples_and_scores_knows_no_protocol():
    """What ends a response, and how many are asked at once, come from the environment."""
    for function in (rollout, evaluate, train_file.roll_out, train_file.batch_metrics):
        source = inspect.getsource(function)
        assert not re.search(r"search|</|answers|turns_left|\"(em|f1)\"", source), function
    assert SearchEnv.stop == ("</search>", "</answer>")


# ---- any rule ------------------------------------------------------------------------------------
def test_a_rule_is_a_name_or_a_callable():
    own = lambda turns: []  # noqa: E731
    assert update_rule("mem1", TOKENIZER) is mem1 and update_rule(own, TOKENIZER) is own
    with pytest.raises(ValueError, match="mine is no update rule; take one of mem1, "):
        update_rule("mine", TOKENIZER)


@pytest.mark.parametrize("context", [None, "text", 5, torch.tensor([1])])
def test_a_rule_that_returns_no_ids_is_named(context):
    env = Walk("w")
    sample = scripted(lambda env: "a", TOKENIZER, [env])
    with pytest.raises(ValueError, match="task w, call 0: the update rule returned"):
        rollout(sample, TOKENIZER, [env], lambda turns: context)


# ---- m_T -----------------------------------------------------------------------------------------
def test_roles_are_those_of_the_tags():
    """Token by token, against the text that stands before each."""
    tokenizer = train_tokenizer(["<think> a </think> <search> b </search>"], 300)
    for rest in ("search", "answer"):
        text = f"<think> a b </think> <{rest}> c </{rest}>"
        ids = tokenizer.encode(text)
        roles = token_roles(ids, tokenizer)
        expected = []
        for k in range(len(ids)):
            memory = "</think>" not in tokenizer.decode(ids[:k])
            expected.append("memory" if memory else {"search": "query"}.get(rest, rest))
        assert roles == expected and {"memory"} < set(roles)


def parts(teacher_on="all", replayed=(), **settings):
    """An update on recorded trajectories: its metrics, and the student's gradient, (P,)."""
    settings = {"max_len": 300, "ppo_epochs": 1, "distill_coef": 0.5, **settings}
    config = Config(device="cpu", max_grad_norm=1e9, teacher_on=teacher_on, **settings)
    student = tiny(vocab_size=len(TOKENIZER))
    critic = make_critic(student)
    teacher = tiny(seed=1, vocab_size=len(TOKENIZER)).requires_grad_(False)
    gradient = []

    class Keep(torch.optim.SGD):
        def step(self):
            for group in self.param_groups:
                gradient.append(torch.cat([p.grad.flatten() for p in group["params"]]))

    trained = {}
    for name, trains in (("student", student), ("critic", critic)):
        trained[name] = (trains, Keep(trains.parameters(), lr=0))
    head = teacher.get_output_embeddings().weight.detach()
    models = Models(TOKENIZER, student, critic, None, teacher, head, trained)
    own = tagged(3, 0)
    packs, replay_packs = pack_calls(own, config), pack_calls(list(replayed), config)
    with torch.no_grad():
        logp = torch.cat([log_prob_of(student, packed, 1.0) for packed in packs])
        values = torch.cat([values_of(critic, packed) for packed in packs])
        hidden = torch.cat([hidden_of(teacher, packed) for packed in [*packs, *replay_packs]])
    advantages = torch.linspace(-1, 1, len(logp))
    mask = teacher_mask([*own, *replayed], TOKENIZER, config)
    batch = Batch(logp, values, advantages, values + 1, hidden, mask)
    found = update_policy(models, packs, batch, config, 0, replay_packs)
    return found, gradient[0], gradient[1], models, own


def tagged(n, seed):
    """Trajectories of responses with tags."""
    rng, found = random.Random(seed), []
    for i in range(n):
        q, calls = TOKENIZER.encode(f"<protocol> question {i}"), []
        for t in range(2):
            text = f"<think> note {rng.randrange(99)} </think> <{('search', 'answer')[t]}> x y </"
            action = TOKENIZER.encode(text)
            context = TOKENIZER.encode(f" obs {rng.randrange(99)}") if t else []
            calls.append(Call(q + context, action, [0.0] * len(action), []))
        found.append(Trajectory(str(i), len(q), calls))
    return found


def mean_kl(models, trajectories, role="all"):
    """Eq. 7 by single calls and autograd: KL of the tokens of a role, summed; and how many."""
    total, n = 0.0, 0
    for call in [call for trajectory in trajectories for call in trajectory.calls]:
        ids = torch.tensor([call.prompt_ids + call.action_ids])
        rows = slice(len(call.prompt_ids) - 1, -1)
        ours, theirs = (m(input_ids=ids).logits[0, rows] for m in (models.student, models.teacher))
        kl = reverse_kl(ours, theirs.detach())
        roles = token_roles(call.action_ids, TOKENIZER)
        chosen = torch.tensor([role in ("all", one) for one in roles])
        total, n = total + kl[chosen].sum(), n + int(chosen.sum())
    return total, n


def flat_gradient(scalar, model):
    """d scalar / d parameters, (P,)."""
    gradients = torch.autograd.grad(scalar, list(model.parameters()))
    return torch.cat([g.flatten() for g in gradients])


@pytest.mark.parametrize("role", ["memory", "query", "answer"])
@pytest.mark.parametrize("max_tokens", [16384, 120])
def test_the_teacher_is_asked_about_one_role(role, max_tokens):
    """Metric and gradient against single calls: Eq. 7 is a mean over m_T alone, in any packs; PPO
    and the critic do not change."""
    found, gradient, critic, models, own = parts(role, max_tokens=max_tokens)
    everything, all_gradient, all_critic, _, _ = parts()
    kl, n = mean_kl(models, own, role)
    assert found["teacher_kl"] == pytest.approx(kl.item() / n, rel=1e-4)
    assert found["ppo_loss"] == pytest.approx(everything["ppo_loss"], abs=1e-6)
    torch.testing.assert_close(critic, all_critic, rtol=1e-4, atol=1e-6)
    total, n_all = mean_kl(models, own)
    expected = 0.5 * (flat_gradient(kl, models.student) / n)
    expected -= 0.5 * (flat_gradient(total, models.student) / n_all)
    off = (gradient - all_gradient - expected).norm() / expected.norm()
    assert off < 1e-3, off


def test_a_role_that_does_not_occur_is_no_guidance(monkeypatch, capsys):
    """No division by zero where no token has the role: the update is PPO's alone, and says so."""
    whole = tagged(3, 0)
    searches = [replace(t, calls=t.calls[:1]) for t in whole]
    monkeypatch.setattr(sys.modules[__name__], "tagged", lambda n, seed: searches)
    found, gradient, _, _, _ = parts("answer")
    assert "no guidance, no action token has the role answer" in capsys.readouterr().out
    plain, alone, _, _, _ = parts("answer", distill_coef=0.0)
    assert found["teacher_kl"] == 0 and found["ppo_loss"] == plain["ppo_loss"]
    torch.testing.assert_close(gradient, alone)


# ---- replayed states -----------------------------------------------------------------------------
def test_replayed_calls_are_in_the_kl_alone():
    """Metric and gradient against single calls: their KL joins the mean of Eq. 7; PPO, entropy,
    the critic and the counts of the batch do not change."""
    extra = tagged(5, 1)[3:]
    found, gradient, critic, models, own = parts(replayed=extra)
    plain, plain_gradient, plain_critic, _, _ = parts()
    n = sum(len(call.action_ids) for t in extra for call in t.calls)
    (kl, n_own), (replay_kl, n_replay) = mean_kl(models, own), mean_kl(models, extra)
    assert found["replay_tokens"] == n == n_replay
    assert found["replay_kl"] == pytest.approx(replay_kl.item() / n, rel=1e-4)
    for name in ("ppo_loss", "entropy", "teacher_kl", "clipfrac", "value_loss", "critic_grad_norm"):
        assert found[name] == pytest.approx(plain[name], rel=1e-5, abs=1e-7), name
    assert "replay_kl" not in plain
    torch.testing.assert_close(critic, plain_critic)
    expected = 0.5 * flat_gradient(kl + replay_kl, models.student) / (n_own + n_replay)
    expected -= 0.5 * flat_gradient(mean_kl(models, own)[0], models.student) / n_own
    off = (gradient - plain_gradient - expected).norm() / expected.norm()
    assert off < 1e-3, off


def test_how_many_are_replayed():
    """The stated share of the tasks, others in every step, the same for a seed."""
    files = [str(i) for i in range(50)]
    config = Config(tasks_per_step=12, replay_share=0.5)
    first = pick_replay(files, 0, config)
    assert len(first) == 6 and pick_replay(files, 0, config) == first
    assert pick_replay(files, 1, config) != first and pick_replay([], 0, config) == []
    assert len(pick_replay(files, 0, replace(config, replay_share=0.01))) == 1


def test_a_replay_file_of_another_tokenizer_is_refused(tmp_path, model):
    """By file and line, before there is a folder; so is PPO with a file."""
    other = train_tokenizer(["quite other words", "question of another kind"], 500)
    q = other.encode("quite other words of another kind")
    foreign = [Trajectory("a", len(q), [Call(q, [5], [0.0], [])])]
    save_trajectories(tmp_path / "foreign.jsonl", foreign)
    assert load_trajectories(tmp_path / "foreign.jsonl") == foreign
    assert load_trajectories(tmp_path / "foreign.jsonl", other) == foreign
    flags = [
        "--device",
        "cpu",
        "--student",
        str(model),
        "--teacher",
        str(model),
        "--max_len",
        "2000",
    ]
    flags += ["--run_dir", str(tmp_path / "run"), "--replay", str(tmp_path / "foreign.jsonl")]
    with pytest.raises(ValueError, match="foreign.jsonl, line 1: .*another tokenizer's"):
        train_file.train(parse_config(flags))
    assert not (tmp_path / "run").exists()


def test_a_run_with_replay_and_a_role(tmp_path, model):
    """From the command: recorded calls of another run, and the teacher on the memory alone."""
    save_trajectories(tmp_path / "old.jsonl", recorded("mem1"))
    flags = (
        "--device cpu --steps 2 --horizon 1 --tasks_per_step 4 --max_new_tokens 8 --max_len 2000 "
        "--eval_questions 0 --replay old.jsonl --replay_share 0.5 --teacher_on memory --run_dir r"
    )
    pair = ["--student", model, "--teacher", model]
    out = here(train_file, *flags.split(), *pair, cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    for line in (tmp_path / "r/metrics.jsonl").read_text().splitlines():
        step = json.loads(line)
        assert step["replay_tokens"] > 0 and step["rejected"] == 0
    for control in ("none", "history"):
        out = here(train_file, *flags.split(), "--distill", control, *pair, cwd=tmp_path)
        assert out.returncode and "--replay adds exact states to Eq. 7" in out.stderr


# ---- other trainers ------------------------------------------------------------------------------
TRAINER_RUN = """
import sys
import torch
from transformers import TrainingArguments
from rollout import load_trajectories
from tiny import tiny
torch.set_num_threads(1)
student, teacher = tiny("llama"), tiny("llama", seed=1)
size, steps = int(sys.argv[1]), int(sys.argv[2])
args = TrainingArguments(
    sys.argv[3], per_device_train_batch_size=size, gradient_accumulation_steps=steps, max_steps=1,
    optim="sgd", learning_rate=0.1, lr_scheduler_type="constant", max_grad_norm=0, report_to=[],
    use_cpu=True, remove_unused_columns=False, save_strategy="no", disable_tqdm=True,
)
trajectories = load_trajectories(sys.argv[3] + "/data.jsonl")
guided, data = Guided(student, teacher), {"train_dataset": trajectories, "data_collator": collate}
trainer = GuidedTrainer(guided, args, **data)
trainer.train()
if trainer.args.process_index == 0:
    torch.save(torch.cat([p.detach().flatten() for p in student.parameters()]), sys.argv[4])
"""


def test_a_trainer_of_transformers(tmp_path):
    """README's compute_loss: one update on four trajectories is the same in one batch, in four
    accumulated ones, and on two ranks of DistributedDataParallel; and it is a step down the mean of
    Eq. 7 over all their tokens, by single calls."""
    pytest.importorskip("accelerate")
    rng, data = random.Random(0), []
    for i in range(4):
        q, calls = [rng.randrange(61) for _ in range(4)], []
        for t in range(2 + i % 2):
            context = [rng.randrange(61) for _ in range(3 * t)]
            action = [rng.randrange(61) for _ in range(2 + i + t)]
            calls.append(Call(q + context, action, [0.0] * len(action), []))
        data.append(Trajectory(str(i), 4, calls))
    save_trajectories(tmp_path / "data.jsonl", data)
    script = tmp_path / "script.py"
    script.write_text(block("class GuidedTrainer", "experiments/README.md") + TRAINER_RUN)
    path = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    found = []
    for n, (how, size, steps) in enumerate([([], 4, 1), ([], 1, 4), (torchrun, 2, 1)]):
        args = [*how, script, size, steps, tmp_path, tmp_path / f"{n}.pt"]
        command = [sys.executable, *map(str, args)]
        out = subprocess.run(command, capture_output=True, text=True, env=path)
        assert out.returncode == 0, out.stderr
        found.append(torch.load(tmp_path / f"{n}.pt"))
    student, teacher = tiny("llama"), tiny("llama", seed=1)
    models = SimpleNamespace(student=student, teacher=teacher)
    kl, n = mean_kl(models, data)
    before = torch.cat([p.detach().flatten() for p in student.parameters()])
    expected = before - 0.1 * flat_gradient(kl / n, student)
    for weights in found:
        assert (weights - expected).norm() < 1e-4 * (expected - before).norm()


# ---- adapters ------------------------------------------------------------------------------------
def test_an_adapter_is_a_student(tmp_path, model):
    """A folder of LoRA adapters: packs are exact, a run moves the adapters and nothing else, and
    what it saves loads, as a student too."""
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(model)
    wanted = peft.LoraConfig(
        target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM",
        base_model_name_or_path=str(model),
    )  # fmt: skip
    torch.manual_seed(0)
    peft.get_peft_model(base, wanted).save_pretrained(tmp_path / "adapter")  # without a tokenizer
    _, student = load(tmp_path / "adapter", "cpu", "packed", torch.float32)
    packed = pack([[5, 6], [5, 6, 7]], [[8, 9], [10]])
    with torch.no_grad():
        head = student.get_output_embeddings().weight
        found = chunked_log_prob(action_hidden(student, packed), head, packed.action_ids)
        alone = student(input_ids=torch.tensor([[5, 6, 7, 10]])).logits[0, 2].log_softmax(-1)[10]
        without = AutoModelForCausalLM.from_pretrained(model)(torch.tensor([[5, 6, 7]])).logits
    assert abs(found[2] - alone) < 1e-5
    assert abs(without[0, 2].log_softmax(-1)[10] - alone) > 1e-3
    flags = (
        "--device cpu --steps 2 --horizon 1 --tasks_per_step 3 --max_new_tokens 8 --max_len 2000 "
        "--eval_questions 0 --actor_lr 1e-2 --student adapter --run_dir run"
    )
    out = here(train_file, *flags.split(), "--teacher", model, cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    _, trained = load(tmp_path / "run/student", "cpu")
    moved = set()
    for (name, one), (other_name, other) in zip(
        student.named_parameters(), trained.named_parameters(), strict=True
    ):
        assert name == other_name
        if not one.equal(other):
            moved.add(name.split(".")[-3])
    assert moved == {"lora_A", "lora_B"}
    more = flags.replace("--student adapter --run_dir run", "--student run/student --run_dir more")
    again = here(train_file, *more.split(), "--teacher", model, cwd=tmp_path)
    assert again.returncode == 0, again.stderr


# ---- pictures ------------------------------------------------------------------------------------
@pytest.fixture
def own_runs(runs, tmp_path):
    """Runs that a test may write into: those of `runs` belong to all tests."""
    for name in ("a", "none"):
        shutil.copytree(runs[0] / name, tmp_path / name)
    return tmp_path


def test_a_picture_of_runs(own_runs):
    """Of several side by side; what is no run is named."""
    pytest.importorskip("matplotlib")
    folder = own_runs
    out = here(plot, "a", "none", cwd=folder)
    assert out.returncode == 0 and out.stdout.strip() == "a/metrics.png"
    assert (folder / "a/metrics.png").read_bytes()[1:4] == b"PNG"
    out = here(plot, "nothing", cwd=folder)
    assert out.returncode and "nothing: no metrics.jsonl" in out.stderr


def test_a_page_of_a_trajectory(own_runs):
    """Every call with its parts, every sampled token with its numbers; no text of the run is
    markup."""
    folder = own_runs
    out = here(plot, "--trajectories", "a/trajectories.jsonl", "--n", 2, cwd=folder)
    assert out.returncode == 0, out.stderr
    page = (folder / "a/trajectories.html").read_text()
    tokenizer, _ = load(folder / "a/student", "cpu")
    some = load_trajectories(folder / "a/trajectories.jsonl")[:2]
    sampled = [i for t in some for call in t.calls for i in call.action_ids]
    spans = re.findall(r'class="action" title="log-prob (\S+), KL (\S+)" style', page)
    assert len(spans) == len(sampled)
    assert all(float(kl) >= 0 and float(logp) <= 0 for logp, kl in spans)
    assert page.count("<h3>") == sum(len(t.calls) for t in some) and "<think>" not in page


def test_parts_of_a_context():
    """Observations are found where they stand, whatever the rule; the rest is memory."""
    observations = [[7, 8], [9]]
    assert plot.context_parts([1, 2, 7, 8, 9, 3], observations) == [
        ("memory", [1, 2]),
        ("observation", [7, 8, 9]),
        ("memory", [3]),
    ]
    assert plot.context_parts([], observations) == []


# ---- README's table of changes -------------------------------------------------------------------
CHANGES = {  # to have: file, what stands there, what takes its place
    "another divergence to the teacher": (
        "losses.py",
        "    return (logp.exp() * (logp - teacher_logp)).sum(-1)\n",
        "    return (teacher_logp.exp() * (teacher_logp - logp)).sum(-1)\n",
    ),
    "another m_T": (
        "train.py",
        "        chosen += [role == config.teacher_on for role in roles]\n",
        "        chosen += [k == 0 for k in range(len(action))]\n",
    ),
    "no baseline": (
        "train.py",
        "    rewards = torch.zeros_like(logp_old)\n",
        "    values = torch.zeros_like(values)\n    rewards = torch.zeros_like(logp_old)\n",
    ),
    "a seventh memory rule with a name": (
        "rollout.py",
        '        "mem1": mem1,',
        '        "nothing": lambda turns: [], "mem1": mem1,',
    ),
    "another sampling engine in training": (
        "train.py",
        "        return generate(models.student, prompts, config.max_new_tokens, T, stop, "
        "generators)\n",
        """        found = []
        for prompt in prompts:  # without a cache, one prompt at a time
            ids, logps = [], []
            while len(ids) < config.max_new_tokens and not (ids and stop(ids)):
                with torch.no_grad():
                    logits = models.student(torch.tensor([prompt + ids])).logits[0, -1] / T
                ids.append(logits.softmax(-1).multinomial(1).item())
                logps.append(logits.log_softmax(-1)[ids[-1]].item())
            found.append((ids, logps))
        return [ids for ids, _ in found], [logps for _, logps in found]
""",
    ),
    "another attention backend": (
        "pack.py",
        'BACKENDS = {"dense": attend_dense, "segments": attend_segments, ',
        '''def attend_plain(packed, query, key, value, scale):
    """Eq. 4 written out."""
    heads = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(heads, 1), value.repeat_interleave(heads, 1)
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~packed.dense_mask, -torch.inf)
    return scores.softmax(-1) @ value


BACKENDS = {"dense": attend_dense, "segments": attend_plain, ''',
    ),
}
RUN_COPIES = """
import json, sys
from pathlib import Path
flags = sys.argv[2:]
for folder in sorted(Path(sys.argv[1]).iterdir()):
    for name in "env rollout pack rce losses eval train".split():
        sys.modules.pop(name, None)
    sys.path.insert(0, str(folder))
    import train
    rule = ["--update", "nothing"] if "memory rule" in folder.name else []
    train.main([*flags, *rule, "--run_dir", f"{folder}/run"])
    sys.path.pop(0)
"""


def test_readmes_changes_are_as_small_as_it_says(tmp_path, model):
    """Every row of "Change X here": made in a copy of the seven files, within its number of lines,
    it runs, and changes what it should and nothing else."""
    table = (ROOT / "README.md").read_text().split("## Change X here")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (?:1 to )?(\d+) \|$", table, re.MULTILINE)
    assert [name for name, _, _ in rows] == list(CHANGES)
    copies = tmp_path / "copies"
    for name in ("", *CHANGES):
        folder = copies / (name or "unchanged")
        folder.mkdir(parents=True)
        for file in ROOT.glob("*.py"):
            (folder / file.name).write_text(file.read_text())
        if name:
            file, before, after = CHANGES[name]
            source = (folder / file).read_text()
            assert source.count(before) == 1, name
            (folder / file).write_text(source.replace(before, after))
    for name, where, lines in rows:
        file, before, after = CHANGES[name]
        new = [line for line in after.splitlines() if line.strip() and line not in before]
        assert file in where and len(new) <= int(lines), name
    teacher = tiny("llama", seed=1, vocab_size=len(TOKENIZER))
    teacher.save_pretrained(tmp_path / "teacher")
    TOKENIZER.save_pretrained(tmp_path / "teacher")
    flags = (
        "--device cpu --steps 1 --horizon 1 --tasks_per_step 4 --max_new_tokens 6 --max_len 2000 "
        "--eval_questions 0 --ppo_epochs 1"
    )
    pair = ["--student", str(model), "--teacher", str(tmp_path / "teacher")]
    args = [sys.executable, "-c", RUN_COPIES, str(copies), *flags.split(), *pair]
    out = subprocess.run(args, capture_output=True, text=True, cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    found = {}
    for folder in copies.iterdir():
        (line,) = (folder / "run/metrics.jsonl").read_text().splitlines()
        found[folder.name] = json.loads(line)
    plain = found.pop("unchanged")

    def same(name, *metrics):
        return all(found[name][m] == pytest.approx(plain[m], rel=1e-4, abs=1e-6) for m in metrics)

    for name in ("another divergence to the teacher", "another m_T"):
        assert same(name, "ppo_loss", "entropy", "value_loss") and not same(name, "teacher_kl")
    assert same("another attention backend", "teacher_kl", "entropy", "actor_grad_norm")
    assert same("no baseline", "teacher_kl", "entropy")
    for name in ("another sampling engine in training", "a seventh memory rule with a name"):
        assert found[name]["logp_mismatch"] < 1e-4, name
    assert not same("another sampling engine in training", "entropy")
