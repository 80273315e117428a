"""The arithmetic of `train.py --estimate` against the storages that are alive in real updates, scores and rollouts."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Qwen2Config

from pack import pack
from rollout import generate
from train import (
    Batch,
    Clock,
    Config,
    estimate,
    head,
    hidden_of,
    join,
    make_critic,
    memory_table,
    parse_config,
    policy_scores,
    shard,
    sizes,
    trainable,
    unsharded,
    update_policy,
    values_of,
    whole,
)

V = 3000
WIDE = dict(vocab_size=V, num_hidden_layers=4, num_key_value_heads=2, num_attention_heads=4)
STUDENT = Qwen2Config(hidden_size=256, intermediate_size=1024, tie_word_embeddings=True, **WIDE)
TEACHER = Qwen2Config(hidden_size=384, intermediate_size=1024, tie_word_embeddings=False, **WIDE)


def build(config, dtype="float32"):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        config, attn_implementation="packed", dtype=getattr(torch, dtype)
    ).eval()


@pytest.fixture(params=["float32", "bfloat16"])
def config(tmp_path, request):
    """One device; 4 calls in a pack of 4,096 tokens, nearly all of them sampled."""
    STUDENT.save_pretrained(tmp_path / "student")
    TEACHER.save_pretrained(tmp_path / "teacher")
    yield join(
        Config(
            student=str(tmp_path / "student"),
            teacher=str(tmp_path / "teacher"),
            device="cpu",
            dtype=request.param,
            tasks_per_step=1,
            horizon=1,
            max_new_tokens=1023,
            max_len=1024,
            max_tokens=4096,
        )
    )
    if dist.is_initialized():
        dist.destroy_process_group()


class Alive(TorchDispatchMode):
    """The most bytes that were alive at once, of storages that operations made. (FSDP empties storages, and keeps
    them.)"""

    def __init__(self, known):
        super().__init__()
        self.known, self.refs, self.most = {x.untyped_storage()._cdata for x in known}, {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.refs = {key: ref for key, ref in self.refs.items() if not ref.expired()}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self.known:
                self.refs[x.untyped_storage()._cdata] = StorageWeakRef(x.untyped_storage())
        alive = sum(torch.UntypedStorage._new_with_weak_ptr(ref.cdata).nbytes() for ref in self.refs.values())
        self.most = max(self.most, alive)
        return out


def local(x):
    return getattr(x, "to_local", lambda: x)()


def peak(function, *known):
    """Bytes at the worst moment of function(), beyond those of the tensors that exist before."""
    with Alive([local(x) for x in known]) as alive:
        function()
    return alive.most


def expected(config, phase, *but):
    """What the estimate says of a phase, less some parts."""
    return sum(x for name, phases, x in estimate(config, 1) if phase in phases and not name.startswith(but))


def ids(rng, n):
    return [rng.randrange(V) for _ in range(n)]


def full_pack(config):
    rng = random.Random(0)
    packed = pack([ids(rng, 1) for _ in range(4)], [ids(rng, 1023) for _ in range(4)])
    assert len(packed.input_ids) == config.max_tokens
    return packed


@pytest.mark.parametrize("checkpointing", [True, False])
def test_an_update(config, checkpointing):
    """Weights, gradients and moments to the byte; the whole of an update at most a quarter above what is measured, and
    never below."""
    config = replace(config, gradient_checkpointing=checkpointing, ppo_epochs=1)
    packed, student = full_pack(config), build(STUDENT)
    critic = make_critic(student)
    (student, adam), (critic, critic_adam) = (trainable(m, 1e-3, config) for m in (student, critic))
    teacher = shard(build(TEACHER, config.dtype), config)
    with torch.no_grad():
        logp, values = policy_scores(student, packed, 1.0)[0], values_of(critic, packed)
        hidden, teacher_head = hidden_of(teacher, packed), whole(head(teacher))
    batch = Batch(logp, values, torch.randn(len(logp)), torch.randn(len(logp)), hidden)

    def update():
        update_policy(
            student, critic, (adam, critic_adam), [packed], batch, teacher_head, config, Clock("cpu")
        )

    update()
    weights = [p for model in (student, critic) for p in model.parameters()]
    states = [s for o in (adam, critic_adam) for s in o.state.values()]
    moments = [s[name] for s in states for name in ("exp_avg", "exp_avg_sq")]
    assert {x.dtype for x in [*weights, *moments]} == {torch.float32}
    size = sum(p.nbytes for p in weights)
    parts = {name: x for name, _, x in estimate(config, 1)}
    assert parts["student and critic: weights and two moments in float32"] == 3 * size
    assert sum(x.nbytes for x in moments) == 2 * size
    assert parts["their gradients in float32"] == size
    assert parts["the teacher's hidden states and head"] >= hidden.nbytes + teacher_head.nbytes
    measured = peak(update, *weights, *moments, hidden, teacher_head)
    said = expected(config, "u", "reference", "student and", "the teacher")
    assert measured <= said <= 1.25 * measured


def test_a_rollout(config):
    """Prompts, KV cache, logits, and with FSDP the student's whole weights."""
    config = replace(config, tasks_per_step=16, max_len=256, max_new_tokens=16)
    student, _ = trainable(build(STUDENT), 1e-3, config)
    rng = random.Random(0)
    prompts = [ids(rng, 240) for _ in range(16)]

    def sample():
        with unsharded(student):
            generate(student, prompts, 16)

    measured = peak(sample, *student.parameters())
    said = expected(config, "r", "student and", "reference")
    assert measured <= said <= 1.25 * measured


def test_a_score(config):
    """The teacher's, the widest."""
    packed, teacher = full_pack(config), shard(build(TEACHER, config.dtype), config)

    def score():
        with torch.no_grad():
            policy_scores(teacher, packed, 1.0)

    measured = peak(score, *teacher.parameters())
    said = expected(config, "s", "student and", "reference")
    assert measured <= said <= 1.25 * measured


def test_the_table_of_the_readme(tmp_path):
    """It is what the command prints for the shapes of Qwen2.5-3B and 7B, whose sizes are known; without a config it
    says which."""
    keys = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
    )
    shapes = {"3b": (151_936, 2048, 11_008, 36, 16, 2), "7b": (152_064, 3584, 18_944, 28, 28, 4)}
    for name, shape in shapes.items():
        config = Qwen2Config(**dict(zip(keys.split(), shape)), tie_word_embeddings=name == "3b")
        config.save_pretrained(tmp_path / name)
    assert sizes(str(tmp_path / "3b")).P == 3_085_938_688 and sizes(str(tmp_path / "7b")).P == 7_615_616_512
    args = ["--preset", "3b", "--student", str(tmp_path / "3b"), "--teacher", str(tmp_path / "7b")]
    table = memory_table(parse_config(args))
    assert table in (Path(__file__).parents[1] / "README.md").read_text()
    (tmp_path / "3b/config.json").unlink()
    with pytest.raises(ValueError, match="3b: no config"):
        memory_table(parse_config(args))
