"""Records, update rules, sampling, and the loop that joins them."""

import inspect
import json
import math
import random
from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from env import STOP
from rce import independent_logits
from rollout import (
    Call,
    Trajectory,
    encode_prompt,
    full_response,
    generate,
    load_trajectories,
    mem1,
    retrieval_refresh,
    rollout,
    save_trajectories,
    sliding_window,
    stop_on,
    suffix_retention,
    summary_replacement,
    task_generators,
    train_tokenizer,
)
from test_rce import RULES, TOKENIZER, Env, step_all, trajectories
from tiny import tiny

GOOD = dict(prompt_ids=[1], action_ids=[2, 3], logprobs=[-0.5, -1.0], observation_ids=[])


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(logprobs=None), "2 action ids need as many logprobs"),
        (dict(logprobs=[-0.5]), "2 action ids need as many logprobs"),
        (dict(action_ids=[], logprobs=[]), "empty action"),
        (dict(prompt_ids=[]), "at least one prompt id"),
        (dict(logprobs=[-0.5, math.nan]), "finite"),
        (dict(reward=math.inf), "finite"),
        (dict(prompt_ids=[-1]), "prompt_ids must be a list of token ids"),
        (dict(action_ids=[1.0, 2]), "action_ids must be"),
        (dict(observation_ids="abc"), "observation_ids must be"),
    ],
)
def test_call_refuses(change, message):
    """No None, no stale or missing log-prob flows on: the record is right or it is not made."""
    Call(**GOOD)
    with pytest.raises(ValueError, match=message):
        Call(**{**GOOD, **change})


def test_trajectory_refuses():
    with pytest.raises(ValueError, match="no calls"):
        Trajectory("t", 1, [])
    with pytest.raises(ValueError, match="prompt of call 1 does not start with q"):
        Trajectory(
            "t", 2, [replace(Call(**GOOD), prompt_ids=[1, 2]), replace(Call(**GOOD), prompt_ids=[1, 3, 2])]
        )


def test_trajectories_come_back_exactly(tmp_path):
    """Ids and floats bit for bit, also where the sampled ids are not the tokenizer's own for that text."""
    calls = [
        Call([1, 2], [5], [-0.1 - 1e-17], [7], 0.0),
        Call([1, 2, 5, 7], [6, 5], [-1 / 3, -2e-45], [], 1.5),
    ]
    original = [Trajectory("ü\n", 2, calls), *trajectories("mem1")]
    save_trajectories(tmp_path / "t.jsonl", original)
    assert load_trajectories(tmp_path / "t.jsonl") == original and [p.name for p in tmp_path.iterdir()] == [
        "t.jsonl"
    ]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "null",
        "{}",
        '{"task_id": "a", "prefix_len": 1, "calls": []}',
        '"x"',
        "\x00",
        json.dumps({"question": "who?"}),
        '{"task_id": "a", "prefix_len": 1, "calls": [{"prompt_ids": [1], "action_ids": [2], "logprobs": [], '
        '"observation_ids": []}]}',
        '{"task_id": "a", "prefix_len": 1, "calls": [{"prompt_ids": [1], "action_ids": [2], "logprobs": [NaN], '
        '"observation_ids": []}]}',
    ],
)
def test_a_damaged_line_is_named(tmp_path, line):
    path = tmp_path / "t.jsonl"
    save_trajectories(path, trajectories("mem1"))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match="t.jsonl, line 4: not a trajectory record"):
        load_trajectories(path)


def test_update_rules_on_ids_one_can_see():
    """Two turns, responses 1x, observations 9x. Would catch a memory that keeps earlier turns, or forgets
    them where it should not."""
    turns = [([10, 11], [90]), ([12, 13, 14], [91, 92])]
    assert mem1(turns) == [12, 13, 14, 91, 92]
    assert full_response(turns) == [10, 11, 90, 12, 13, 14, 91, 92]
    assert suffix_retention(2)(turns) == [13, 14, 91, 92] and suffix_retention(9)(turns) == [
        12,
        13,
        14,
        91,
        92,
    ]
    assert sliding_window(1)(turns) == mem1(turns) and sliding_window(2)(turns) == full_response(turns)
    assert (
        suffix_retention(0)(turns) == [91, 92] and sliding_window(0)(turns) == []
    )  # not [-0:], which is everything
    assert retrieval_refresh(turns) == [91, 92, 12, 13, 14]
    summarise = summary_replacement(TOKENIZER)
    response = TOKENIZER.encode("x <think> a b </think> <search> c")
    assert TOKENIZER.decode(summarise([(response, [90])])[:-1]) == "<think> a b </think>"
    assert (
        TOKENIZER.decode(summarise([(TOKENIZER.encode(" no tags"), [90])])[:-1]) == "<think> no tags</think>"
    )


@pytest.mark.parametrize("rule", RULES)
def test_prompts_are_recorded_as_they_were_read(rule):
    """z_t seen by the sampler is the z_t recorded, for every call (not rebuilt afterwards), and starts with
    q."""
    for trajectory in trajectories(rule):
        q, turns = trajectory.calls[0].prompt_ids, []
        assert len(q) == trajectory.prefix_len
        for call in trajectory.calls:
            assert call.prompt_ids[: len(q)] == q
            if turns and rule == "mem1":
                assert call.prompt_ids == q + turns[-1]
            eos = call.action_ids[-1] == TOKENIZER.eos_token_id
            turns.append(call.action_ids[: len(call.action_ids) - eos] + call.observation_ids)


def test_stop_token_is_trained_and_not_remembered():
    """The sampled end token is part of a_t (it is a decision) and never of the next context."""
    eos = TOKENIZER.eos_token_id
    (trajectory,) = rollout(
        lambda prompts, rows: ([[5, 6, eos]], [[-1.0] * 3]), TOKENIZER, [Env("a", 2)], step_all, mem1
    )
    assert [c.action_ids for c in trajectory.calls] == [[5, 6, eos]] * 2
    assert (
        trajectory.calls[1].prompt_ids[trajectory.prefix_len :]
        == [5, 6] + trajectory.calls[0].observation_ids
    )


def test_sampled_ids_are_kept_as_sampled():
    """h, e, l, l, o sampled one by one decodes to a text whose own encoding is one token: record and next
    context keep the five."""
    tokenizer = train_tokenizer(["hello hello hello"], 300)
    pieces = tokenizer.convert_tokens_to_ids(list("hello"))
    assert tokenizer.encode(tokenizer.decode(pieces)) != pieces
    (trajectory,) = rollout(
        lambda prompts, rows: ([pieces], [[-1.0] * len(pieces)]), tokenizer, [Env("a", 2)], step_all, mem1
    )
    assert (
        trajectory.calls[0].action_ids == pieces
        and trajectory.calls[1].prompt_ids[trajectory.prefix_len :][: len(pieces)] == pieces
    )


def test_rollout_refuses():
    with pytest.raises(ValueError, match="task list is empty"):
        rollout(None, TOKENIZER, [], step_all, mem1)
    with pytest.raises(
        ValueError, match="1 responses and 1 logprobs for 2 prompts"
    ):  # an engine that loses a request
        rollout(lambda prompts, rows: ([[5]], [[0.0]]), TOKENIZER, [Env("a", 1), Env("b", 1)], step_all, mem1)
    with pytest.raises(ValueError, match="task a, call 0: the prompt has .* tokens and only 3 fit"):
        rollout(None, TOKENIZER, [Env("a", 1)], step_all, mem1, max_prompt_len=3)


PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [1, 2]]


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_single_calls(kind, temperature):
    """What is recorded is log softmax(logits / T) of an unpadded call, for every sampled token: left padding,
    cache and the rows that leave the batch change nothing. Would catch log-probs at another temperature
    (ratios of 2)."""
    model = tiny(kind)
    ids, logprobs = generate(
        model,
        PROMPTS,
        9,
        temperature,
        stop=lambda a: a[-1] % 4 == 0,
        generators=task_generators(0, 0, "abcd"),
    )
    assert len({len(a) for a in ids}) > 1 and all(a[-1] % 4 == 0 or len(a) == 9 for a in ids)
    assert not any(i % 4 == 0 for a in ids for i in a[:-1])
    for prompt, action, recorded in zip(PROMPTS, ids, logprobs):
        expected = (
            (independent_logits(model, prompt, action) / temperature)
            .log_softmax(-1)
            .gather(1, torch.tensor(action)[:, None])[:, 0]
        )
        torch.testing.assert_close(torch.tensor(recorded), expected, rtol=0, atol=1e-4)


def test_greedy_is_the_models_own_generate():
    model = tiny(pad_token_id=0)
    ids, _ = generate(model, PROMPTS, 8, temperature=0)
    for prompt, action in zip(PROMPTS, ids):
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=None,
        )
        assert action == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("sliding", [False, True])
def test_a_common_prefix_is_read_once(sliding, temperature):
    """Four tokens begin every prompt; one prompt ends with the next token, two are equal. Ids and log-probs are those
    of single prompts, and the prefix went through the model once. With a sliding window the padding behind the prefix
    would count as context, so that nothing is shared."""
    window = dict(use_sliding_window=True, sliding_window=3, max_window_layers=0)
    model = tiny(attention="sdpa", **(window if sliding else {}))
    prompts = [[1, 2, 3, 4, *rest] for rest in ([5], [6, 7, 8, 9], [6, 7, 8, 9], [5, 1, 2])]
    alone = [
        generate(model, [p], 6, temperature, generators=task_generators(0, 0, [str(i)]))
        for i, p in enumerate(prompts)
    ]
    read = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: read.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    ids, logprobs = generate(model, prompts, 6, temperature, generators=task_generators(0, 0, list("0123")))
    assert ids == [a[0][0] for a in alone]
    torch.testing.assert_close(
        torch.tensor(logprobs), torch.tensor([a[1][0] for a in alone]), rtol=0, atol=1e-4
    )
    assert read[:2] == ([(4, 8), (4, 1)] if sliding else [(1, 4), (4, 4)])


@pytest.mark.parametrize("prompts", [[[1, 2, 3]] * 2, [[1, 2, 3], [1, 2, 3, 4, 5]], [[7], [7]]])
def test_a_prompt_that_is_the_common_prefix_still_has_a_token_to_read(prompts):
    model = tiny()
    alone = [generate(model, [p], 4, temperature=0)[0][0] for p in prompts]
    assert generate(model, prompts, 4, temperature=0)[0] == alone


def test_samples_follow_the_softmax():
    """4,000 first tokens against exact probabilities: chi-square over the tokens that are expected at least 5
    times stays below its mean by less than 5 standard deviations. Would catch top-p, top-k, and an off-by-one
    in the inverse of the cumulative sum."""
    model, n = tiny(initializer_range=0.15), 4000
    ids, _ = generate(
        model, [[1, 2, 3]] * n, 1, 1.0, generators=task_generators(0, 0, [str(i) for i in range(n)])
    )
    expected = independent_logits(model, [1, 2, 3], [0]).softmax(-1)[0] * n
    counts = torch.bincount(torch.tensor(ids)[:, 0], minlength=len(expected))
    often = expected >= 5
    chi2, df = ((counts - expected) ** 2 / expected)[often].sum().item(), often.sum().item()
    assert df > 15 and abs(chi2 - df) < 5 * math.sqrt(2 * df)


def test_noise_belongs_to_the_task():
    """What a task samples depends on (seed, step, task), not on who shares its batch, in which order, or who
    has left it."""
    model, names = tiny(), ["a", "b", "c", "d"]

    def run(rows, seed=1, step=2):
        generators = task_generators(seed, step, [names[i] for i in rows])
        return generate(
            model, [PROMPTS[i] for i in rows], 9, stop=lambda a: a[-1] % 3 == 0, generators=generators
        )[0]

    ids = run([0, 1, 2, 3])
    assert len({len(a) for a in ids}) > 1
    assert run([2, 0]) == [ids[2], ids[0]] and [run([i])[0] for i in range(4)] == ids
    assert run([0, 1, 2, 3], step=3) != ids != run([0, 1, 2, 3], seed=2)


def test_left_padding_and_absolute_positions():
    """With rotary positions a constant shift of a padded row would go unseen; learned ones show it."""
    torch.manual_seed(0)
    shape = dict(vocab_size=61, n_embd=32, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3)
    model = GPT2LMHeadModel(GPT2Config(**shape, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)).eval()
    ids, logprobs = generate(model, PROMPTS, 6, generators=task_generators(0, 0, "abcd"))
    for prompt, action, recorded in zip(PROMPTS, ids, logprobs):
        logp = independent_logits(model, prompt, action).log_softmax(-1)
        expected = logp.gather(1, torch.tensor(action)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(recorded), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("training", [True, False])
def test_generate_restores_the_mode(training):
    """Also when the stop rule raises."""
    model = tiny().train(training)
    generate(model, PROMPTS, 2)
    assert model.training is training
    with pytest.raises(ZeroDivisionError):
        generate(model, PROMPTS, 2, stop=lambda ids: 1 / 0)
    assert model.training is training


@pytest.mark.parametrize("prompts, new", [([], 4), ([[1], []], 4), ([[1]], 0)])
def test_generate_refuses(prompts, new):
    with pytest.raises(ValueError, match="at least one prompt"):
        generate(tiny(), prompts, new)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_generate_under_any_cache_name(name):
    """transformers renames `past_key_values` to `cache`; a forward that only knows one of them gets that
    one."""
    model = tiny()
    expected = generate(model, PROMPTS, 5, temperature=0)
    forward = type(model).forward
    theirs = "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"

    def both(kept, **kwargs):
        return forward(model, **kwargs, **{theirs: kept})

    model.forward = {
        "cache": lambda cache=None, **kwargs: both(cache, **kwargs),
        "past_key_values": lambda past_key_values=None, **kwargs: both(past_key_values, **kwargs),
    }[name]
    assert generate(model, PROMPTS, 5, temperature=0) == expected


def test_stop_is_about_text():
    """A stop string counts in whatever tokens it comes, also with more text in its last token; its like does
    not."""
    merged = train_tokenizer(["x</search>\ny </search>.z"] * 3, 400)
    stop = stop_on(merged, STOP)
    for text, over in (
        ("a </search>", True),
        ("a </search>\n", True),
        ("b </search>.z", True),
        ("c </answer>", True),
        ("</searc", False),
        ("<search>", False),
        ("</ search>", False),
    ):
        ids = merged.encode(text)
        assert stop(ids) is over, text
    assert stop([5, merged.eos_token_id]) and not stop([5])


def test_tokenizer_loses_nothing():
    """Characters that its training text lacked come back all the same."""
    for text in ("3456789 ÄÖ 😀 \0\t\n  two  spaces ", "<think> a </think>", ""):
        assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
    rng = random.Random(0)
    text = "".join(chr(rng.choice([rng.randrange(1, 0xD800), rng.randrange(1, 128)])) for _ in range(2000))
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_prompt_ends_with_the_generation_prompt_where_there_is_a_template():
    tokenizer = train_tokenizer(["user assistant"], 300)
    assert tokenizer.decode(encode_prompt(tokenizer, "hi")) == "hi"
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    assert tokenizer.decode(encode_prompt(tokenizer, "hi")) == "[user]hi[assistant]"
