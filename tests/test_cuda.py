"""What only a GPU can show: FlexAttention backward, and the preset `tiny` to its end on CUDA."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from conftest import FAST, command
from experiments.audit import audit
from experiments.memory import estimate
from losses import chunked_loss, entropy, head_logits, log_prob, reverse_kl
from pack import action_hidden, pack
from rce import rce
from rollout import call_ids
from test_rce import RULES, TOKENIZER, trajectories
from tiny import random_calls, tiny
from train import parse_config

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def large_gpu():
    """Whether the models of the preset 3b fit."""
    if not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_properties(0).total_memory >= 130e9


@pytest.fixture(autouse=True)
def exact_float32(monkeypatch):
    """TF32 would hide errors of 1e-3."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def model_for_flex(kind="qwen2", **changes):
    """Head width 64, the kernel's smallest comfortable one."""
    return tiny(kind, hidden_size=256, initializer_range=0.1, **changes).cuda()


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize("tasks", [3, 60])
def test_flex_forward_and_backward_against_the_dense_mask(kind, tasks):
    """Hidden states and every parameter's gradient, in one tile and over many."""
    prompts, actions, _ = random_calls(tasks=tasks)
    packed, results = pack(prompts, actions), {}
    for backend in ("flex", "dense"):
        model = model_for_flex(kind)
        hidden = action_hidden(model, packed, backend)
        (hidden**2).sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        results[backend] = [hidden.detach(), *gradients]
    for a, b in zip(*results.values(), strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm()


@pytest.mark.parametrize("rule", RULES)
def test_rce_on_cuda(rule):
    prompts, actions, _ = call_ids(trajectories(rule))
    found = rce(model_for_flex(vocab_size=len(TOKENIZER)), prompts, actions)
    assert found.dlogit.max() <= 1e-4 * found.max_logit, str(found)


def test_bfloat16_on_cuda_is_as_near_the_truth_as_single_calls():
    model = model_for_flex(vocab_size=len(TOKENIZER)).to(torch.bfloat16)
    report = audit(model, {"mem1": trajectories("mem1")})
    assert report["holds"], report["failures"]


def test_the_losses_fit_a_real_vocabulary():
    """12,083 tokens (the paper's audit) at V = 151,936 in bfloat16: far below one (N, V) tensor,
    which has 3.4 GiB."""
    N, H, V = 12_083, 2048, 151_936
    settings = {"device": "cuda", "dtype": torch.bfloat16}
    hidden, teacher_hidden = torch.randn(2, N, H, **settings)
    hidden.requires_grad_()
    head = (0.02 * torch.randn(V, H, **settings)).requires_grad_()
    teacher_head, ids = head.detach(), torch.randint(V, (N,), device="cuda")

    def loss(logits, rows):
        teacher_logits = head_logits(teacher_hidden[rows], teacher_head)
        kl = reverse_kl(logits, teacher_logits)
        total = log_prob(logits, ids[rows]) + entropy(logits) + kl
        return total.sum() / N, {"kl": kl}

    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    total, metrics = chunked_loss(loss, hidden, head)
    total.backward()
    assert torch.cuda.max_memory_allocated() - before < 3.4 * 2**30
    assert head.grad.isfinite().all() and len(metrics["kl"]) == N


def test_train_on_cuda(tmp_path):
    args = [*FAST, "--device", "cuda", "--run_dir", "r", "--hidden_size", "128"]
    out = command(*args, cwd=tmp_path)
    assert out.returncode == 0 and "| Q2 | student |" in out.stdout, out.stderr


SHAPES = {  # Qwen2.5's of 3B and 7B
    "student": {
        "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 11_008,
        "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "teacher": {
        "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}  # fmt: skip


@pytest.mark.skipif(not large_gpu(), reason="needs 130 GB of GPU memory")
@pytest.mark.parametrize("engine", ["plain", "continuous"])
def test_one_step_of_3b(engine, tmp_path):
    """Random weights in the shapes of 3B and 7B: roll out 16 short tasks, score, update; no phase
    needs more than the estimate. Prints seconds and GiB by phase."""
    for name, shape in SHAPES.items():
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(Qwen2Config(**shape), dtype=torch.bfloat16)
        model.save_pretrained(tmp_path / name)
        TOKENIZER.save_pretrained(tmp_path / name)
        del model
        torch.cuda.empty_cache()
    args = ["--preset", "3b", "--run_dir", str(tmp_path / "run")]
    args += ["--student", str(tmp_path / "student"), "--teacher", str(tmp_path / "teacher")]
    args += "--offload --steps 1 --tasks_per_step 16 --max_new_tokens 128".split()
    args += ["--eval_questions", "0", "--engine", engine]
    out = command(*args, cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    cost = json.loads((tmp_path / "run/metrics.jsonl").read_text())
    parts = estimate(parse_config(args), 1)
    for letter, phase in (("r", "rollout"), ("s", "score"), ("u", "update")):
        most = sum(x for _, phases, x in parts if letter in phases) / 2**30
        seconds, used = cost[f"seconds_{phase}"], cost[f"gib_{phase}"]
        print(f"{engine}, {phase}: {seconds:.1f} s, {used:.1f} GiB, estimate {most:.1f}")
        # transformers fills what is free with its cache
        assert used <= most or (engine, phase) == ("continuous", "rollout"), phase
