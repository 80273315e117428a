"""RCE (Eq. 5): packs against unpadded single calls, in logits and in gradients."""

import ast
import copy
import inspect
import math
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
from torch.distributions import Categorical, kl_divergence
from torch.testing import assert_close

import losses
import rce as rce_file
from conftest import here
from pack import action_hidden, pack, pack_all, verify
from rce import (
    Difference,
    checked_packs,
    compare,
    corrupted,
    independent_logits,
    packed_hidden,
    rce,
)
from rollout import call_ids, rollout, save_trajectories, train_tokenizer, update_rules
from test_pack import bump, deep_calls
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
        self.task, self.turns = SimpleNamespace(id=name), turns

    def prompt(self):
        return f"<protocol> question {self.task.id}"

    @staticmethod
    def step_all(envs, responses):
        results = []
        for env, response in zip(envs, responses, strict=True):
            env.turns -= 1
            results.append((f" obs {len(response)}", 1.0, env.turns == 0))
        return results


def trajectories(rule, n=3):
    """Random actions under a real update rule: episodes of 2, 3, ... calls."""
    rng = random.Random(0)

    def sample(prompts, rows):
        ids, logprobs = [], []
        for _ in prompts:
            length = rng.randint(1, 20)
            ids.append([rng.randrange(len(TOKENIZER)) for _ in range(length)])
            logprobs.append([0.0] * length)
        return ids, logprobs

    envs = [Env(str(i), 2 + i) for i in range(n)]
    return rollout(sample, TOKENIZER, envs, update_rules(TOKENIZER)[rule])


def against(model, packed, prompts, actions):
    """One pack against single calls."""
    hidden = packed_hidden(model, [packed])
    return compare(model, {"pack": hidden}, prompts, actions)["pack"]


# ---- RCE holds -----------------------------------------------------------------------------------
@pytest.mark.parametrize("share", ["tree", "q"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_rce_holds_for_every_rule(kind, rule, share):
    """Several trajectories in one pack, float32 and float64, logits of at least 5. (At default
    initialisation everything is close.)"""
    model = tiny(kind, vocab_size=len(TOKENIZER))
    prompts, actions, prefix_lens = call_ids(trajectories(rule))
    limits = prefix_lens if share == "q" else None
    found = rce(model, prompts, actions, limits)
    assert found.max_logit >= 5 and found.holds(), str(found)
    assert found.summary()["tokens"] == sum(map(len, actions))
    exact = rce(model.double(), prompts, actions, limits)
    assert exact.dlogit.max() <= 1e-10 and exact.holds(), str(exact)


def test_rce_holds_where_the_tree_branches_at_every_token():
    model, (prompts, actions) = tiny().double(), deep_calls()
    packed = pack(prompts, actions)
    lengths, _ = packed.segments
    assert len(lengths) > 60
    assert against(model, packed, prompts, actions).dlogit.max() <= 1e-10


def test_rce_over_several_packs_and_calls_longer_than_one():
    """The same answer however the calls are packed. A call over max_tokens does not end the
    check."""
    model, (prompts, actions, _) = tiny().double(), random_calls()
    whole = rce(model, prompts, actions)
    for max_tokens in (40, 1):
        assert len(checked_packs(prompts, actions, max_tokens=max_tokens)) > 2
        found = rce(model, prompts, actions, max_tokens=max_tokens)
        assert found.holds() and found.places == whole.places
        assert found.dlogit.max() <= 1e-10


def test_independent_logits_are_a_plain_call():
    """Row k of the reference is the model's own prediction after z + a_{<k}, computed token by
    token with nothing batched; it shares nothing with packs and knows no mask."""
    model, prompt, action = tiny(), [1, 2, 3], [4, 5, 6]
    rows = []
    for k in range(3):
        ids = torch.tensor([prompt + action[:k]])
        rows.append(model(input_ids=ids).logits[0, -1])
    logits = independent_logits(model, prompt, action)
    assert_close(logits, torch.stack(rows), rtol=0, atol=1e-5)
    source = inspect.getsource(independent_logits)
    assert "pack" not in source and "attention_mask" not in source


SHARED = {
    "calls with the same sampled tokens": ([[1, 2], [1, 2]], [[3, 4, 5], [3, 4, 6]]),
    "a call that begins another": ([[1, 2], [1, 2, 3], [1, 2]], [[3, 4], [4, 5, 6], [3]]),
    "identical calls": ([[1, 2], [1, 2], [1, 2, 7]], [[3, 4], [3, 4], [8]]),
}
GRADIENT_CASES = [("random", "tree"), ("random", "q"), *((case, "tree") for case in SHARED)]


@pytest.mark.parametrize("case, share", GRADIENT_CASES)
@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_actor_gradients_are_those_of_single_calls(kind, case, share):
    """The whole actor loss, Eq. 7, 10 and 11, packed and a few tokens at a time, against a loop of
    single calls through plain autograd: every parameter within 1e-5 relative. Would catch a prefix
    run without gradient, and decisions counted once per node instead of once per token."""
    if case == "random":
        prompts, actions, prefix_lens = (part + part[:2] for part in random_calls())
        packed = pack(prompts, actions, prefix_lens if share == "q" else None)
    else:
        prompts, actions = SHARED[case]
        packed = pack(prompts, actions)
        assert packed.action_mask.sum() < len(packed.action_ids)  # decisions share a place
    N, g = len(packed.action_ids), torch.Generator().manual_seed(0)
    advantages, shift = torch.randn(2, N, generator=g)
    student, loop, teacher = tiny(kind), tiny(kind), tiny(kind, seed=1)

    def single_logp(model):
        """(N, V), with gradient."""
        rows = []
        for prompt, action in zip(prompts, actions):
            ids = torch.tensor([prompt + action[:-1]])
            rows.append(model(input_ids=ids).logits[0, len(prompt) - 1 :])
        return torch.cat(rows).log_softmax(-1)

    p, t = single_logp(loop), single_logp(teacher).detach()
    ids = torch.tensor([i for action in actions for i in action])
    logp = p.gather(1, ids[:, None])[:, 0]
    logp_old = logp.detach() + 0.1 * shift
    ratio = (logp - logp_old).exp()
    ppo = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    minus_entropy = (p.exp() * p).sum(-1)
    kl = (p.exp() * (p - t)).sum(-1)
    expected = (ppo + 0.01 * minus_entropy + 0.5 * kl).sum() / N
    expected.backward()

    with torch.no_grad():
        teacher_hidden = action_hidden(teacher, packed)

    def objective(logits, rows):
        logp = losses.log_prob(logits, packed.action_ids[rows])
        ppo, _, _ = losses.ppo_loss(logp, logp_old[rows], advantages[rows], 0.2)
        teacher_logits = losses.head_logits(teacher_hidden[rows], teacher.lm_head.weight)
        kl, entropy = losses.reverse_kl(logits, teacher_logits), losses.entropy(logits)
        return losses.actor_loss(ppo, entropy, kl, 0.01, 0.5, N, N), {}

    hidden = action_hidden(student, packed)
    loss, _ = losses.chunked_loss(objective, hidden, student.lm_head.weight, chunk=3)
    loss.backward()
    assert_close(loss, expected)
    for (name, x), y in zip(student.named_parameters(), loop.parameters()):
        assert (x.grad - y.grad).norm() <= 1e-5 * y.grad.norm(), name


# ---- and fails where it must ---------------------------------------------------------------------
PROMPTS, ACTIONS = [[1, 2, 3], [1, 2, 9, 4]], [[5, 6, 7], [8, 3]]
PER_TOKEN = ("predict_idx", "action_ids", "action_idx", "call_idx")


def swap_calls(packed):
    """The second call's tokens first."""
    rows = torch.tensor([3, 4, 0, 1, 2])
    return replace(packed, **{name: getattr(packed, name)[rows] for name in PER_TOKEN})


CORRUPTIONS = {
    "position": (lambda p: bump(p, "position_ids", 1), "call 0: position_ids"),
    "visibility bit": (lambda p: bump(p, "subtree_end", 2), "call 1: visibility"),
    "predict index": (lambda p: bump(p, "predict_idx", 3, -1), "call 1: predict_idx"),
    "token id": (lambda p: bump(p, "input_ids", 1), "call 0: input_ids"),
    "action id": (lambda p: bump(p, "action_ids", 4), "call 1: action_ids"),
    "call order": (swap_calls, "call 0: call_idx"),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_one_corruption_is_named_and_its_logits_are_caught(name):
    """One position, one visibility bit, one predict index, one token id, one action id, the order
    of two calls: the structural check names each, with its call, and the logits of all but the
    action id are off by orders of magnitude. Would catch a check that cannot fail."""
    corrupt, message = CORRUPTIONS[name]
    model, packed = tiny().double(), pack(PROMPTS, ACTIONS)
    verify(packed, PROMPTS, ACTIONS)
    good = against(model, packed, PROMPTS, ACTIONS)
    assert good.holds()
    with pytest.raises(ValueError, match=message):
        verify(corrupt(packed), PROMPTS, ACTIONS)
    bad = against(model, corrupt(packed), PROMPTS, ACTIONS)
    if name == "action id":  # it changes what is scored, and no logit
        assert bad.dlogit.equal(good.dlogit)
    else:
        assert not bad.holds()
        assert bad.dlogit.max() > 1e6 * max(good.dlogit.max(), 1e-12)


def plant(monkeypatch, corrupt):
    """Every pack that rce.py makes is corrupted."""

    def pack_wrongly(*args):
        return [corrupt(packed) for packed in pack_all(*args)]

    monkeypatch.setattr(rce_file, "pack_all", pack_wrongly)


def blind(monkeypatch):
    """The structural check sees nothing."""
    monkeypatch.setattr(rce_file, "verify", lambda *args: None)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_rce_looks_at_structure_and_logits(name, monkeypatch):
    """Each corruption in turn, planted in the packer: `rce` stops at the structure. Where that
    check is blinded, the verdict is a failure that names the worst token."""
    corrupt, message = CORRUPTIONS[name]
    plant(monkeypatch, corrupt)
    with pytest.raises(ValueError, match=message):
        rce(tiny(), PROMPTS, ACTIONS)
    blind(monkeypatch)
    found = rce(tiny(), PROMPTS, ACTIONS, names=["task x, call 0", "task x, call 1"])
    assert found.holds() == (name == "action id")
    assert re.search(r"at task x, call \d, token \d", str(found))


def test_corrupt_states_break_rce_by_orders_of_magnitude():
    """Figure 3b: visibility alone, positions alone, both."""
    model, (prompts, actions, _) = tiny().double(), random_calls()
    packed = pack(prompts, actions)
    good = against(model, packed, prompts, actions)
    wrong_packs = corrupted([packed])
    assert list(wrong_packs) == ["visibility only", "positions only", "both"]
    for name, (wrong,) in wrong_packs.items():
        bad = against(model, wrong, prompts, actions)
        assert not bad.holds(), name
        assert bad.dlogit.max() > 1e6 * max(good.dlogit.max(), 1e-12), name


def test_nan_fails():
    """A comparison with `>` passes NaN by, and a running maximum forgets it: in all calls, and in
    the first alone."""
    model = tiny()
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    assert not rce(model, PROMPTS, ACTIONS).holds()
    model = tiny()
    prompts, actions = [[1, 9, 2], [1, 3, 4]], [[5, 6], [7]]
    with torch.no_grad():
        model.model.embed_tokens.weight[9] = torch.nan
    found = against(model, pack(prompts, actions), prompts, actions)
    assert not found.holds() and found.summary()["worst"].startswith("call 0")


def test_foreign_ids_are_named():
    problem = f"id {V} is beyond the model's vocabulary of {V}"
    with pytest.raises(ValueError, match=f"call 1: {problem}"):
        rce(tiny(), [[1], [1]], [[2], [V]])
    with pytest.raises(ValueError, match=f"task x, call 0: {problem}"):
        rce(tiny(), [[V]], [[1]], names=["task x, call 0"])


# ---- the measures --------------------------------------------------------------------------------
def test_measures_by_hand():
    """Three tokens: log-ratios 0, log 1.3 and log 0.7 leave [0.8, 1.2] twice. Gaps of 0, 1e-4 and 1
    logits at an eps of 1e-4 are the same prediction, a tie, and a changed one."""
    found = Difference(
        dlogit=torch.tensor([0.0, 2.0, 1.0]),
        logratio=torch.tensor([1.0, 1.3, 0.7]).log(),
        kl=torch.tensor([0.0, 0.3, 0.6]),
        gap=torch.tensor([0.0, 1e-4, 1.0]),
        places=["a", "b", "c"],
        max_logit=10.0,
        eps=1e-4,
    )
    s = found.summary(clip_coef=0.2)
    assert s["false_clip"] == pytest.approx(2 / 3)
    assert s["top1"] == pytest.approx(2 / 3)
    assert s["changed"] == 1 and s["ties"] == ["b"]
    assert s["worst"] == "b" and s["max_dlogit"] == 2 and s["max_logit"] == 10
    assert s["max_dlogp"] == pytest.approx(-math.log(0.7))
    assert s["mean_kl"] == pytest.approx(0.3) and s["tokens"] == 3
    assert not found.holds() and found[[0]].holds()
    assert found[[0, 2]].summary()["worst"] == "c"
    assert found.summary(0.5)["false_clip"] == 0
    assert str(found).startswith("max |dlogit| 2.00e+00 at b")


@pytest.mark.parametrize("rows", [1, 3, 128])
def test_comparison_is_that_of_whole_logits(rows, monkeypatch):
    """Against the logits of both sides at once, in float64: error, log-ratio, KL(truth || pack) and
    top prediction. Would catch a KL the other way round, and rows that slip at a chunk's end."""
    monkeypatch.setattr(rce_file, "ROWS", rows)
    model, (prompts, actions, _) = tiny().double(), random_calls()
    packed = pack(prompts, actions)
    (wrong,) = corrupted([packed])["positions only"]
    found = against(model, wrong, prompts, actions)
    right = []
    with torch.no_grad():
        z = action_hidden(model, wrong) @ model.lm_head.weight.T
        for prompt, action in zip(prompts, actions):
            logits = model(torch.tensor([prompt + action])).logits[0]
            right.append(logits[len(prompt) - 1 : -1])
    right, ids = torch.cat(right), packed.action_ids
    p, q = Categorical(logits=right), Categorical(logits=z)
    assert_close(found.dlogit, (z - right).abs().max(-1).values)
    assert_close(found.logratio, q.log_prob(ids) - p.log_prob(ids))
    assert_close(found.kl, kl_divergence(p, q))
    same = z.argmax(-1) == right.argmax(-1)
    assert same.equal(found.gap == 0)
    assert found.max_logit == right.abs().max()
    assert len(found.places) == len(set(found.places)) == len(ids)


def test_bfloat16_is_judged_against_float32():
    """Packs may be twice as far from the float32 truth as single calls in bfloat16 are, not
    farther: right packs hold, wrong positions do not."""
    model = tiny(vocab_size=len(TOKENIZER)).to(torch.bfloat16)
    prompts, actions, _ = call_ids(trajectories("mem1"))
    truth = copy.deepcopy(model).float()
    found = rce(model, prompts, actions, truth=truth)
    assert found.holds(), str(found)
    ours, single = found.summary(), found.single.summary()
    assert single["max_dlogit"] > 1e-3
    assert 0.3 < ours["p99_dlogp"] / single["p99_dlogp"] < 2

    packs = pack_all(prompts, actions, 4096)
    wrong = packed_hidden(model, corrupted(packs)["positions only"])
    found = compare(model, {"wrong": wrong}, prompts, actions, truth=truth)
    assert found["single calls"].holds() and not found["wrong"].holds()


# ---- the command ---------------------------------------------------------------------------------
ALONE = """
from transformers import AutoModelForCausalLM, LlamaConfig
from rce import rce
shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
config = LlamaConfig(vocab_size=50, num_attention_heads=4, initializer_range=0.4, **shape)
model = AutoModelForCausalLM.from_config(config, attn_implementation="packed").eval()
print(rce(model, [[1, 2], [1, 2, 3]], [[4, 5], [6]]).holds())
"""


def test_rce_needs_pack_alone(tmp_path):
    """To copy Eq. 5, a reader takes rce.py and pack.py: a script beside the two finds all that it
    needs, and only the demonstration and the command import from rollout.py."""
    for name in ("rce.py", "pack.py"):
        shutil.copy(Path(rce_file.__file__).parent / name, tmp_path)
    (tmp_path / "alone.py").write_text(ALONE)
    script = [sys.executable, "alone.py"]
    out = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True)
    assert out.stdout.strip() == "True", out.stderr
    importers = set()
    for node in ast.parse(inspect.getsource(rce_file)).body:
        modules = [getattr(part, "module", None) for part in ast.walk(node)]
        if "rollout" in modules:
            importers.add(getattr(node, "name", "the file itself"))
    assert importers == {"demo", "main"}


def command(*args):
    """`python rce.py` with these arguments."""
    return here(rce_file, *args)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A model folder and a file of trajectories, as flags of the gate."""
    folder = tmp_path_factory.mktemp("recorded")
    tiny("llama", vocab_size=len(TOKENIZER)).save_pretrained(folder / "model")
    TOKENIZER.save_pretrained(folder / "model")
    save_trajectories(folder / "t.jsonl", trajectories("mem1"))
    return ["--model", str(folder / "model"), "--trajectories", str(folder / "t.jsonl")]


def test_demo():
    """Figure 3b in small: right packs at the floor, and wrong visibility worse than wrong
    positions."""
    out = command()
    assert out.returncode == 0 and "RCE (Eq. 5) holds for float32" in out.stdout, out.stderr
    rows = re.findall(r"^  (\w[\w ]*?) +p99 \|dlogp\| (\S+)", out.stdout, re.MULTILINE)
    p99 = {name: float(value) for name, value in rows}
    assert list(p99) == ["right", "visibility only", "positions only", "both"]
    assert p99["visibility only"] > p99["positions only"] > 1000 * p99["right"]
    assert p99["both"] > 1000 * p99["right"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gate(recorded, dtype):
    """A saved model with recorded trajectories; the exit status is the verdict."""
    out = command(*recorded, "--dtype", dtype)
    assert out.returncode == 0, out.stderr
    assert f"RCE (Eq. 5) holds for {dtype}" in out.stdout
    assert re.search(r"at task \d, call \d, token \d+", out.stdout)


def gate(monkeypatch, *flags):
    """The same in this process, where packs can be corrupted: the SystemExit."""
    monkeypatch.setattr(sys, "argv", ["rce.py", "--device", "cpu", *map(str, flags)])
    with pytest.raises(SystemExit) as stop:
        rce_file.main()
    return stop.value


def test_gate_exits_with_1_and_names_what_is_wrong(recorded, monkeypatch, capsys):
    """A position that is off by one: the structure says which call. Where that check is blinded,
    the logits say which token."""
    plant(monkeypatch, lambda packed: bump(packed, "position_ids", 3))
    assert str(gate(monkeypatch, *recorded)).startswith("rce.py: call 0: position_ids")
    blind(monkeypatch)
    assert gate(monkeypatch, *recorded).code == 1
    out = capsys.readouterr().out
    assert "RCE (Eq. 5) FAILS for float32" in out
    assert re.search(r"at task \d, call \d, token \d+", out)


def test_gate_in_bfloat16_fails_for_wrong_packs(recorded, monkeypatch):
    """Its tolerance is wider, and yet one."""
    plant(monkeypatch, lambda packed: corrupted([packed])["positions only"][0])
    blind(monkeypatch)
    assert gate(monkeypatch, *recorded, "--dtype", "bfloat16").code == 1


def test_gate_that_cannot_check_says_why(recorded, tmp_path, monkeypatch, capsys):
    """A damaged file, one without trajectories and a missing one are messages (an exit status of
    1), and half a pair of flags is a usage error."""
    path = tmp_path / "t.jsonl"
    flags = [*recorded[:3], path]
    assert "t.jsonl" in str(gate(monkeypatch, *flags))
    path.write_text("")
    assert "no trajectories in it" in str(gate(monkeypatch, *flags))
    path.write_text("{}\n")
    assert "t.jsonl, line 1: not a trajectory" in str(gate(monkeypatch, *flags))
    script = [sys.executable, rce_file.__file__, *map(str, flags)]
    out = subprocess.run(script, capture_output=True, text=True)
    assert out.returncode == 1 and "line 1" in out.stderr and "Traceback" not in out.stderr
    for half in (recorded[:2], recorded[2:]):
        assert gate(monkeypatch, *half).code == 2
        assert "go together" in capsys.readouterr().err
