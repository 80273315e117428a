"""The benchmarks: all forms of a comparison compute the same, and what is counted is right."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from env import Passage, SqliteRetriever
from experiments import bench
from pack import pack
from tiny import tiny


def test_packs_are_compared_on_equal_computations(monkeypatch):
    """Each row: the token counts of its packs, the logits of single calls, and all forms timed.
    The work by hand: a token costs the layers' weights and twice the width for each token that it
    sees, an action token the head."""
    small = {"q": 5, "calls": 3, "block": 10}
    workloads = {"small": small, "append": {**small, "append_only": True}}
    monkeypatch.setattr(bench, "WORKLOADS", workloads)
    model = tiny(vocab_size=1000)
    rows = list(bench.pack_rows(model, rounds=2))
    assert [row[:2] for row in rows] == [
        ["small", "q"],
        ["small", "tree"],
        ["append", "q"],
        ["append", "tree"],
    ]
    prompts, actions, prefix_lens = bench.make_calls(**small)
    alone = sum(map(len, prompts + actions))
    S = len(pack(prompts, actions, prefix_lens).input_ids)
    assert S == alone - 2 * 5 and rows[0][2] == f"{alone} -> {S}"
    for row in rows:
        assert len(row) == len(bench.COLUMNS) and float(row[-1]) < 1e-4
    by_q, by_tree = float(rows[2][3]), float(rows[3][3])
    assert by_tree > 1.5 > by_q  # append-only: only the tree shares
    packed = pack([[1, 2]], [[3]])
    weights = 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64)
    attention = (1 + 2 + 3) * 2 * 2 * 32
    assert bench.multiplications(model, packed) == 3 * weights + attention + 1000 * 32


def test_losses_are_compared_on_equal_gradients():
    """And in memory that is known: of 3,000 x 2,000 logits in float32, 23 MiB, the plain form keeps
    several copies for its backward pass, the chunked form not one."""
    flags = "losses --rounds 1 --tokens 2000 --hidden_size 8 --teacher_hidden_size 6"
    flags += " --vocab_size 3000 --chunk 50 --device cpu"
    line = bench.loss_line(bench.make_parser().parse_args(flags.split()))
    errors = re.findall(r"(\S+) \((?:hidden states|head)\)", line)
    assert len(errors) == 2 and max(map(float, errors)) < 1e-5 and "of the time" in line
    ours, plain = re.search(r"(\d+) MiB beyond the inputs against (\d+)", line).groups()
    assert int(ours) < 23 and int(plain) > 3 * 23


def test_samplers_are_compared_on_equal_responses():
    """Each way to sample gives every prompt the response that `generate` gives it."""
    prompts = [[1, 2, 3, 4] + list(range(5, 5 + n)) for n in (1, 4, 2, 6, 3)]
    rows = list(bench.sampling_rows(tiny(), prompts, max_new_tokens=40, rounds=1))
    assert [row[-1] for row in rows] == ["5 of 5"] * 4
    assert rows[0][0] == "generate" and rows[0][2] == "1.00"


def test_the_script_for_a_gpu_runs_in_small(tmp_path):
    """Every part of it, on a CPU."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    settings = {"env": {**os.environ, "PATH": path}, "capture_output": True, "text": True}
    script = Path(bench.__file__).with_name("gpu.sh")
    command = ["bash", str(script), "report.md", "--small"]
    out = subprocess.run(command, cwd=tmp_path, **settings)
    report = (tmp_path / "report.md").read_text()
    assert out.returncode == 0 and "FAILED" not in report, report
    assert report.count("\n## ") == 7 and report.count("'seconds_update'") == 2


def test_recall_by_hand(tmp_path):
    """Two of three named passages are among the first three; a file without supporting facts is
    refused."""
    passages = [Passage("A", "alpha"), Passage("B", "beta beta"), Passage("C", "beta")]
    retriever, file = SqliteRetriever(passages), tmp_path / "h.json"
    facts = [["A", 0], ["A", 2], ["C", 1]]
    records = [
        {"_id": "1", "question": "alpha ?", "answer": "x", "supporting_facts": facts},
        {"_id": "2", "question": "beta", "answer": "x", "supporting_facts": [["B", 0]]},
    ]
    file.write_text(json.dumps(records))
    found = bench.recall(retriever, file)
    assert found.startswith("2 questions: recall@3 66.7%, recall@10 66.7%, p50")
    file.write_text(json.dumps([{"_id": "1"}]))
    with pytest.raises(ValueError, match="needs HotpotQA's own JSON"):
        bench.recall(retriever, file)


@pytest.mark.parametrize(
    "args, message",
    [
        (["recall", "nothing.db", "h.json"], "experiments.bench: .*nothing.db"),
        (["packs", "--rounds", "1"], "2"),
        (["packs", "--vocab_size", "300"], "2"),
        (["frobnicate"], "2"),
    ],
)
def test_command_line_errors(args, message, monkeypatch):
    monkeypatch.setattr("sys.argv", ["bench.py", *args])
    with pytest.raises(SystemExit, match=message):
        bench.main()
