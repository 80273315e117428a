"""The same run on two ranks of torchrun (gloo) and on one: losses, gradients, weights, checkpoints, and what is left
when a rank or the disk is lost."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import train as train_file
from conftest import FAST
from rollout import train_tokenizer
from tiny import tiny

RANKS = str(Path(__file__).with_name("ranks.py"))
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def start(n, *args, cwd):
    """Run a script on n ranks, n = 0 without torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)] if n else []
    return subprocess.run(
        [sys.executable, *torchrun, *args],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=ONE_THREAD,
        timeout=180,
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Tiny Qwen2 students, tied and not; a teacher of another width and vocabulary."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = train_tokenizer(train_file.toy_texts(), 600)
    size = len(tokenizer) + 3  # the tokenizer of a Qwen2 gets one of its own when it is loaded
    for name, model in (
        ("tied", tiny(vocab_size=size, tie_word_embeddings=True, initializer_range=0.2)),
        ("untied", tiny(vocab_size=size, initializer_range=0.2)),
        ("teacher", tiny(seed=1, vocab_size=size + 7, hidden_size=64, initializer_range=0.2)),
    ):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def flags(models, student, *more):
    """A run of three updates on recorded episodes."""
    return [
        "--student", str(models / student), "--teacher", str(models / "teacher"), "--device", "cpu", "--steps", "3",
        "--ppo_epochs", "1", "--eval_questions", "0", "--max_len", "2000", "--max_new_tokens", "16", "--actor_lr",
        "1e-3", "--gamma", "0.99", "--allow_mismatch", *more,
    ]  # fmt: skip


def near(a, b, tolerance):
    """Equal in norm, relative to the larger; what is 0 in both is equal."""
    return (a - b).norm() <= tolerance * max(a.norm(), b.norm())


@pytest.mark.parametrize(
    "student, tasks, max_tokens, packs",
    [("tied", 5, 1000, {(2, 1)}), ("untied", 3, 900, {(2, 1)}), ("untied", 1, 8000, {(1, 0)})],
)
def test_two_ranks_are_one(models, tmp_path, student, tasks, max_tokens, packs):
    """Losses, every parameter's gradient and the weights after three updates, with uneven numbers of tasks, calls and
    packs, and with a rank that has no task and no pack; the two ranks compute activations again and
    put frozen models away, the one does not.
    Would catch a mean of means, a lost factor of the number of ranks, whitening by rank, the norm of a shard, a rank
    that hangs."""
    args = flags(models, student, "--tasks_per_step", str(tasks), "--max_tokens", str(max_tokens))
    found = {}
    for n, more in ((0, []), (2, ["--gradient_checkpointing", "--offload"])):
        out = start(n, RANKS, f"{n}.pt", *args, *more, "--run_dir", f"r{n}", cwd=tmp_path)
        assert out.returncode == 0, out.stderr[-3000:]
        found[n] = torch.load(tmp_path / f"{n}.pt", weights_only=False)
    assert packs & {tuple(p) for p in found[2]["packs"]}
    for a, b in zip(found[0]["kept"], found[2]["kept"], strict=True):
        for name, value in a["metrics"].items():
            assert b["metrics"][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
        for model in ("student", "critic"):
            assert a[model].keys() == b[model].keys()
            for name, grad in a[model].items():
                assert near(grad, b[model][name], 1e-5), name
    alone, sharded = (
        AutoModelForCausalLM.from_pretrained(tmp_path / f"r{n}/student").state_dict() for n in (0, 2)
    )
    assert alone.keys() == sharded.keys()
    for name in alone:
        assert near(alone[name], sharded[name], 1e-5), name
    assert os.path.getsize(tmp_path / "r0/student/model.safetensors") == os.path.getsize(
        tmp_path / "r2/student/model.safetensors"
    )


def metrics(run, stage="rl"):
    """Without what depends on the clock, and on how calls are spread over packs."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in m.items() if not k.startswith("seconds") and k not in ("tokens_saved", "stage")}
        for m in lines
        if m["stage"] == stage
    ]


def weights(run):
    return AutoModelForCausalLM.from_pretrained(run / "student").state_dict()


def same(a, b):
    """Runs up to rounding."""
    for x, y in zip(metrics(a), metrics(b), strict=True):
        assert x.keys() == y.keys() and x == pytest.approx(y, rel=1e-5, abs=1e-6)
    one, other = weights(a), weights(b)
    assert all(near(one[name], other[name], 1e-5) for name in one)


def test_saved_on_two_ranks_loaded_on_one(models, tmp_path):
    """Two steps on two ranks, then `--resume` on one to four; against four on one. Sampling is real here: noise does
    not depend on the rank."""
    args = flags(models, "tied", "--tasks_per_step", "5", "--save_every", "2", "--max_new_tokens", "12")
    for n, run, steps, more in ((0, "one", "4", []), (2, "two", "2", []), (0, "two", "4", ["--resume"])):
        out = start(n, train_file.__file__, *args, "--run_dir", run, "--steps", steps, *more, cwd=tmp_path)
        assert out.returncode == 0, out.stderr[-3000:]
    assert "goes on after 2 steps" in out.stdout + out.stderr
    same(tmp_path / "one", tmp_path / "two")


def test_from_nothing_to_the_table_on_two_ranks(tmp_path):
    """The first rank makes the warm start, evaluation is spread, one rank speaks."""
    out = start(2, train_file.__file__, *FAST, "--run_dir", "two", "--tasks_per_step", "5", cwd=tmp_path)
    assert out.returncode == 0, out.stderr[-3000:]
    assert out.stdout.count("| Q2 | student |") == 1 and out.stdout.count("before training") == 1
    alone = start(0, train_file.__file__, *FAST, "--run_dir", "one", "--tasks_per_step", "5", cwd=tmp_path)
    table = [
        line.rsplit("|", 2)[0] for line in out.stdout.splitlines() if line.startswith("| Q")
    ]  # without seconds
    assert table and table == [
        line.rsplit("|", 2)[0] for line in alone.stdout.splitlines() if line.startswith("| Q")
    ]
    same(tmp_path / "one", tmp_path / "two")
    trajectories = [
        (tmp_path / f"{run}/trajectories.jsonl").read_text().splitlines() for run in ("one", "two")
    ]
    assert sorted(json.loads(x)["task_id"] for x in trajectories[0]) == sorted(
        json.loads(x)["task_id"] for x in trajectories[1]
    )


def test_sft_on_two_ranks(models, tmp_path):
    """The other stage: the same loss and weights, with a last batch that is too small for two ranks; and it resumes."""
    turns = [
        {"response": f"<think> {i} </think> <search> x{i} </search>", "observation": f" ({i})"}
        for i in range(9)
    ]
    episodes = [{"task": str(i), "prompt": "Count .", "turns": turns[i : i + 2 + i % 3]} for i in range(5)]
    (tmp_path / "turns.jsonl").write_text("".join(json.dumps(e) + "\n" for e in episodes))
    args = [
        "--stage", "sft", "--sft_data", "turns.jsonl", "--student", str(models / "untied"), "--device", "cpu",
        "--tasks_per_step", "2", "--sft_epochs", "2", "--sft_lr", "1e-3", "--save_every", "2",
    ]  # fmt: skip
    for n in (0, 2):
        out = start(n, train_file.__file__, *args, "--run_dir", f"r{n}", cwd=tmp_path)
        assert out.returncode == 0, out.stderr[-3000:]
    one, two = metrics(tmp_path / "r0", "sft"), metrics(tmp_path / "r2", "sft")
    assert len(one) == 6 and one[-1]["loss"] < one[0]["loss"]
    for x, y in zip(one, two, strict=True):
        assert x == pytest.approx(y, rel=1e-5)
    a, b = weights(tmp_path / "r0"), weights(tmp_path / "r2")
    assert all(near(a[name], b[name], 1e-5) for name in a)
    newest = tmp_path / "r2/checkpoints/step-000006"
    newest.rename(tmp_path / "gone")
    out = start(0, train_file.__file__, *args, "--run_dir", "r2", "--resume", cwd=tmp_path)
    assert out.returncode == 0 and "goes on after 4 steps" in out.stdout + out.stderr, out.stderr[-3000:]
    assert newest.exists() and len(metrics(tmp_path / "r2", "sft")) == 6


def test_bfloat16_keeps_float32_where_it_counts(models, tmp_path):
    """Masters, moments and rotary frequencies, those to the last bit, also of the frozen models, which are bfloat16;
    gradients are summed over ranks in float32; and they are those of float32 as far as bfloat16 lets them."""
    kept = {}
    for n, dtype in ((0, "float32"), (2, "bfloat16")):
        args = flags(
            models, "tied", "--tasks_per_step", "3", "--dtype", dtype, "--run_dir", dtype, "--max_grad_norm", "1e9"
        )  # fmt: skip
        out = start(n, RANKS, f"{dtype}.pt", *args, cwd=tmp_path)
        assert out.returncode == 0, out.stderr[-3000:]
        kept[dtype] = torch.load(tmp_path / f"{dtype}.pt", weights_only=False)
    assert kept["bfloat16"]["moments"] == {("exp_avg", torch.float32), ("exp_avg_sq", torch.float32)}
    first, other = (kept[dtype]["kept"][0] for dtype in ("float32", "bfloat16"))
    assert first["frozen"] == {torch.float32} and other["frozen"] == {torch.bfloat16}
    for (_, expected), (dtype, frequencies) in zip(first["buffers"], other["buffers"], strict=True):
        assert dtype == torch.float32 and frequencies.equal(expected)
    assert len(first["buffers"]) >= 4
    assert other["metrics"]["teacher_kl"] != first["metrics"]["teacher_kl"]
    assert other["metrics"]["teacher_kl"] == pytest.approx(first["metrics"]["teacher_kl"], rel=0.05)
    for name, grad in other["student"].items():
        assert grad.dtype == torch.float32 and not grad.equal(grad.bfloat16().float()), name
        if first["student"][name].norm() > 1e-3:
            assert near(first["student"][name], grad, 0.1), name


def test_a_lost_rank_leaves_the_last_checkpoint(models, tmp_path):
    """One of two ranks is killed: all end, and one goes on from the last whole checkpoint."""
    args = flags(
        models, "untied", "--tasks_per_step", "4", "--save_every", "1", "--run_dir", "r", "--steps", "500"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         train_file.__file__, *args],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ONE_THREAD,
    )  # fmt: skip
    deadline = time.time() + 120
    while not (tmp_path / "r/checkpoints/step-000003").exists() and time.time() < deadline:
        time.sleep(0.01)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGKILL)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1
    found = train_file.checkpoints(tmp_path / "r")
    done = int(found[-1].name[5:])
    out = start(0, train_file.__file__, *args, "--resume", "--steps", str(done + 1), cwd=tmp_path)
    assert out.returncode == 0 and f"goes on after {done} steps" in out.stdout + out.stderr, out.stderr[
        -3000:
    ]


FULL = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sys.path.insert(0, {folder!r})
import train
real = train.save_checkpoint
def full(run, step, *rest):
    if step == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    real(run, step, *rest)
train.save_checkpoint = full
train.main()
"""


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_full_disk_leaves_the_last_checkpoint(models, tmp_path, ranks):
    """A checkpoint that cannot be written ends the run with a sentence; the one before it is whole and nothing half is
    left."""
    (tmp_path / "full.py").write_text(FULL.format(folder=str(Path(train_file.__file__).parent)))
    args = flags(models, "tied", "--tasks_per_step", "2", "--save_every", "1", "--run_dir", "r")
    out = start(ranks, "full.py", *args, cwd=tmp_path)
    assert out.returncode == 1
    assert "step 1 is done, but could not be saved" in out.stderr and "MiB are free" in out.stderr
    assert ranks or "File too large" in out.stderr
    assert "the last good checkpoint is r/checkpoints/step-000001" in out.stderr
    assert [p.name for p in (tmp_path / "r/checkpoints").iterdir()] == ["step-000001"]
    out = start(0, train_file.__file__, *args, "--resume", cwd=tmp_path)
    assert out.returncode == 0 and "goes on after 1 steps" in out.stdout + out.stderr
