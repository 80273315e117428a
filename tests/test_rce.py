"""RCE (Eq. 5): packs against unpadded single calls, in logits and in gradients."""

import copy
import json
import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import rce as rce_file
import env as env_file
from env import ToyWiki, toy_envs
from losses import action_scores, actor_loss, ppo_loss
from pack import action_hidden, pack, verify
from rce import (
    Difference,
    FreeEnv,
    action_domain,
    audit,
    audit_teacher,
    calls_of,
    compare,
    corrupted,
    histories,
    independent_logits,
    pack_all,
    packed_hidden,
    padded_hidden,
    rce,
    writes,
    sample_sets,
)
from rollout import (
    Call,
    Trajectory,
    mem1,
    rollout,
    save_trajectories,
    scripted,
    train_tokenizer,
    update_rules,
)
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


def flat_calls(prompts, actions):
    return [Call(p, a, [0.0] * len(a), []) for p, a in zip(prompts, actions)]


def against(model, packed, calls):
    """One pack against single calls."""
    return compare(model, {"pack": packed_hidden(model, [packed], "pack")}, calls)["pack"]


@pytest.mark.parametrize("share", ["tree", "q"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_rce_holds_for_every_rule(kind, rule, share):
    """Several trajectories in one pack, float32 and float64, logits of at least 5 (at default initialisation
    everything is close)."""
    model, calls = tiny(kind, vocab_size=len(TOKENIZER)), trajectories(rule)
    found = rce(model, calls, share)
    assert found.max_logit >= 5 and found.holds(), str(found)
    assert found.summary()["tokens"] == sum(len(c.action_ids) for t in calls for c in t.calls)
    exact = rce(model.double(), calls, share)
    assert exact.dlogit.max() <= 1e-10 and exact.holds(), str(exact)


def test_rce_holds_where_the_tree_branches_at_every_token():
    model, (prompts, actions) = tiny().double(), deep_calls()
    packed = pack(prompts, actions)
    assert len(packed.segments[0]) > 60
    assert against(model, packed, flat_calls(prompts, actions)).dlogit.max() <= 1e-10


def bump(packed, name, i, by=1):
    """One number changed, of one field."""
    field = getattr(packed, name).clone()
    field[i] += by
    return replace(packed, **{name: field})


PROMPTS, ACTIONS = [[1, 2, 3], [1, 2, 9, 4]], [[5, 6, 7], [8, 3]]
CORRUPTIONS = {
    "position": (lambda p: bump(p, "position_ids", 1), "call 0: position_ids"),
    "visibility bit": (lambda p: bump(p, "subtree_end", 2), "call 1: visibility"),
    "predict index": (lambda p: bump(p, "predict_idx", 3, -1), "call 1: predict_idx"),
    "token id": (lambda p: bump(p, "input_ids", 1), "call 0: input_ids"),
    "action id": (lambda p: bump(p, "action_ids", 4), "call 1: action_ids"),
    "call order": (
        lambda p: replace(
            p,
            **{
                n: torch.cat([getattr(p, n)[3:], getattr(p, n)[:3]])
                for n in ("predict_idx", "action_ids", "action_idx", "call_idx")
            },
        ),
        "call 0: call_idx",
    ),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_one_corruption_is_named_and_its_logits_are_caught(name):
    """One position, one visibility bit, one predict index, one token id, one action id, the order of two calls: the
    structural check names each, with its call; the logits of all but the action id are off by orders of magnitude.
    Would catch an auditor that cannot fail."""
    corrupt, message = CORRUPTIONS[name]
    model, packed = tiny().double(), pack(PROMPTS, ACTIONS)
    calls = flat_calls(PROMPTS, ACTIONS)
    verify(packed, PROMPTS, ACTIONS)
    good = against(model, packed, calls)
    wrong = corrupt(packed)
    with pytest.raises(ValueError, match=message):
        verify(wrong, PROMPTS, ACTIONS)
    bad = against(model, wrong, calls)
    assert good.holds()
    if name == "action id":  # it changes what is scored, and no logit
        assert bad.dlogit.equal(good.dlogit)
    else:
        assert bad.dlogit.max() > 1e6 * max(good.dlogit.max(), 1e-12) and not bad.holds()


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_the_audit_looks_at_structure_and_logits_by_default(name, monkeypatch):
    """Each corruption in turn, planted in the packer: `rce` and `audit` stop at the structure; where that check is
    blinded, the verdict is a failure that names the worst token."""
    q = [Trajectory("x", 2, [Call([1, 2], [3, 4], [0.0] * 2, [5]), Call([1, 2, 6], [7, 8], [0.0] * 2, [])])]
    corrupt = {
        "position": lambda p: bump(p, "position_ids", 1),
        "visibility bit": lambda p: bump(p, "subtree_end", 2),
        "predict index": lambda p: bump(p, "predict_idx", 3, -1),
        "token id": lambda p: bump(p, "input_ids", 1),
        "action id": lambda p: bump(p, "action_ids", 3),
        "call order": lambda p: replace(
            p, **{n: getattr(p, n).roll(2) for n in ("predict_idx", "action_ids", "action_idx", "call_idx")}
        ),
    }[name]
    monkeypatch.setattr(rce_file, "pack", lambda *args: corrupt(pack(*args)))
    for run in (rce, lambda model, t: audit(model, {"x": t})):
        with pytest.raises(ValueError, match=r"call \d|pack"):
            run(tiny(), q)
    monkeypatch.setattr(rce_file, "verify", lambda *args: None)
    report = audit(tiny(), {"x": q})
    assert report["holds"] == (name == "action id")
    assert report["holds"] or all("at task x, call" in failure for failure in report["failures"])


def test_corrupt_states_break_rce_by_orders_of_magnitude():
    """Figure 3b: visibility alone, positions alone, both."""
    model, (prompts, actions, _) = tiny().double(), random_calls()
    packed, calls = pack(prompts, actions), flat_calls(prompts, actions)
    good = against(model, packed, calls)
    for (wrong,) in corrupted([packed]).values():
        bad = against(model, wrong, calls)
        assert bad.dlogit.max() > 1e6 * max(good.dlogit.max(), 1e-12) and not bad.holds()


def test_nan_fails():
    """A comparison with `>` passes NaN by, and a running maximum forgets it: in all calls, and in the first
    alone."""
    model, calls = tiny(vocab_size=len(TOKENIZER)), trajectories("mem1")
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    assert not rce(model, calls).holds()
    model, prompts, actions = tiny(), [[1, 9, 2], [1, 3, 4]], [[5, 6], [7]]
    with torch.no_grad():
        model.model.embed_tokens.weight[9] = torch.nan
    found = against(model, pack(prompts, actions), flat_calls(prompts, actions))
    assert not found.holds() and found.summary()["worst"].startswith("call 0")


def test_measures_by_hand():
    """Three tokens: log-ratios 0, log 1.3 and log 0.7 leave [0.8, 1.2] twice; gaps of 0, 1e-4 and 1 logits at an eps
    of 1e-4 are the same, a tie, and a changed prediction."""
    found = Difference(
        torch.tensor([0.0, 2.0, 1.0]),
        torch.tensor([1.0, 1.3, 0.7]).log(),
        torch.tensor([0.0, 0.3, 0.6]),
        torch.tensor([0.0, 1e-4, 1.0]),
        1e-4,
        10.0,
        ["a", "b", "c"],
    )
    s = found.summary(clip_coef=0.2)
    assert s["false_clip"] == pytest.approx(2 / 3) and s["top1"] == pytest.approx(2 / 3) and s["changed"] == 1
    assert (
        s["ties"] == ["b"] and s["worst"] == "b" and s["mean_kl"] == pytest.approx(0.3) and not found.holds()
    )
    assert s["max_dlogp"] == pytest.approx(-math.log(0.7)) and found[[0]].holds()
    assert found[[0, 2]].summary()["worst"] == "c" and found.summary(0.5)["false_clip"] == 0


@pytest.mark.parametrize("rows", [1, 3, 128])
def test_comparison_is_that_of_whole_logits(rows, monkeypatch):
    """Against logits of both sides at once, in float64: error, log-ratio, KL(truth || pack) and top prediction. Would
    catch a KL the other way round and rows that slip at a chunk's end."""
    monkeypatch.setattr(rce_file, "ROWS", rows)
    model, (prompts, actions, _) = tiny().double(), random_calls()
    packed, calls = pack(prompts, actions), flat_calls(prompts, actions)
    (wrong,) = corrupted([packed])["positions only"]
    found = against(model, wrong, calls)
    with torch.no_grad():
        z = action_hidden(model, wrong) @ model.lm_head.weight.T
        right = torch.cat(
            [model(torch.tensor([p + a])).logits[0, len(p) - 1 : -1] for p, a in zip(prompts, actions)]
        )
    p, q = torch.distributions.Categorical(logits=right), torch.distributions.Categorical(logits=z)
    ids = packed.action_ids
    torch.testing.assert_close(found.dlogit, (z - right).abs().max(-1).values)
    torch.testing.assert_close(found.logratio, q.log_prob(ids) - p.log_prob(ids))
    torch.testing.assert_close(found.kl, torch.distributions.kl_divergence(p, q))
    assert ((found.gap == 0) == (z.argmax(-1) == right.argmax(-1))).all()
    assert found.max_logit == right.abs().max()


def test_padded_batches_are_right_up_to_rounding():
    """The floor of Table 3 is a right computation: float64 says so. Would catch a mask or positions lost."""
    model, (prompts, actions, _) = tiny().double(), random_calls()
    calls = flat_calls(prompts, actions)
    for batch_size in (1, 5):
        assert (
            compare(model, {"x": padded_hidden(model, calls, batch_size)}, calls)["x"].dlogit.max() <= 1e-10
        )


def test_action_domain_by_hand():
    """q of 2; a_0 of 3 with 2 observed after it; x_1 keeps 1 and reads 2; a_1 of 2. Exact 5; the flat history adds the
    observation, 2; the pack of Eq. 4 adds x_1, 3."""
    t = Trajectory(
        "t", 2, [Call([1, 2], [3, 4, 5], [0.0] * 3, [6, 7]), Call([1, 2, 9, 6, 7], [8, 8], [0.0] * 2, [])]
    )
    found = action_domain([t], histories([t]), pack_all([t], "q"))
    assert list(found.values()) == [5, 2, 3]


def test_teacher_audit_splits_at_the_first_memory_update():
    """Before it, history and exact state are the same; after it they are not, unless nothing is ever forgotten."""
    teacher = tiny(seed=1, vocab_size=len(TOKENIZER), hidden_size=64).double()
    for rule, far in (("mem1", True), ("full_response", False)):
        calls = trajectories(rule)
        parts, right = audit_teacher(teacher, calls, histories(calls), 0.2)
        before, after = parts.values()
        assert before["max_dlogit"] <= 1e-10 and before["changed"] == 0 and right.holds()
        assert before["tokens"] == sum(len(t.calls[0].action_ids) for t in calls)
        assert before["tokens"] + after["tokens"] == sum(len(c.action_ids) for t in calls for c in t.calls)
        assert (after["max_dlogit"] > 1 and after["mean_kl"] > 0.1) if far else after["max_dlogit"] <= 1e-10


def test_teacher_audit_by_call_and_by_what_a_token_writes():
    """The expert's responses, taken apart by their text: a token belongs to the memory until the one that closes it;
    the rows by call, and those by part, each make up all tokens after the first update."""
    envs = toy_envs("test", 2, 3)
    calls = rollout(scripted(ToyWiki.expert, TOKENIZER, envs), TOKENIZER, envs, env_file.step_all, mem1)
    assert any("<answer>" in TOKENIZER.decode(t.calls[-1].action_ids) for t in calls)
    for t in calls:
        for call in t.calls:
            parts = writes(call, TOKENIZER)
            text = {
                part: TOKENIZER.decode([i for i, p in zip(call.action_ids, parts) if p == part]).strip()
                for part in set(parts)
            }
            (rest,) = text.keys() - {"memory"}
            tag = {"query": "search", "answer": "answer"}[rest]
            assert text["memory"].startswith("<think>") and text["memory"].endswith("</think>")
            assert text[rest].startswith(f"<{tag}>") and text[rest].endswith(f"</{tag}>")
    rows, _ = audit_teacher(tiny(seed=1, vocab_size=len(TOKENIZER)), calls, histories(calls), 0.2, TOKENIZER)
    n = {name: row["tokens"] for name, row in rows.items()}
    assert n["call 2"] == sum(len(t.calls[1].action_ids) for t in calls)
    assert n["call 5 and later"] == sum(len(c.action_ids) for t in calls for c in t.calls[4:]) > 0
    assert n["after it"] == sum(n[f"call {t}"] for t in ("2", "3", "4", "5 and later"))
    assert n["after it"] == sum(n[f"after it, {part}"] for part in ("memory", "query", "answer"))


def test_bfloat16_is_judged_against_float32():
    """Packs may be as far from the float32 truth as single calls in bfloat16 are, not much farther: right packs hold,
    wrong positions do not."""
    model, calls = tiny(vocab_size=len(TOKENIZER)).to(torch.bfloat16), trajectories("mem1")
    report = audit(model, {"mem1": calls})
    assert report["holds"] and "float32" in report["criterion"], report["failures"]
    single, packed = report["table3"]["single calls"], report["table3"]["packing, tree"]
    assert single["max_dlogit"] > 1e-3 and 0.3 < packed["p99_dlogp"] / single["p99_dlogp"] < 2
    flat, names = calls_of(calls)
    states = {
        "single": padded_hidden(model, flat, 1),
        "wrong": packed_hidden(model, corrupted(pack_all(calls))["positions only"], ""),
    }
    found = compare(model, states, flat, names, copy.deepcopy(model).float())
    assert found["single"].holds(found["single"]) and not found["wrong"].holds(found["single"])


def test_free_protocol(monkeypatch):
    """Whatever is said is the query and the memory; the best passage comes back; the number of calls is fixed. Other
    rules get the first quarter of the tasks."""
    envs = toy_envs("test", 3, 2)
    env = FreeEnv(envs[0].task, envs[0].retriever, calls=2)
    entity = envs[0].retriever.search([env.task.questions[0]], 1)[0][0].title
    observation, reward, done = env.step(f"I wonder about {entity}, AND (")
    assert entity in observation and not done and reward == 0
    assert env.step("</search>") == ("", 0.0, True)
    model = tiny(vocab_size=len(TOKENIZER))
    sets = sample_sets(model, TOKENIZER, [(e.task, e.retriever) for e in envs], calls=3, max_new_tokens=4)
    assert list(sets) == RULES and [len(t) for t in sets.values()] == [3, 1, 1, 1, 1, 1]
    assert all(len(t.calls) == 3 for trajectories in sets.values() for t in trajectories)
    again = sample_sets(model, TOKENIZER, [(e.task, e.retriever) for e in envs], calls=3, max_new_tokens=4)
    assert [t.calls[0].action_ids for t in again["mem1"]] == [t.calls[0].action_ids for t in sets["mem1"]]


def test_independent_logits_are_a_plain_call():
    """Row k of the reference is the model's own prediction after z + a_{<k}, computed token by token with
    nothing batched."""
    model, prompt, action = tiny(), [1, 2, 3], [4, 5, 6]
    rows = torch.stack([model(input_ids=torch.tensor([prompt + action[:k]])).logits[0, -1] for k in range(3)])
    torch.testing.assert_close(independent_logits(model, prompt, action), rows, rtol=0, atol=1e-5)
    source = Path(rce_file.__file__).read_text().split("def independent_logits")[1].split("\n\n\n")[0]
    assert "pack" not in source and "attention_mask" not in source


SHARED = {
    "calls with the same sampled tokens": ([[1, 2], [1, 2]], [[3, 4, 5], [3, 4, 6]]),
    "a call that is a prefix of another": ([[1, 2], [1, 2, 3], [1, 2]], [[3, 4], [4, 5, 6], [3]]),
    "identical calls": ([[1, 2], [1, 2], [1, 2, 7]], [[3, 4], [3, 4], [8]]),
}


@pytest.mark.parametrize(
    "case, share", [("random", "tree"), ("random", "q"), *((case, "tree") for case in SHARED)]
)
@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_actor_gradients_are_those_of_single_calls(kind, case, share):
    """The whole actor loss, Eq. 7, 10 and 11, packed against a loop of single calls through plain autograd:
    every parameter within 1e-5 relative. Would catch a prefix run without gradient and decisions counted once
    a node instead of once a token."""
    if case == "random":
        prompts, actions, prefix = (x + x[:2] for x in random_calls())  # two identical calls are two
    else:
        prompts, actions = SHARED[case]
        assert pack(prompts, actions).action_mask.sum() < sum(map(len, actions))  # decisions share a place
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
    """`python rce.py`: on the toy, and on a saved model with recorded trajectories and a teacher, as tables and as
    JSON; its exit status is its verdict."""
    run = lambda *args: subprocess.run(
        [sys.executable, rce_file.__file__, *args], capture_output=True, text=True
    )
    out = run()
    assert out.returncode == 0 and "RCE (Eq. 5) holds for float32" in out.stdout, out.stderr
    assert all(f"**{title}**" in out.stdout for title in ("Table 3", "Table 4", "Figure 3b", "Action domain"))
    model, calls = tiny(vocab_size=len(TOKENIZER), kind="llama"), trajectories("mem1")
    model.save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    save_trajectories(tmp_path / "t.jsonl", calls)
    model, file = str(tmp_path / "model"), str(tmp_path / "t.jsonl")
    out = run("--model", model, "--trajectories", file, "--teacher", model, "--json")
    report = json.loads(out.stdout)
    assert out.returncode == 0 and report["holds"] and list(report["table4"]) == ["recorded"], out.stderr
    assert report["table3"]["persistent history"]["tokens"] == report["action_domain"]["exact"]
    assert list(report["teacher"])[:3] == ["before the first memory update", "after it", "call 2"]
    assert report["calls"] == 9 and report["failures"] == []
    out = run(
        "--model", model, "--quick", "--tasks", "9"
    )  # the toy's questions, a model that follows no format
    assert out.returncode == 0 and "3 trajectories, 12 calls" in out.stdout, out.stderr
    (tmp_path / "t.jsonl").write_text("{}\n")
    out = run("--model", model, "--trajectories", file)
    assert out.returncode == 1 and "line 1" in out.stderr and "Traceback" not in out.stderr
    for wrong in (["--trajectories", file], ["--model", model, "--questions", file], ["--tasks", "0"]):
        out = run(*wrong)
        assert out.returncode == 2 and "Traceback" not in out.stderr


def test_a_failed_audit_exits_with_1_and_names_the_token(monkeypatch, capsys):
    monkeypatch.setattr(rce_file, "pack", lambda *args: bump(pack(*args), "position_ids", 3))
    monkeypatch.setattr(rce_file, "verify", lambda *args: None)
    monkeypatch.setattr(sys, "argv", ["rce.py"])
    with pytest.raises(SystemExit) as stop:
        rce_file.main()
    out = capsys.readouterr().out
    assert stop.value.code == 1 and "FAILS" in out and "at task world-train" in out
