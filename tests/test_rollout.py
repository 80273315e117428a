"""Records, the loop that makes them, update rules, and sampling."""

import inspect
import json
import math
import random
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close
from transformers import GPT2Config, GPT2LMHeadModel

import rollout as rollout_file
from env import SearchEnv
from rce import independent_logits
from rollout import (
    Call,
    Trajectory,
    call_ids,
    continuous,
    call_names,
    encode_prompt,
    format_trajectory,
    full_response,
    generate,
    history_ids,
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
from test_rce import RULES, TOKENIZER, Env, trajectories
from tiny import tiny

# ---- records -------------------------------------------------------------------------------------
GOOD = Call(prompt_ids=[1], action_ids=[2, 3], logprobs=[-0.5, -1.0], observation_ids=[])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"logprobs": None}, "2 action ids need as many logprobs"),
        ({"logprobs": [-0.5]}, "2 action ids need as many logprobs"),
        ({"action_ids": [], "logprobs": []}, "at least one prompt id and one action id"),
        ({"prompt_ids": []}, "at least one prompt id and one action id"),
        ({"logprobs": [-0.5, math.nan]}, "finite"),
        ({"reward": math.inf}, "finite"),
        ({"prompt_ids": [-1]}, "prompt_ids must be a list of token ids"),
        ({"action_ids": [1.0, 2]}, "action_ids must be a list of token ids"),
        ({"observation_ids": "abc"}, "observation_ids must be a list of token ids"),
    ],
)
def test_call_refuses(change, message):
    """A log-prob that is None, stale or missing never gets further: the record is right, or it is
    not made."""
    with pytest.raises(ValueError, match=message):
        replace(GOOD, **change)


def test_trajectory_refuses():
    with pytest.raises(ValueError, match="no calls"):
        Trajectory("t", 1, [])
    calls = [replace(GOOD, prompt_ids=[1, 2]), replace(GOOD, prompt_ids=[1, 3, 2])]
    with pytest.raises(ValueError, match="the prompt of call 1 does not start with q"):
        Trajectory("t", 2, calls)
    with pytest.raises(ValueError, match="the prompt of call 0 does not start with q"):
        Trajectory("t", 3, calls)


FIRST = Call([1, 2], [5], [-0.1 - 1e-17], [7], 0.0)
SECOND = Call([1, 2, 5, 7], [6, 5], [-1 / 3, -2e-45], [], 1.5)


def test_plain_ids_of_two_trajectories():
    """What pack.py and rce.py get: every call in order, with the length of its own q and its
    name."""
    pair = [Trajectory("a", 2, [FIRST, SECOND]), Trajectory("b", 1, [GOOD])]
    prompts, actions, prefix_lens = call_ids(pair)
    assert prompts == [[1, 2], [1, 2, 5, 7], [1]]
    assert actions == [[5], [6, 5], [2, 3]]
    assert prefix_lens == [2, 2, 1]
    assert call_names(pair) == ["task a, call 0", "task a, call 1", "task b, call 0"]
    assert history_ids(pair[0]) == ([1, 2], [[5], [6, 5]], [[7], []])
    assert call_ids([]) == ([], [], [])


def test_trajectories_come_back_exactly(tmp_path):
    """Ids and floats bit for bit, also where the sampled ids are not those that the tokenizer makes
    of their text."""
    original = [Trajectory("ü\n", 2, [FIRST, SECOND]), *trajectories("mem1")]
    save_trajectories(tmp_path / "t.jsonl", original)
    assert load_trajectories(tmp_path / "t.jsonl") == original
    assert [path.name for path in tmp_path.iterdir()] == ["t.jsonl"]


def record(**change):
    """A line of a file of trajectories, with one call of which something is changed."""
    call = {"prompt_ids": [1], "action_ids": [2], "logprobs": [-1.0], "observation_ids": []}
    return json.dumps({"task_id": "a", "prefix_len": 1, "calls": [{**call, **change}]})


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "null",
        "{}",
        '"x"',
        "\x00",
        '{"question": "who?"}',
        '{"task_id": "a", "prefix_len": 1, "calls": []}',
        record(logprobs=[]),
        record(logprobs=[math.nan]),
        record(text="x"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, line):
    path = tmp_path / "t.jsonl"
    save_trajectories(path, trajectories("mem1"))
    whole = path.read_text()
    path.write_text(whole + record() + "\n")
    assert len(load_trajectories(path)) == 4
    path.write_text(whole + line + "\n")
    with pytest.raises(ValueError, match="t.jsonl, line 4: not a trajectory record"):
        load_trajectories(path)


def test_an_episode_as_text():
    """q once, then every call with the lengths of z_t and a_t; the reward where nothing is observed
    any more."""
    q, say, see = (TOKENIZER.encode(text) for text in ("q", " a", " b "))
    calls = [Call(q, say, [0.0] * len(say), see)]
    calls.append(Call(q + say + see, say, [0.0] * len(say), [], 1.0))
    lines = format_trajectory(Trajectory("t", len(q), calls), TOKENIZER).splitlines()
    lengths = [f"({len(call.prompt_ids)} -> {len(say)} tokens)" for call in calls]
    first, second = lengths
    assert lines == ["q: q", f"a_0 {first}:  a", "o_0: b", f"a_1 {second}:  a", "r_1: 1"]


# ---- the loop of Eq. 1 ---------------------------------------------------------------------------
def always(ids):
    """A sample that says the same to every prompt."""

    def sample(prompts, rows):
        return [ids] * len(prompts), [[-1.0] * len(ids)] * len(prompts)

    return sample


@pytest.mark.parametrize("rule", RULES)
def test_prompts_are_recorded_as_they_were_read(rule):
    """The z_t that the sampler saw is the z_t that is recorded, for every call (not rebuilt
    afterwards), and starts with q."""
    for trajectory in trajectories(rule):
        q, turns = trajectory.calls[0].prompt_ids, []
        assert len(q) == trajectory.prefix_len
        for call in trajectory.calls:
            assert call.prompt_ids[: len(q)] == q
            if turns and rule == "mem1":
                assert call.prompt_ids == q + turns[-1]
            ends = call.action_ids[-1] == TOKENIZER.eos_token_id
            response = call.action_ids[:-1] if ends else call.action_ids
            turns.append(response + call.observation_ids)


class OneByOne:
    """Environments that take one step at a time. `asked` counts the questions to all of them."""

    def __init__(self, name, turns, asked):
        self.task, self.turns, self.asked = SimpleNamespace(id=name), turns, asked

    def prompt(self):
        return f"question {self.task.id}"

    def step(self, response):
        self.asked.append([self.task.id])
        return self.advance(response)

    def advance(self, response):
        self.turns -= 1
        return f" obs {len(response)} of {self.task.id}", float(self.turns), self.turns == 0


class Together(OneByOne):
    """The same, for many at once."""

    @staticmethod
    def step_all(envs, responses):
        envs[0].asked.append([env.task.id for env in envs])
        return [env.advance(response) for env, response in zip(envs, responses, strict=True)]


def test_environments_are_asked_at_once_where_their_class_can():
    """Else one by one; with the same trajectories. Only those that are not over are asked."""
    found, asked = {}, {OneByOne: [], Together: []}
    for kind in asked:
        envs = [kind(name, turns, asked[kind]) for name, turns in (("a", 2), ("b", 1), ("c", 3))]
        rng = random.Random(0)

        def sample(prompts, rows):
            ids = [[rng.randrange(20, 90), 7] for _ in prompts]
            return ids, [[-1.0, -2.0]] * len(prompts)

        found[kind] = rollout(sample, TOKENIZER, envs, mem1)
    assert found[OneByOne] == found[Together]
    assert [len(trajectory.calls) for trajectory in found[Together]] == [2, 1, 3]
    assert [call.reward for call in found[Together][2].calls] == [2.0, 1.0, 0.0]
    assert asked[Together] == [["a", "b", "c"], ["a", "c"], ["c"]]
    assert asked[OneByOne] == [["a"], ["b"], ["c"], ["a"], ["c"], ["c"]]


def test_stop_token_is_trained_and_not_remembered():
    """The sampled end token is part of a_t (it is a decision), and never of the next context."""
    eos = TOKENIZER.eos_token_id
    (trajectory,) = rollout(always([5, 6, eos]), TOKENIZER, [Env("a", 2)], mem1)
    first, second = trajectory.calls
    assert first.action_ids == second.action_ids == [5, 6, eos]
    assert second.prompt_ids[trajectory.prefix_len :] == [5, 6] + first.observation_ids


def test_sampled_ids_are_kept_as_sampled():
    """h, e, l, l, o sampled one by one decodes to a text whose own encoding is one token: the
    record and the next context keep the five."""
    tokenizer = train_tokenizer(["hello hello hello"], 300)
    pieces = tokenizer.convert_tokens_to_ids(list("hello"))
    assert tokenizer.encode(tokenizer.decode(pieces)) != pieces
    (trajectory,) = rollout(always(pieces), tokenizer, [Env("a", 2)], mem1)
    first, second = trajectory.calls
    assert first.action_ids == pieces
    assert second.prompt_ids[trajectory.prefix_len :][:5] == pieces


def test_rollout_refuses():
    """No task; an engine that loses a request; a prompt that does not fit, which is never cut."""
    with pytest.raises(ValueError, match="task list is empty"):
        rollout(None, TOKENIZER, [], mem1)
    envs = [Env("a", 1), Env("b", 1)]
    with pytest.raises(ValueError, match="1 responses and 1 logprobs for 2 prompts"):
        rollout(lambda prompts, rows: ([[5]], [[0.0]]), TOKENIZER, envs, mem1)
    with pytest.raises(ValueError, match="task a, call 0: the prompt has .* only 3 fit"):
        rollout(None, TOKENIZER, [Env("a", 1)], mem1, max_prompt_len=3)


def test_prompt_ends_with_the_generation_prompt_where_there_is_a_template():
    tokenizer = train_tokenizer(["user assistant"], 300)
    assert tokenizer.decode(encode_prompt(tokenizer, "hi")) == "hi"
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    assert tokenizer.decode(encode_prompt(tokenizer, "hi")) == "[user]hi[assistant]"


# ---- update rules --------------------------------------------------------------------------------
def test_update_rules_on_ids_one_can_see():
    """Two turns, responses 1x, observations 9x. Would catch a memory that keeps earlier turns, or
    forgets them where it should not."""
    turns = [([10, 11], [90]), ([12, 13, 14], [91, 92])]
    assert mem1(turns) == [12, 13, 14, 91, 92]
    assert full_response(turns) == [10, 11, 90, 12, 13, 14, 91, 92]
    assert suffix_retention(2)(turns) == [13, 14, 91, 92]
    assert suffix_retention(9)(turns) == [12, 13, 14, 91, 92]
    assert suffix_retention(0)(turns) == [91, 92]  # not [-0:], which is everything
    assert sliding_window(1)(turns) == mem1(turns)
    assert sliding_window(2)(turns) == full_response(turns)
    assert sliding_window(0)(turns) == []
    assert retrieval_refresh(turns) == [91, 92, 12, 13, 14]


@pytest.mark.parametrize(
    "response, memory",
    [
        ("x <think> a b </think> <search> c", "<think> a b </think>"),
        ("<think> a b", "<think> a b</think>"),
        (" no tags", "<think> no tags</think>"),
    ],
)
def test_summary_is_the_text_between_the_tags(response, memory):
    context = summary_replacement(TOKENIZER)([(TOKENIZER.encode(response), [90])])
    assert TOKENIZER.decode(context[:-1]) == memory and context[-1] == 90


def test_demo_shows_that_six_rules_keep_six_different_texts():
    command = [sys.executable, rollout_file.__file__]
    out = subprocess.run(command, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    kept = dict(re.findall(r"^(\w+) \(\d+ tokens\):\n   (.*)$", out.stdout, re.MULTILINE))
    assert list(kept) == RULES and len(set(kept.values())) == 6
    assert all("number 3" in text for text in kept.values())  # the newest observation
    assert "note a" in kept["full_response"] and "number 1" in kept["full_response"]
    assert "note b" in kept["sliding_window"] and "note a" not in kept["sliding_window"]
    assert kept["mem1"].strip().startswith("<think> note c") and "note b" not in kept["mem1"]


# ---- sampling ------------------------------------------------------------------------------------
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [1, 2]]


def divisible_by(n):
    return lambda ids: ids[-1] % n == 0


def assert_logprobs(model, prompts, ids, logprobs, temperature=1.0):
    """What was recorded is log softmax(logits / T) of unpadded single calls."""
    for prompt, action, recorded in zip(prompts, ids, logprobs, strict=True):
        logp = (independent_logits(model, prompt, action) / temperature).log_softmax(-1)
        expected = logp.gather(1, torch.tensor(action)[:, None])[:, 0]
        assert_close(torch.tensor(recorded), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_single_calls(kind, temperature):
    """For every sampled token: left padding, the cache and the rows that leave the batch change
    nothing. Would catch log-probs at another temperature (ratios of 2)."""
    model, noise = tiny(kind), task_generators(0, 0, "abcd")
    ids, logprobs = generate(model, PROMPTS, 9, temperature, divisible_by(4), noise)
    assert len({len(action) for action in ids}) > 1
    for action in ids:
        assert action[-1] % 4 == 0 or len(action) == 9
        assert all(i % 4 for i in action[:-1])
    assert_logprobs(model, PROMPTS, ids, logprobs, temperature)


def test_left_padding_and_absolute_positions():
    """With rotary positions a constant shift of a padded row would go unseen; learned ones show
    it."""
    torch.manual_seed(0)
    shape = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    no_dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    config = GPT2Config(**shape, **no_dropout, initializer_range=0.3)
    model, noise = GPT2LMHeadModel(config).eval(), task_generators(0, 0, "abcd")
    ids, logprobs = generate(model, PROMPTS, 6, generators=noise)
    assert_logprobs(model, PROMPTS, ids, logprobs)


def test_greedy_is_the_models_own_generate():
    model = tiny(pad_token_id=0)
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    ids, _ = generate(model, PROMPTS, 8, temperature=0)
    for prompt, action in zip(PROMPTS, ids):
        mask = torch.ones(1, len(prompt))
        theirs = model.generate(torch.tensor([prompt]), attention_mask=mask, **settings)
        assert action == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("sliding", [False, True])
def test_a_common_prefix_is_read_once(sliding, temperature):
    """Four tokens begin every prompt; one prompt ends with the next token, and two are equal. Ids
    and log-probs are those of single prompts, and the prefix went through the model once. With a
    sliding window the padding behind the prefix would count as context, so nothing is shared."""
    window = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0}
    model = tiny(attention="sdpa", **(window if sliding else {}))
    prompts = [[1, 2, 3, 4, *rest] for rest in ([5], [6, 7, 8, 9], [6, 7, 8, 9], [5, 1, 2])]
    alone, alone_logprobs = [], []
    for name, prompt in zip("0123", prompts):
        noise = task_generators(0, 0, name)
        (ids,), (logprobs,) = generate(model, [prompt], 6, temperature, generators=noise)
        alone.append(ids)
        alone_logprobs.append(logprobs)
    read = []

    def note_shape(module, args, kwargs):
        read.append(tuple(kwargs["input_ids"].shape))

    model.register_forward_pre_hook(note_shape, with_kwargs=True)
    noise = task_generators(0, 0, "0123")
    ids, logprobs = generate(model, prompts, 6, temperature, generators=noise)
    assert ids == alone
    expected = torch.tensor(alone_logprobs)
    assert_close(torch.tensor(logprobs), expected, rtol=0, atol=1e-4)
    assert read[:2] == ([(4, 8), (4, 1)] if sliding else [(1, 4), (4, 4)])


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("prefill", [1, 8, 11])
def test_prompts_are_read_in_slices(prefill, temperature, monkeypatch):
    """No forward reads more than PREFILL tokens, or one a row; ids and log-probs are those of
    single forwards, of rows that are only padding in the first slices, too."""
    model = tiny(attention="sdpa")
    prompts = [list(range(1, 20)), [5, 6], list(range(30, 42))]
    read = []

    def note_shape(module, args, kwargs):
        read.append(kwargs["input_ids"].numel())

    whole, _ = generate(model, prompts, 6, temperature, None, task_generators(0, 0, "abc"))
    monkeypatch.setattr(rollout_file, "PREFILL", prefill)
    hook = model.register_forward_pre_hook(note_shape, with_kwargs=True)
    noise = task_generators(0, 0, "abc")
    ids, logprobs = generate(model, prompts, 6, temperature, generators=noise)
    hook.remove()
    assert ids == whole and max(read) <= max(prefill, len(prompts))
    assert_logprobs(model, prompts, ids, logprobs, temperature or 1)


@pytest.mark.parametrize("prompts", [[[1, 2, 3]] * 2, [[1, 2, 3], [1, 2, 3, 4, 5]], [[7], [7]]])
def test_a_prompt_that_is_the_common_prefix_still_has_a_token_to_read(prompts):
    model = tiny()
    alone = [generate(model, [prompt], 4, temperature=0)[0][0] for prompt in prompts]
    assert generate(model, prompts, 4, temperature=0)[0] == alone


def test_samples_follow_the_softmax():
    """4,000 first tokens against exact probabilities: chi-square over the tokens that are expected
    at least 5 times is within 5 standard deviations of its mean. Would catch top-p, top-k, and an
    off-by-one in the inverse of the cumulative sum."""
    model, n = tiny(initializer_range=0.15), 4000
    noise = task_generators(0, 0, map(str, range(n)))
    ids, _ = generate(model, [[1, 2, 3]] * n, 1, 1.0, generators=noise)
    expected = n * independent_logits(model, [1, 2, 3], [0]).softmax(-1)[0]
    assert off_the_softmax(ids, expected) < 5


def off_the_softmax(ids, expected):
    """Chi-square of first tokens over those expected at least 5 times, in its standard
    deviations."""
    counts = torch.bincount(torch.tensor(ids)[:, 0], minlength=len(expected))
    often = expected >= 5
    chi2 = ((counts - expected) ** 2 / expected)[often].sum().item()
    df = often.sum().item()
    assert df > 15
    return abs(chi2 - df) / math.sqrt(2 * df)


# ---- the engine of transformers ------------------------------------------------------------------
def test_continuous_batching_is_generate():
    """Greedily the ids of `generate`, whoever shares the batch, in every round of a block; a round
    does not lose what the one before has cancelled; the log-probs are those of plain forwards."""
    model = tiny(attention="packed")
    prompts = [*PROMPTS, list(range(1, 40))]
    stop = divisible_by(3)
    right, _ = generate(model, prompts, 9, 0, stop)
    rounds, found = (range(len(prompts)), [2, 0], range(len(prompts))), []
    with continuous(model, 9, 0, stop, tokens=4096) as sample:
        for rows in rounds:
            found.append(sample([prompts[i] for i in rows], rows))
    for rows, (ids, logprobs) in zip(rounds, found):
        assert ids == [right[i] for i in rows]
        assert_logprobs(model, [prompts[i] for i in rows], ids, logprobs)
    assert model.config._attn_implementation == "packed" and len({len(new) for new in right}) > 1


def test_continuous_batching_follows_the_softmax():
    """At a temperature that is not 1, with log-probs at that temperature."""
    model, n, T = tiny(initializer_range=0.15), 4000, 0.7
    with continuous(model, 1, T, seed=1, tokens=4 * 4096) as sample:
        ids, logprobs = sample([[1, 2, 3]] * n, range(n))
    expected = n * (independent_logits(model, [1, 2, 3], [0]) / T).softmax(-1)[0]
    assert off_the_softmax(ids, expected) < 5
    assert_logprobs(model, [[1, 2, 3]] * 9, ids[:9], logprobs[:9], T)


def test_a_new_block_reads_new_weights():
    """Nothing of a cache outlives the weights that filled it."""
    model = tiny()
    for seed in (0, 1):
        model.load_state_dict(tiny(seed=seed).state_dict())
        with continuous(model, 5, 0, tokens=2048) as sample:
            ids, _ = sample(PROMPTS, range(len(PROMPTS)))
        assert ids == generate(model, PROMPTS, 5, 0)[0]


def test_a_cache_that_is_too_small_for_all_at_once():
    """Rows wait, or begin again with what they have said: the same ids and log-probs."""
    model, prompts = tiny(), [[i] * 100 for i in range(1, 7)]
    with continuous(model, 200, 0, tokens=600) as sample:
        ids, logprobs = sample(prompts, range(6))
    assert ids == generate(model, prompts, 200, 0)[0]
    assert_logprobs(model, prompts, ids, logprobs)


def test_an_engine_that_fails_says_so():
    """What happens in its thread is an error here, with its reason, and the model stays usable."""
    model = tiny(attention="packed")

    def fail(*args):
        raise ValueError("no memory left")

    hook = model.model.layers[0].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="continuous batching failed: no memory left"):
        with continuous(model, 4, 1, tokens=1024) as sample:
            sample(PROMPTS, range(len(PROMPTS)))
    hook.remove()
    assert len(generate(model, PROMPTS, 4)[0]) == len(PROMPTS)


def test_noise_belongs_to_the_task():
    """What a task samples depends on (seed, step, task), not on who shares its batch, in which
    order, or who has left it."""
    model = tiny()

    def run(rows, seed=1, step=2):
        noise = task_generators(seed, step, map(str, rows))
        prompts = [PROMPTS[i] for i in rows]
        ids, _ = generate(model, prompts, 9, stop=divisible_by(3), generators=noise)
        return ids

    ids = run([0, 1, 2, 3])
    assert len({len(action) for action in ids}) > 1
    assert run([2, 0]) == [ids[2], ids[0]]
    for i in range(4):
        assert run([i]) == [ids[i]]
    assert run([0, 1, 2, 3], step=3) != ids
    assert run([0, 1, 2, 3], seed=2) != ids


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
    """transformers renames `past_key_values` to `cache`; a forward that only knows one of them gets
    that one."""
    model = tiny()
    expected = generate(model, PROMPTS, 5, temperature=0)
    forward = type(model).forward
    ours = "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"

    def with_cache(cache=None, **kwargs):
        return forward(model, **kwargs, **{ours: cache})

    def with_past_key_values(past_key_values=None, **kwargs):
        return forward(model, **kwargs, **{ours: past_key_values})

    model.forward = with_cache if name == "cache" else with_past_key_values
    assert generate(model, PROMPTS, 5, temperature=0) == expected


# ---- the tokenizer -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "text, over",
    [
        ("a </search>", True),
        ("a </search>\n", True),
        ("b </search>.z", True),
        ("c </answer>", True),
        ("</searc", False),
        ("<search>", False),
        ("</ search>", False),
    ],
)
def test_stop_is_about_text(text, over):
    """A stop string counts in whatever tokens it comes, also with more text in its last token; what
    only looks like it does not."""
    merged = train_tokenizer(["x</search>\ny </search>.z"] * 3, 400)
    stop = stop_on(merged, SearchEnv.stop)
    assert stop(merged.encode(text)) is over
    assert stop([5, merged.eos_token_id]) and not stop([5])


def test_tokenizer_loses_nothing():
    """Characters that its training text lacked come back all the same."""
    rng, letters = random.Random(0), []
    for _ in range(2000):
        last = rng.choice([128, 0xD800])
        letters.append(chr(rng.randrange(1, last)))
    odd = "3456789 ÄÖ 😀 \0\t\n  two  spaces "
    for text in (odd, "<think> a </think>", "", "".join(letters)):
        assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
