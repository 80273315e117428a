"""The arithmetic of experiments/memory.py against the storages that are alive in real updates,
scores and rollouts."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

import rollout
from experiments import memory
from experiments.memory import estimate, memory_table, model_sizes
from pack import pack
from rollout import generate
from train import (
    Batch,
    Config,
    Models,
    full_tensor,
    hidden_of,
    join,
    log_prob_of,
    make_critic,
    parse_config,
    shard,
    trainable,
    unsharded,
    update_policy,
    values_of,
)

# by what needs most memory: tokens of a pack, vocabulary, layers, intermediate size, and the
# widths of student and teacher
SHAPES = {
    "layers": (1024, 300, 4, 512, 128, 192),
    "vocabulary": (1280, 20_000, 1, 128, 64, 96),  # logits in three chunks
    "head": (16, 20_000, 1, 64, 512, 128),
    "untied head": (16, 20_000, 1, 64, 512, 128),
}


def build(path, dtype="float32"):
    """A random model of the config that lies there."""
    torch.manual_seed(0)
    settings = {"attn_implementation": "packed", "dtype": getattr(torch, dtype)}
    config = AutoConfig.from_pretrained(path)
    return AutoModelForCausalLM.from_config(config, **settings).eval()


@pytest.fixture(params=["float32", "bfloat16"])
def config_of(tmp_path, request):
    """shape -> Config: one device, and packs of 4 calls, nearly all of whose tokens are sampled."""

    def make(shape):
        S, V, layers, intermediate_size, H, H_T = SHAPES[shape]
        settings = {"vocab_size": V, "intermediate_size": intermediate_size}
        settings |= {"num_hidden_layers": layers, "num_attention_heads": 4}
        tied = shape != "untied head"
        for name, size, tied in (("student", H, tied), ("teacher", H_T, False)):
            config = Qwen2Config(
                hidden_size=size, num_key_value_heads=2, tie_word_embeddings=tied, **settings
            )
            config.save_pretrained(tmp_path / name)
        config = Config(
            student=str(tmp_path / "student"),
            teacher=str(tmp_path / "teacher"),
            device="cpu",
            dtype=request.param,
            tasks_per_step=1,
            horizon=1,
            max_new_tokens=S // 4 - 1,
            max_len=S // 4,
            max_tokens=S,
        )
        return join(config)

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()


def local(x):
    """The part of a tensor that this rank holds; around it is an empty one that claims its size."""
    return getattr(x, "_local_tensor", x)


class Alive(TorchDispatchMode):
    """The most bytes that were alive at once, of storages that operations made. (FSDP empties
    storages, and keeps them.)"""

    def __init__(self, known):
        super().__init__()
        self.known = {x.untyped_storage()._cdata for x in known}
        self.refs, self.most = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.refs = {key: ref for key, ref in self.refs.items() if not ref.expired()}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                storage = local(x).untyped_storage()
                if storage._cdata not in self.known:
                    self.refs[storage._cdata] = StorageWeakRef(storage)
        alive = 0
        for ref in self.refs.values():
            alive += torch.UntypedStorage._new_with_weak_ptr(ref.cdata).nbytes()
        self.most = max(self.most, alive)
        return out


def peak(function, *known):
    """Bytes at the worst moment of function(), beyond those of tensors that exist before it."""
    with Alive([local(x) for x in known]) as alive:
        function()
    return alive.most


def expected(config, phase, *without):
    """What the estimate says of a phase, less the parts whose names begin so."""
    total = 0
    for name, phases, x in estimate(config, 1):
        if phase in phases and not name.startswith(without):
            total += x
    return total


def random_ids(rng, n):
    return [rng.randrange(300) for _ in range(n)]


def random_pack(tokens):
    """Four calls, each with a prompt of one token."""
    rng = random.Random(0)
    prompts = [random_ids(rng, 1) for _ in range(4)]
    actions = [random_ids(rng, tokens // 4 - 1) for _ in range(4)]
    packed = pack(prompts, actions, share=0)
    assert len(packed.input_ids) == tokens
    return packed


@pytest.mark.parametrize(
    "shape, checkpointing",
    [
        ("layers", True),
        ("layers", False),
        ("vocabulary", True),
        ("head", True),
        ("untied head", True),
    ],
)
def test_an_update(config_of, shape, checkpointing):
    """Weights, gradients and moments to the byte; the whole of an update at most a quarter above
    what is measured, and never below. The second pack meets the gradients of the first."""
    config = replace(config_of(shape), gradient_checkpointing=checkpointing, ppo_epochs=1)
    student = build(config.student)
    critic = make_critic(student)
    student, adam = trainable(student, 1e-3, config)
    critic, critic_adam = trainable(critic, 1e-3, config)
    teacher = shard(build(config.teacher, config.dtype), config)
    teacher_head = full_tensor(teacher.get_output_embeddings().weight)
    trained = {"student": (student, adam), "critic": (critic, critic_adam)}
    models = Models(None, student, critic, None, teacher, teacher_head, trained)

    def two_packs(tokens):
        """The same pack twice, and a batch for them."""
        packs = [random_pack(tokens)] * 2
        with torch.no_grad():
            logp = torch.cat([log_prob_of(student, packed, 1.0) for packed in packs])
            values = torch.cat([values_of(critic, packed) for packed in packs])
            hidden = torch.cat([hidden_of(teacher, packed) for packed in packs])
        N = len(logp)
        return packs, Batch(logp, values, torch.randn(N), torch.randn(N), hidden, logp == logp)

    update_policy(models, *two_packs(8), config)  # makes the moments
    weights = [*student.parameters(), *critic.parameters()]
    states = [*adam.state.values(), *critic_adam.state.values()]
    moments = [state["exp_avg"] for state in states] + [state["exp_avg_sq"] for state in states]
    assert {x.dtype for x in [*weights, *moments]} == {torch.float32}
    size = sum(p.nbytes for p in weights)
    parts = {name: x for name, _, x in estimate(config, 1)}
    assert parts["student and critic: weights and two moments in float32"] == 3 * size
    assert sum(x.nbytes for x in moments) == 2 * size
    assert parts["their gradients in float32"] == size
    packs, batch = two_packs(config.max_tokens)
    hidden = batch.teacher_hidden
    known = hidden.nbytes / len(packs) + teacher_head.nbytes  # the config is of one pack's calls
    assert parts["the teacher's hidden states and head"] >= known

    def update():
        update_policy(models, packs, batch, config)

    measured = peak(update, *weights, *moments, hidden, teacher_head)
    said = expected(config, "u", "reference", "student and", "the teacher")
    assert measured <= said <= 1.25 * measured


@pytest.mark.parametrize("prefill", [16_384, 1024])  # all 3,840 tokens of prompts, or slices
def test_a_rollout(config_of, prefill, monkeypatch):
    """Prompts, KV cache, logits, and with FSDP the student's whole weights."""
    monkeypatch.setattr(memory, "PREFILL", prefill)
    monkeypatch.setattr(rollout, "PREFILL", prefill)
    config = replace(config_of("layers"), tasks_per_step=16, max_len=256, max_new_tokens=16)
    student, _ = trainable(build(config.student), 1e-3, config)
    prompts = [random_ids(random.Random(i), 240) for i in range(16)]

    def sample():
        with unsharded(student):
            generate(student, prompts, 16)

    measured = peak(sample, *student.parameters())
    said = expected(config, "r", "student and", "reference")
    assert measured <= said <= 1.25 * measured


@pytest.mark.parametrize("shape", ["layers", "vocabulary"])
def test_a_score(config_of, shape):
    """The teacher's, the widest."""
    config = config_of(shape)
    packed = random_pack(config.max_tokens)
    teacher = shard(build(config.teacher, config.dtype), config)

    def score():
        with torch.no_grad():
            log_prob_of(teacher, packed, 1.0)

    measured = peak(score, *teacher.parameters())
    said = expected(config, "s", "student and", "reference")
    assert measured <= said <= 1.25 * measured


def test_the_table_of_the_readme(tmp_path):
    """It is what the command prints for the shapes of Qwen2.5-3B and 7B, whose sizes are known."""
    names = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"
    names = [*names.split(), "num_key_value_heads"]
    shapes = {"3b": (151_936, 2048, 11_008, 36, 16, 2), "7b": (152_064, 3584, 18_944, 28, 28, 4)}
    for model, shape in shapes.items():
        config = Qwen2Config(**dict(zip(names, shape)), tie_word_embeddings=model == "3b")
        config.save_pretrained(tmp_path / model)
    student, teacher = str(tmp_path / "3b"), str(tmp_path / "7b")
    assert model_sizes(student).P == 3_085_938_688
    assert model_sizes(teacher).P == 7_615_616_512
    config = parse_config(["--preset", "3b", "--student", student, "--teacher", teacher])
    table = "\n".join(memory_table(config))
    readme = Path(__file__).parents[1] / "experiments/README.md"
    assert table in readme.read_text()


def test_a_model_without_a_config_is_named(tmp_path):
    config = Config(student=str(tmp_path / "3b"), teacher=str(tmp_path / "7b"))
    with pytest.raises(ValueError, match="3b: no config"):
        memory_table(config)


def test_the_toy_has_no_models_to_read(monkeypatch):
    """They are made by the run itself; the command says what it needs instead."""
    monkeypatch.setattr("sys.argv", ["memory.py", "--device", "cpu"])
    with pytest.raises(
        SystemExit, match="experiments.memory: the estimate needs --student and --teacher"
    ):
        memory.main()
