"""A real language model, tokenizer and text, where the environment names them: MEMOPD_MODEL is a folder with a small
instruct model, MEMOPD_TOKENIZER one with Qwen2.5's tokenizer, MEMOPD_DATA one with HotpotQA questions and passages
(hotpotqa/questions.jsonl and hotpotqa/corpus.jsonl)."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import rce as rce_file
from env import STOP, toy_envs
from rce import independent_logits, rce
from rollout import encode_prompt, generate, mem1, rollout, stop_on, task_generators


def folder(variable):
    path = os.environ.get(variable)
    return path or pytest.skip(
        f"{variable} is not set: the real {variable.split('_')[1].lower()} is not here"
    )


def test_rce_and_sampling_on_a_real_model():
    """Three calls a task of a 135M model that rewrites its context with what it said: packed logits are those
    of single calls, and the log-probs recorded while sampling (left-padded, cached, batched) are those of the
    pack."""
    path = folder("MEMOPD_MODEL")
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="packed", dtype=torch.float32
    ).eval()
    envs = toy_envs("test", 3, 2)
    turns = dict.fromkeys(envs, 0)

    def step_all(envs, responses):
        for env in envs:
            turns[env] += 1
        return [(f"\n<information> {turns[env]} </information>\n", 0.0, turns[env] == 3) for env in envs]

    noise = task_generators(0, 0, [env.task.id for env in envs])
    trajectories = rollout(
        lambda prompts, rows: generate(model, prompts, 16, generators=[noise[i] for i in rows]),
        tokenizer,
        envs,
        step_all,
        mem1,
    )
    for share in ("tree", "q"):
        found = rce(model, trajectories, share)
        assert found.holds(), str(found)
    for call in (call for trajectory in trajectories for call in trajectory.calls):
        logp = independent_logits(model, call.prompt_ids, call.action_ids).log_softmax(-1)
        expected = logp.gather(1, torch.tensor(call.action_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(call.logprobs), expected, rtol=0, atol=1e-3)


def test_quick_audit_of_a_real_model_on_real_text():
    """Tables 3 and 4 and Figure 3b in small: packs at the numerical floor, everything else off by orders of magnitude,
    visibility more than positions."""
    data = folder("MEMOPD_DATA")
    files = ["--questions", f"{data}/hotpotqa/questions.jsonl", "--corpus", f"{data}/hotpotqa/corpus.jsonl"]
    out = subprocess.run(
        [sys.executable, rce_file.__file__, "--quick", "--json", "--model", folder("MEMOPD_MODEL"), *files],
        capture_output=True,
        text=True,
    )
    assert out.returncode == 0, out.stderr
    report = json.loads(out.stdout)
    table, figure = report["table3"], report["figure3b"]
    floor = table["batching floor"]["p99_dlogp"]
    assert report["holds"] and report["calls"] == 12 and len(report["table4"]) == 6
    for row in (table["packing, q"], table["packing, tree"], *report["table4"].values()):
        assert row["p99_dlogp"] <= 1e-4 and row["top1"] == 1 and row["false_clip"] == 0
    for name in (
        "packing, tree",
        "packing, q",
    ):  # the p99 of 180 tokens is their second worst: no sharper than this
        assert table[name]["p99_dlogp"] <= 5 * floor
    positions, visibility = figure["positions only"]["p99_dlogp"], figure["visibility only"]["p99_dlogp"]
    assert visibility > positions > 1000 * floor and table["persistent history"]["p99_dlogp"] > 1000 * floor


def test_stop_with_the_real_qwen_tokenizer():
    """`</search>` ends in `>` alone or in one token with the line break after it: both stop, and only at their end. q
    ends with the generation prompt."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder("MEMOPD_TOKENIZER"))
    stop = stop_on(tokenizer, STOP)
    for text in ("<search> a </search>", "<search> a </search>\n", "<answer> a </answer>\n\n"):
        ids = tokenizer.encode(text)
        assert stop(ids) and not any(stop(ids[:n]) for n in range(1, len(ids)))
    assert tokenizer.encode("</search>")[-1] != tokenizer.encode("</search>\n")[-1]
    assert stop(tokenizer.encode("bye<|im_end|>")) and not stop(tokenizer.encode("<search> a </sear"))
    assert tokenizer.decode(encode_prompt(tokenizer, "hi")).endswith("<|im_start|>assistant\n")
