"""A real language model and a real tokenizer, where the environment names them: MEMOPD_MODEL is a
folder with a small instruct model, MEMOPD_TOKENIZER one with Qwen2.5's tokenizer."""

import os

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from env import SearchEnv, toy_envs
from rce import independent_logits, rce
from rollout import call_ids, encode_prompt, generate, mem1, rollout, stop_on, task_generators


def folder(variable):
    """What the variable names; the test is skipped where it isn't set."""
    what = variable.split("_")[1].lower()
    return os.environ.get(variable) or pytest.skip(f"{variable} is not set: no real {what} here")


class ThreeTurns(SearchEnv):
    """Three calls per task, whatever the model says; only the prompt is that of a search task."""

    turn = 0

    @staticmethod
    def step_all(envs, responses):
        results = []
        for env in envs:
            env.turn += 1
            observation = f"\n<information> {env.turn} </information>\n"
            results.append((observation, 0.0, env.turn == 3))
        return results


def test_rce_and_sampling_on_a_real_model():
    """A model that rewrites its context with what it said: packed logits are those of single calls,
    and the log-probs recorded while sampling (left-padded, cached, batched) are those of single
    calls, too."""
    path = folder("MEMOPD_MODEL")
    settings = {"attn_implementation": "packed", "dtype": torch.float32}
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, **settings).eval()
    envs = [ThreeTurns(env.task, env.retriever) for env in toy_envs("test", 3, 2)]
    noise = task_generators(0, 0, [env.task.id for env in envs])

    def sample(prompts, rows):
        return generate(model, prompts, 16, generators=[noise[row] for row in rows])

    trajectories = rollout(sample, tokenizer, envs, mem1)
    prompts, actions, prefix_lens = call_ids(trajectories)
    assert len(prompts) == 9
    for share in (None, prefix_lens):
        found = rce(model, prompts, actions, share)
        assert found.holds(), str(found)
    for trajectory in trajectories:
        for call in trajectory.calls:
            logits = independent_logits(model, call.prompt_ids, call.action_ids)
            ids = torch.tensor(call.action_ids)
            expected = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]
            recorded = torch.tensor(call.logprobs)
            assert_close(recorded, expected, rtol=0, atol=1e-3)


def test_stop_with_the_real_qwen_tokenizer():
    """`</search>` ends in `>` alone, or in one token with the line break after it: both stop, and
    only at their end. q ends with the generation prompt."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder("MEMOPD_TOKENIZER"))
    stop = stop_on(tokenizer, SearchEnv.stop)
    for text in ("<search> a </search>", "<search> a </search>\n", "<answer> a </answer>\n\n"):
        ids = tokenizer.encode(text)
        assert stop(ids) and not any(stop(ids[:n]) for n in range(1, len(ids)))
    assert tokenizer.encode("</search>")[-1] != tokenizer.encode("</search>\n")[-1]
    assert stop(tokenizer.encode("bye<|im_end|>"))
    assert not stop(tokenizer.encode("<search> a </sear"))
    prompt = tokenizer.decode(encode_prompt(tokenizer, "hi"))
    assert prompt.endswith("<|im_start|>assistant\n")
