"""What only a GPU can show: FlexAttention backward, and the preset `tiny` to its end on CUDA."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from conftest import FAST, command
from losses import action_scores
from pack import action_hidden, pack
from rce import audit, rce
from test_rce import RULES, TOKENIZER, trajectories
from tiny import random_calls, tiny
from train import estimate, parse_config

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def exact_float32(monkeypatch):
    """TF32 would hide errors of 1e-3."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize("tasks", [3, 60])
def test_flex_forward_and_backward_against_the_dense_mask(kind, tasks):
    """Hidden states and every parameter's gradient, in one tile and over many, head width 64 (the kernel's
    smallest comfortable one)."""
    prompts, actions, _ = random_calls(tasks=tasks)
    packed, results = pack(prompts, actions), {}
    for backend in ("flex", "dense"):
        model = tiny(kind, hidden_size=256, initializer_range=0.1).cuda()
        hidden = action_hidden(model, packed, backend)
        (hidden**2).sum().backward()
        results[backend] = [hidden.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    for a, b in zip(*results.values(), strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm()


@pytest.mark.parametrize("rule", RULES)
def test_rce_on_cuda(rule):
    found = rce(
        tiny(vocab_size=len(TOKENIZER), hidden_size=256, initializer_range=0.1).cuda(), trajectories(rule)
    )
    assert found.dlogit.max() <= 1e-4 * found.max_logit, str(found)


def test_bfloat16_on_cuda_is_as_near_the_truth_as_single_calls():
    model = tiny(vocab_size=len(TOKENIZER), hidden_size=256, initializer_range=0.1).to("cuda", torch.bfloat16)
    report = audit(model, {"mem1": trajectories("mem1")})
    assert report["holds"], report["failures"]


def test_action_scores_fit_a_real_vocabulary():
    """12,083 tokens (the paper's audit) at V = 151,936 in bfloat16: far below one (N, V) tensor, which has 3.4 GiB."""
    N, H, V = 12_083, 2048, 151_936
    hidden, teacher_hidden = torch.randn(2, N, H, device="cuda", dtype=torch.bfloat16)
    head = (0.02 * torch.randn(V, H, device="cuda", dtype=torch.bfloat16)).requires_grad_()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ids = torch.randint(V, (N,), device="cuda")
    sum(
        x.mean() for x in action_scores(hidden.requires_grad_(), head, ids, teacher_hidden, head.detach())
    ).backward()
    assert torch.cuda.max_memory_allocated() - before < 3.4 * 2**30 and head.grad.isfinite().all()


def test_train_on_cuda(tmp_path):
    out = command(*FAST, "--device", "cuda", "--run_dir", "r", "--hidden_size", "128", cwd=tmp_path)
    assert out.returncode == 0 and "| Q2 | student |" in out.stdout, out.stderr


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 130e9,
    reason="needs 130 GB of GPU memory",
)
def test_one_step_of_3b(tmp_path):
    """Qwen2.5's shapes of 3B and 7B with random weights: roll out 16 short tasks, score, update; no phase needs more
    than the estimate. Prints seconds and GiB by phase."""
    for name, shape in (
        ("student", (151_936, 2048, 11_008, 36, 16, 2)),
        ("teacher", (152_064, 3584, 18_944, 28, 28, 4)),
    ):
        keys = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
        config = Qwen2Config(**dict(zip(keys.split(), shape)), tie_word_embeddings=name == "student")
        with torch.device("cuda"):
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / name)
        TOKENIZER.save_pretrained(tmp_path / name)
        torch.cuda.empty_cache()
    args = ["--preset", "3b", "--student", str(tmp_path / "student"), "--teacher", str(tmp_path / "teacher")]
    args += "--offload --steps 1 --tasks_per_step 16 --max_new_tokens 128 --eval_questions 0".split()
    out = command(*args, "--run_dir", str(tmp_path / "run"), cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    cost = json.loads((tmp_path / "run/metrics.jsonl").read_text())
    print({name: round(x, 2) for name, x in cost.items() if name.startswith(("seconds", "gib"))})
    for phase, names in (
        ("r", ["rollout"]),
        ("s", ["score_teacher"]),
        ("u", ["update_student", "update_critic"]),
    ):
        most = sum(x for _, phases, x in estimate(parse_config(args), 1) if phase in phases) / 2**30
        assert max(cost[f"gib_{name}"] for name in names) <= most, phase
