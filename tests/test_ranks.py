"""The same run on two ranks of torchrun (gloo) and on one: losses, gradients, weights, checkpoints,
and what is left when a rank or the disk is lost."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import train as train_file
from conftest import FAST
from env import toy_texts
from rollout import train_tokenizer
from tiny import tiny

RANKS = str(Path(__file__).with_name("ranks.py"))
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def script(ranks, *args):
    """The command for a script on so many ranks, 0 for a process without torchrun."""
    if not ranks:
        return [sys.executable, *args]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [sys.executable, *torchrun, *args]


def start(ranks, *args, cwd, **environment):
    """Run it to its end."""
    settings = {"capture_output": True, "text": True, "timeout": 180}
    environment = {**ONE_THREAD, **environment}
    return subprocess.run(script(ranks, *args), cwd=cwd, env=environment, **settings)


def succeed(ranks, *args, cwd, **environment):
    """Run it to its end, which must be a good one: what it printed."""
    out = start(ranks, *args, cwd=cwd, **environment)
    assert out.returncode == 0, out.stderr[-9000:]
    return out.stdout


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Tiny Qwen2 students, tied and not; a teacher of another width and vocabulary."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = train_tokenizer(toy_texts(), 600)
    size = len(tokenizer) + 3  # the tokenizer of a Qwen2 gets one of its own when it is loaded
    large = {"initializer_range": 0.2}
    students = {
        "tied": tiny(vocab_size=size, tie_word_embeddings=True, **large),
        "untied": tiny(vocab_size=size, **large),
        "teacher": tiny(seed=1, vocab_size=size + 7, hidden_size=64, **large),
    }
    for name, model in students.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def flags(models, student, *more):
    """A run of three updates on recorded episodes."""
    settings = (
        "--device cpu --horizon 2 --steps 3 --ppo_epochs 1 --eval_questions 0 --max_len 2000 "
        "--max_new_tokens 16 --actor_lr 1e-3 --gamma 0.99 --allow_mismatch"
    )
    pair = ["--student", str(models / student), "--teacher", str(models / "teacher")]
    return [*pair, *settings.split(), *more]


@pytest.fixture(scope="module")
def updates(tmp_path_factory):
    """updates(ranks, *flags) -> a folder with run/, and what ranks.py kept of it; the same flags
    run only once."""
    done = {}

    def run(ranks, *args, **environment):
        key = (ranks, *args, *environment.items())
        if key not in done:
            folder = tmp_path_factory.mktemp("updates")
            args = (RANKS, "kept.pt", *args, "--run_dir", "run")
            succeed(ranks, *args, cwd=folder, **environment)
            done[key] = folder, torch.load(folder / "kept.pt", weights_only=False)
        return done[key]

    return run


def near(a, b, tolerance):
    """Equal in norm, relative to the larger; what is 0 in both is equal."""
    return (a - b).norm() <= tolerance * max(a.norm(), b.norm())


def same_update(a, b):
    """One update of two runs, up to rounding."""
    for name, value in a["metrics"].items():
        assert b["metrics"][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    for model in ("student", "critic"):
        assert a[model].keys() == b[model].keys()
        for name, grad in a[model].items():
            assert near(grad, b[model][name], 1e-5), name


def metrics(run, stage="rl"):
    """Without what depends on the clock, and on how calls are spread over packs."""
    found = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record.pop("stage") == stage:
            names = [name for name in record if not name.startswith("seconds")]
            found.append({name: record[name] for name in names if name != "tokens_saved"})
    return found


def weights(run):
    return AutoModelForCausalLM.from_pretrained(run / "student").state_dict()


def same_weights(a, b):
    """The students of two runs, up to rounding."""
    one, other = weights(a), weights(b)
    assert one.keys() == other.keys()
    for name in one:
        # a key's bias shifts all scores of a row nearly alike: much of its gradient is rounding,
        # which Adam magnifies
        tolerance = 1e-3 if name.endswith("k_proj.bias") else 1e-5
        assert near(one[name], other[name], tolerance), name


def same_runs(a, b):
    """Metrics and students, up to rounding."""
    for x, y in zip(metrics(a), metrics(b), strict=True):
        assert x.keys() == y.keys()
        for name in x:
            # the largest error of a log-prob is rounding, and so is much of what a mean leaves of
            # whitened advantages
            tolerance = 1e-5 if name in ("logp_mismatch_max", "ppo_loss") else 1e-6
            assert x[name] == pytest.approx(y[name], rel=1e-5, abs=tolerance), name
    same_weights(a, b)


# ---- two ranks are one ---------------------------------------------------------------------------
TIED = ("tied", 5, 1000)  # a student, its tasks in a step, and the tokens of a pack


def updates_of(models, student, tasks, max_tokens, *more):
    """Flags that spread the episodes over several packs."""
    sizes = ["--tasks_per_step", str(tasks), "--max_tokens", str(max_tokens)]
    return flags(models, student, *sizes, *more)


@pytest.mark.parametrize(
    "workload, packs", [(TIED, (2, 1)), (("untied", 3, 900), (2, 1)), (("untied", 1, 8000), (1, 0))]
)
def test_two_ranks_are_one(models, updates, workload, packs):
    """Losses, every parameter's gradient and the weights after three updates, with uneven numbers
    of tasks, calls and packs, and with a rank that has no task and no pack; the two ranks compute
    activations again and put frozen models away, the one does not. Would catch a mean of means, a
    lost factor of the number of ranks, whitening by rank, the norm of a shard, a rank that
    hangs."""
    args = updates_of(models, *workload)
    one, alone = updates(0, *args)
    two, sharded = updates(2, *args, "--gradient_checkpointing", "--offload")
    assert packs in [tuple(counts) for counts in sharded["packs"]]
    for a, b in zip(alone["kept"], sharded["kept"], strict=True):
        same_update(a, b)
    same_weights(one / "run", two / "run")
    file = "run/student/model.safetensors"
    assert os.path.getsize(one / file) == os.path.getsize(two / file)


def test_another_loss_is_another_run(models, updates):
    """Whoever edits `losses.reverse_kl` changes what trains, on one process and, to the same
    values, on two ranks: no second copy of the formula is in use. Would catch a closed form or a
    kernel beside the readable one, for the tied head too."""
    _, plain = updates(0, *updates_of(models, *TIED))
    args = updates_of(models, *TIED, "--steps", "1")
    _, alone = updates(0, *args, FORWARD_KL="1")
    _, sharded = updates(2, *args, FORWARD_KL="1")
    before, (edited,) = plain["kept"][0], alone["kept"]
    same_update(edited, sharded["kept"][0])
    kl, edited_kl = before["metrics"]["teacher_kl"], edited["metrics"]["teacher_kl"]
    assert abs(kl - edited_kl) > 1e-4 * kl  # not far: these random models differ by as much
    for name, grad in before["student"].items():
        if grad.norm() > 1e-6:  # below, it is rounding
            assert not near(grad, edited["student"][name], 0.01), name
    for name, grad in before["critic"].items():
        assert near(grad, edited["critic"][name], 1e-5), name


def test_saved_on_two_ranks_loaded_on_one(models, tmp_path):
    """Two steps on two ranks, then `--resume` on one to four; against four on one. Sampling is real
    here: noise does not depend on the rank."""
    sizes = "--tasks_per_step 5 --save_every 2 --max_new_tokens 12".split()
    args = flags(models, "tied", *sizes)
    succeed(0, train_file.__file__, *args, "--run_dir", "one", "--steps", "4", cwd=tmp_path)
    succeed(2, train_file.__file__, *args, "--run_dir", "two", "--steps", "2", cwd=tmp_path)
    args = "--run_dir two --resume --steps 4".split()
    assert "resumes after 2 steps" in succeed(0, train_file.__file__, *args, cwd=tmp_path)
    same_runs(tmp_path / "one", tmp_path / "two")


def test_from_nothing_to_the_table_on_two_ranks(tmp_path):
    """The first rank makes the warm start, evaluation is spread, one rank speaks."""
    tables, tasks = {}, {}
    for ranks, run in ((2, "two"), (0, "one")):
        args = [*FAST, "--run_dir", run, "--tasks_per_step", "5"]
        printed = succeed(ranks, train_file.__file__, *args, cwd=tmp_path)
        assert printed.count("| Q2 | student |") == printed.count("before training") == 1
        rows = [line for line in printed.splitlines() if line.startswith("| Q")]
        tables[run] = [row.rsplit("|", 2)[0] for row in rows]  # without seconds
        lines = (tmp_path / run / "trajectories.jsonl").read_text().splitlines()
        tasks[run] = sorted(json.loads(line)["task_id"] for line in lines)
    assert tables["one"] and tables["one"] == tables["two"]
    assert tasks["one"] == tasks["two"]
    same_runs(tmp_path / "one", tmp_path / "two")


def test_two_machines_are_one(models, tmp_path):
    """Two agents of torchrun that find each other over the loopback, a rank each, in one shared
    folder: the run of one process."""
    args = flags(models, "tied", *"--tasks_per_step 5 --steps 2".split())
    with socket.socket() as free:
        free.bind(("localhost", 0))
        endpoint = f"localhost:{free.getsockname()[1]}"
    nodes = "--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-id memopd --rdzv-endpoint"
    torchrun = [sys.executable, "-m", "torch.distributed.run", *nodes.split(), endpoint]
    command = [*torchrun, train_file.__file__, *args, "--run_dir", "two"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    agents = []
    for _ in range(2):
        agents.append(subprocess.Popen(command, cwd=tmp_path, env=ONE_THREAD, **pipes))
    said = [agent.communicate(timeout=180) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert sum("step   1" in out for out, _ in said) == 1  # one of all ranks speaks
    succeed(0, train_file.__file__, *args, "--run_dir", "one", cwd=tmp_path)
    same_runs(tmp_path / "one", tmp_path / "two")


def test_pages_on_two_ranks(models, tmp_path):
    """--engine continuous, with a rank that has a task less: after an update (new storage at every
    unshard) its log-probs are still those of the packs."""
    args = flags(models, "tied", *"--tasks_per_step 3 --max_new_tokens 12 --steps 2".split())
    args += ["--engine", "continuous", "--actor_lr", "1e-2", "--run_dir", "run"]
    succeed(2, train_file.__file__, *args, cwd=tmp_path)
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert len(steps) == 2 and all(step["logp_mismatch_max"] < 1e-4 for step in steps)
    assert steps[1]["reference_kl"] != 0  # the update changed what is sampled


def test_sft_on_two_ranks(models, tmp_path):
    """The other stage: the same loss and weights, with a last batch that is too small for two
    ranks; and it resumes."""
    turns = []
    for i in range(9):
        response = f"<think> {i} </think> <search> x{i} </search>"
        turns.append({"response": response, "observation": f" ({i})"})
    with open(tmp_path / "turns.jsonl", "w") as f:
        for i in range(5):
            part = turns[i : i + 2 + i % 3]
            f.write(json.dumps({"task": str(i), "prompt": "Count .", "turns": part}) + "\n")
    settings = (
        "--stage sft --sft_data turns.jsonl --device cpu --tasks_per_step 2 --sft_epochs 2 "
        "--sft_lr 1e-3 --save_every 2"
    )
    args = [*settings.split(), "--student", str(models / "untied")]
    for ranks in (0, 2):
        succeed(ranks, train_file.__file__, *args, "--run_dir", f"r{ranks}", cwd=tmp_path)
    one, two = metrics(tmp_path / "r0", "sft"), metrics(tmp_path / "r2", "sft")
    assert len(one) == 6 and one[-1]["loss"] < one[0]["loss"]
    for x, y in zip(one, two, strict=True):
        assert x == pytest.approx(y, rel=1e-5)
    same_weights(tmp_path / "r0", tmp_path / "r2")
    newest = tmp_path / "r2/checkpoints/step-000006"
    newest.rename(tmp_path / "gone")
    printed = succeed(0, train_file.__file__, "--run_dir", "r2", "--resume", cwd=tmp_path)
    assert "resumes after 4 steps" in printed
    assert newest.exists() and len(metrics(tmp_path / "r2", "sft")) == 6


def test_bfloat16_keeps_float32_where_it_counts(models, updates):
    """Masters, moments and rotary frequencies, those to the last bit, also of the frozen models,
    which are bfloat16; gradients are summed over ranks in float32; and they are those of float32 as
    far as bfloat16 lets them."""
    kept = {}
    for ranks, dtype in ((0, "float32"), (2, "bfloat16")):
        more = ["--tasks_per_step", "3", "--dtype", dtype, "--max_grad_norm", "1e9"]
        _, kept[dtype] = updates(ranks, *flags(models, "tied", *more))
    moments = kept["bfloat16"]["moments"]
    assert moments == {("exp_avg", torch.float32), ("exp_avg_sq", torch.float32)}
    first, other = kept["float32"]["kept"][0], kept["bfloat16"]["kept"][0]
    assert first["frozen"] == {torch.float32} and other["frozen"] == {torch.bfloat16}
    for (_, expected), (dtype, found) in zip(first["buffers"], other["buffers"], strict=True):
        assert dtype == torch.float32 and found.equal(expected)
    assert len(first["buffers"]) >= 4
    exact, rounded = first["metrics"]["teacher_kl"], other["metrics"]["teacher_kl"]
    assert rounded != exact and rounded == pytest.approx(exact, rel=0.05)
    for name, grad in other["student"].items():
        assert grad.dtype == torch.float32 and not grad.equal(grad.bfloat16().float()), name
        if first["student"][name].norm() > 1e-3:
            assert near(first["student"][name], grad, 0.1), name


# ---- what is left --------------------------------------------------------------------------------
def test_a_lost_rank_leaves_the_last_checkpoint(models, tmp_path):
    """One of two ranks is killed: all end, and one resumes from the last whole checkpoint."""
    settings = "--tasks_per_step 4 --save_every 1 --run_dir r --steps 500".split()
    args = script(2, train_file.__file__, *flags(models, "untied", *settings))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(args, cwd=tmp_path, env=ONE_THREAD, **pipes)
    deadline = time.time() + 120
    while not (tmp_path / "r/checkpoints/step-000003").exists() and time.time() < deadline:
        time.sleep(0.01)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGKILL)
    process.communicate(timeout=120)
    assert process.returncode == 1
    newest = train_file.checkpoints(tmp_path / "r")[-1]
    done = int(newest.name.removeprefix("step-"))
    args = ["--run_dir", "r", "--resume", "--steps", str(done + 1)]
    printed = succeed(0, train_file.__file__, *args, cwd=tmp_path)
    assert f"resumes after {done} steps" in printed


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
    """A checkpoint that cannot be written ends the run with a sentence; the one before it is whole
    and nothing half is left."""
    (tmp_path / "full.py").write_text(FULL.format(folder=str(Path(train_file.__file__).parent)))
    settings = "--tasks_per_step 2 --save_every 1 --run_dir r".split()
    out = start(ranks, "full.py", *flags(models, "tied", *settings), cwd=tmp_path)
    assert out.returncode == 1
    assert "step 1 is done, but could not be saved" in out.stderr and "MiB are free" in out.stderr
    assert ranks or "File too large" in out.stderr
    assert "the last good checkpoint is r/checkpoints/step-000001" in out.stderr
    assert [p.name for p in (tmp_path / "r/checkpoints").iterdir()] == ["step-000001"]
    printed = succeed(0, train_file.__file__, "--run_dir", "r", "--resume", cwd=tmp_path)
    assert "resumes after 1 steps" in printed
