"""RCE (Eq. 5): packs against unpadded single calls, in logits and in gradients."""

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import rce as rce_file
from losses import action_scores, actor_loss, ppo_loss
from pack import action_hidden, pack
from rce import compare, independent_logits, rce
from rollout import Call, Trajectory, rollout, save_trajectories, train_tokenizer, update_rules
from test_pack import deep_calls
from tiny import V, random_calls, tiny

TOKENIZER = train_tokenizer(["<think> a b </think> c"], 270)
RULES = [
    "mem1",
    "full_response",
    "suffix_retention",
    "summary_replacement",
    "sliding_window",
    "retrieval_refresh",
]


class Env:
    """Answers with what it was told, and a bit more; over after `turns` calls."""

    def __init__(self, name, turns):
        self.task, self.turns = type("Task", (), {"id": name}), turns

    def prompt(self):
        return f"<protocol> question {self.task.id}"


def step_all(envs, responses):
    for env in envs:
        env.turns -= 1
    return [(f" obs {len(r)}", 1.0, env.turns == 0) for env, r in zip(envs, responses)]


def trajectories(rule, n=3):
    """Random actions under a real update rule: episodes of 2 to 4 calls."""
    rng = random.Random(0)

    def sample(prompts, rows):
        ids = [[rng.randrange(len(TOKENIZER)) for _ in range(rng.randint(1, 20))] for _ in prompts]
        return ids, [[0.0] * len(a) for a in ids]

    return rollout(
        sample, TOKENIZER, [Env(str(i), 2 + i) for i in range(n)], step_all, update_rules(TOKENIZER)[rule]
    )


@pytest.mark.parametrize("share", ["tree", "q"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_rce_holds_for_every_rule(kind, rule, share):
    """Several trajectories in one pack, float32 and float64, logits of at least 5 (at default initialisation
    everything is close)."""
    model, calls = tiny(kind, vocab_size=len(TOKENIZER)), trajectories(rule)
    found = rce(model, calls, share)
    assert found.max_logit >= 5 and found.holds(1e-5), str(found)
    assert found.tokens == sum(len(c.action_ids) for t in calls for c in t.calls) and found.calls == 9
    exact = rce(model.double(), calls, share)
    assert exact.max_error <= 1e-10 and exact.holds(1e-10), str(exact)


def test_rce_holds_where_the_tree_branches_at_every_token():
    model, (prompts, actions) = tiny().double(), deep_calls()
    packed = pack(prompts, actions)
    assert len(packed.segments[0]) > 60
    calls = [Call(p, a, [0.0] * len(a), []) for p, a in zip(prompts, actions)]
    assert compare(model, [packed], calls).max_error <= 1e-10


def test_corrupt_states_break_rce_by_orders_of_magnitude():
    """Figure 3b: positions alone, visibility alone; and one wrong position in one place. Would catch a
    comparison that cannot fail."""
    model, (prompts, actions, _) = tiny().double(), random_calls()
    packed, calls = pack(prompts, actions), [Call(p, a, [0.0] * len(a), []) for p, a in zip(prompts, actions)]
    S = len(packed.input_ids)
    one_off = packed.position_ids.clone()
    one_off[packed.predict_idx[-1]] += 1
    good = compare(model, [packed], calls)
    for wrong in (
        replace(packed, position_ids=torch.arange(S)),
        replace(packed, subtree_end=torch.full((S,), S)),
        replace(packed, position_ids=one_off),
        replace(packed, predict_idx=packed.predict_idx.roll(1)),
    ):
        bad = compare(model, [wrong], calls)
        assert bad.max_error > 1e6 * max(good.max_error, 1e-12) and not bad.holds(1e-5)


def test_nan_fails():
    """A comparison with `>` passes NaN by, and a running maximum forgets it: in all calls, and in the first
    alone."""
    model, calls = tiny(vocab_size=len(TOKENIZER)), trajectories("mem1")
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    assert not rce(model, calls).holds(1e-5)
    model, prompts, actions = tiny(), [[1, 9, 2], [1, 3, 4]], [[5, 6], [7]]
    with torch.no_grad():
        model.model.embed_tokens.weight[9] = torch.nan
    found = compare(
        model, [pack(prompts, actions)], [Call(p, a, [0.0] * len(a), []) for p, a in zip(prompts, actions)]
    )
    assert not found.holds(1e-5) and found.worst.startswith("call 0")


def test_independent_logits_are_a_plain_call():
    """Row k of the reference is the model's own prediction after z + a_{<k}, computed token by token with
    nothing batched."""
    model, prompt, action = tiny(), [1, 2, 3], [4, 5, 6]
    rows = torch.stack([model(input_ids=torch.tensor([prompt + action[:k]])).logits[0, -1] for k in range(3)])
    torch.testing.assert_close(independent_logits(model, prompt, action), rows, rtol=0, atol=1e-5)
    source = Path(rce_file.__file__).read_text().split("def independent_logits")[1].split("\n\n\n")[0]
    assert "pack" not in source and "attention_mask" not in source


@pytest.mark.parametrize("share", ["tree", "q"])
@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_actor_gradients_are_those_of_single_calls(kind, share):
    """The whole actor loss, Eq. 7, 10 and 11, packed against a loop of single calls through plain autograd:
    every parameter within 1e-5 relative. Would catch a prefix run without gradient and decisions counted once
    a node instead of once a token."""
    prompts, actions, prefix = random_calls()
    prompts, actions, prefix = (
        prompts + prompts[:2],
        actions + actions[:2],
        prefix + prefix[:2],
    )  # two identical calls are two
    N, g = sum(map(len, actions)), torch.Generator().manual_seed(0)
    advantages, logp_shift = torch.randn(2, N, generator=g)
    logp_shift *= 0.1
    teacher = tiny(kind, seed=1)
    student, loop = tiny(kind), tiny(kind)
    with torch.no_grad():
        singles = [independent_logits(loop, p, a).log_softmax(-1) for p, a in zip(prompts, actions)]
        logp_old = (
            torch.cat([x.gather(1, torch.tensor(a)[:, None])[:, 0] for x, a in zip(singles, actions)])
            + logp_shift
        )

    packed = pack(prompts, actions, prefix if share == "q" else None)
    with torch.no_grad():
        teacher_hidden = action_hidden(teacher, packed)
    logp, entropy, kl = action_scores(
        action_hidden(student, packed),
        student.lm_head.weight,
        packed.action_ids,
        teacher_hidden,
        teacher.lm_head.weight,
    )
    actor_loss(ppo_loss(logp, logp_old, advantages, 0.2)[0], entropy, kl, 0.01, 0.5, N, N).backward()

    total, start = 0.0, 0
    for p, a in zip(prompts, actions):
        z = loop(input_ids=torch.tensor([p + a[:-1]])).logits[0, len(p) - 1 :].log_softmax(-1)
        t = independent_logits(teacher, p, a).log_softmax(-1)
        part = slice(start, start := start + len(a))
        ratio = (z.gather(1, torch.tensor(a)[:, None])[:, 0] - logp_old[part]).exp()
        ppo = -torch.min(ratio * advantages[part], ratio.clamp(0.8, 1.2) * advantages[part])
        total = total + (ppo + 0.01 * (z.exp() * z).sum(-1) + 0.5 * (z.exp() * (z - t)).sum(-1)).sum() / N
    total.backward()
    for (name, x), y in zip(student.named_parameters(), loop.parameters()):
        assert (x.grad - y.grad).norm() <= 1e-5 * y.grad.norm(), name


def test_foreign_ids_are_named():
    trajectory = Trajectory("x", 1, [Call([1], [V], [0.0], [])])
    with pytest.raises(ValueError, match=f"task x, call 0: id {V} is beyond the model's vocabulary of {V}"):
        rce(tiny(), [trajectory])


def test_command(tmp_path):
    """`python rce.py`: on the toy, and on a saved model with recorded trajectories; its exit status is its
    verdict."""
    run = lambda *args: subprocess.run(
        [sys.executable, rce_file.__file__, *args], capture_output=True, text=True
    )
    out = run()
    assert out.returncode == 0 and out.stdout.count("share=") == 12 and "RCE (Eq. 5) holds" in out.stdout, (
        out.stderr
    )
    model, calls = tiny(vocab_size=len(TOKENIZER)), trajectories("mem1")
    model.save_pretrained(tmp_path / "model")
    save_trajectories(tmp_path / "t.jsonl", calls)
    out = run("--model", str(tmp_path / "model"), "--trajectories", str(tmp_path / "t.jsonl"))
    assert out.returncode == 0 and out.stdout.count("recorded") == 2, out.stderr
    (tmp_path / "t.jsonl").write_text("{}\n")
    out = run("--model", str(tmp_path / "model"), "--trajectories", str(tmp_path / "t.jsonl"))
    assert out.returncode == 1 and "line 1" in out.stderr and "Traceback" not in out.stderr
