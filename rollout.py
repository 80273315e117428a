"""Rollout with compact memory (Section 3.2): sample, act, rewrite the context, record every call.

    Eq. 1   a_t ~ pi_old(. | q, x_t),   (o_t, r_t, d_t) = E(a_t),   x_{t+1} = U(x_t, a_t, o_t)
    Eq. 2   U of MEM1:  [q] -> a_0,   [q, m_0, o_0] -> a_1,   [q, m_1, o_1] -> a_2,  ...

A `Call` keeps the token ids of z_t = [q, x_t] that the model read and the ids a_t that it sampled.
Nothing is decoded and tokenised again, since the same text may have other ids. U is any function
`update(turns) -> x_next` on ids. Needs torch, transformers and tqdm; environments are arguments.

    python rollout.py        # what six update rules keep of the same three turns, as text
"""

import hashlib
import inspect
import json
import math
import os
import shutil
import signal
import sys
import threading
import weakref
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import count
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig
from transformers import DynamicCache, GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

PREFILL = 16_384  # tokens of prompts in a forward, of all rows together: bounds what a layer needs


@dataclass(frozen=True)
class Call:
    """One model call, as it happened. Raises ValueError for what cannot be a record of one."""

    prompt_ids: list[int]  # z_t = [q, x_t]
    action_ids: list[int]  # a_t, the stop token included
    logprobs: list[float]  # log pi_old of each action id, at the sampling temperature
    observation_ids: list[int]  # o_t
    reward: float = 0.0  # r_t; Eq. 8 puts it on the last action token of the call

    def __post_init__(self):
        for name in ("prompt_ids", "action_ids", "observation_ids"):
            ids = getattr(self, name)
            if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
                raise ValueError(f"{name} must be a list of token ids, not {str(ids)[:80]}")
        if not self.prompt_ids or not self.action_ids:
            raise ValueError("a call needs at least one prompt id and one action id")
        n = len(self.action_ids)
        if not isinstance(self.logprobs, list) or len(self.logprobs) != n:
            raise ValueError(f"{n} action ids need as many logprobs, recorded when sampled")
        for x in [*self.logprobs, self.reward]:
            if not isinstance(x, (int, float)) or not math.isfinite(x):
                raise ValueError(f"logprobs and reward must be finite numbers, not {x!r}")


@dataclass(frozen=True)
class Trajectory:
    """The calls of one episode. Every prompt starts with the same `prefix_len` ids: q."""

    task_id: str
    prefix_len: int
    calls: list[Call]

    def __post_init__(self):
        where = f"trajectory of task {self.task_id}"
        if not self.calls:
            raise ValueError(f"{where}: no calls")
        q = self.calls[0].prompt_ids[: self.prefix_len]
        for t, call in enumerate(self.calls):
            if len(q) != self.prefix_len or call.prompt_ids[: self.prefix_len] != q:
                raise ValueError(f"{where}: the prompt of call {t} does not start with q")


def call_ids(trajectories):
    """Plain ids for pack.py: the prompt, the action and the length of q of every call, in order."""
    calls = [call for trajectory in trajectories for call in trajectory.calls]
    prefix_lens = [trajectory.prefix_len for trajectory in trajectories for _ in trajectory.calls]
    return [call.prompt_ids for call in calls], [call.action_ids for call in calls], prefix_lens


def call_names(trajectories):
    """What to call each of these calls in a message."""
    return [f"task {x.task_id}, call {t}" for x in trajectories for t in range(len(x.calls))]


def history_ids(trajectory):
    """Plain ids for `pack.pack_history`: q, and each call's action and observation."""
    prefix = trajectory.calls[0].prompt_ids[: trajectory.prefix_len]
    actions = [call.action_ids for call in trajectory.calls]
    observations = [call.observation_ids for call in trajectory.calls]
    return prefix, actions, observations


# ---- the loop of Eq. 1 ---------------------------------------------------------------------------
Turns = list[tuple[list[int], list[int]]]  # (response ids without stop token, observation ids)


class Environment(Protocol):
    """E of Eq. 1, one episode of one task, which ends by itself: any object with these. Its class
    may also have `stop`, a tuple of strings that end a response, and a static `step_all(envs,
    responses)`, `step` for many."""

    task: Any  # task.id is its name in files and messages

    def prompt(self) -> str:
        """The text of q, the same in every call."""

    def step(self, response: str) -> tuple[str, float, bool]:
        """Observation, reward of this call, and whether the episode is over."""

    def score(self) -> dict[str, float]:
        """Numbers whose means are reported, the chief one first; `solved` is 1 if all is right. It
        may be asked at any time."""


def check_environment(env, *more):
    """Raise ValueError naming what an environment lacks for `rollout`, or of `more` methods."""
    missing = "" if hasattr(getattr(env, "task", None), "id") else "task.id"
    for name in ("prompt", "step_all" if hasattr(env, "step_all") else "step", *more):
        missing = missing if callable(getattr(env, name, None)) else f"{name}()"
    if missing:
        raise ValueError(f"{type(env).__name__} has no {missing}: see Environment in rollout.py")
    if isinstance(getattr(env, "stop", ()), str):
        raise ValueError(f"{type(env).__name__}.stop must be a tuple of strings, not one string")


def rollout(
    sample, tokenizer, envs, update, max_prompt_len=None, progress=None, ends=None, reject=None
):
    """Eq. 1: run all environments to their ends, one call each per round, and record every call.

    sample(prompts, rows) -> ids, logprobs: `generate` bound to a model, or any engine; rows says
    which environments the prompts are from. envs: see `Environment`. update: U. ends: see
    `end_ids`; by default the tokenizer's. An example whose prompt passes max_prompt_len is
    rejected, never cut (Section 3.3): reject(why) is called and None stands in its place; without
    `reject` it is a ValueError."""
    if not envs:
        raise ValueError("rollout needs at least one environment: the task list is empty")
    for env in envs:
        check_environment(env)
    if len(set(map(type, envs))) > 1:
        raise ValueError("rollout takes environments of one class at a time")
    ends = ends or end_ids(tokenizer)
    prefixes = [encode_prompt(tokenizer, env.prompt()) for env in envs]
    contexts = [[] for _ in envs]  # x_t
    turns, calls = [[] for _ in envs], [[] for _ in envs]
    live = list(range(len(envs)))
    bar = tqdm(total=len(envs), desc=progress, leave=False, disable=progress is None)
    while live:
        for i in live:
            n = len(prefixes[i]) + len(contexts[i])
            if max_prompt_len is not None and n > max_prompt_len:
                size = f"the prompt has {n} tokens and only {max_prompt_len} fit"
                where = f"task {envs[i].task.id}, call {len(calls[i])}"
                problem = f"{where}: {size}; raise max_len, or keep or retrieve less"
                if reject is None:
                    raise ValueError(problem)
                reject(problem)
                calls[i] = None
        live = [i for i in live if calls[i] is not None]
        if not live:
            break
        prompts = [prefixes[i] + contexts[i] for i in live]  # z_t
        ids, logprobs = sample(prompts, live)
        if not len(ids) == len(logprobs) == len(live):
            counts = f"{len(ids)} responses and {len(logprobs)} logprobs"
            raise ValueError(f"sample returned {counts} for {len(live)} prompts")
        spoken = [without_end(action, ends) for action in ids]
        responses = [tokenizer.decode(words) for words in spoken]
        acting = [envs[i] for i in live]
        if hasattr(acting[0], "step_all"):
            results = acting[0].step_all(acting, responses)
        else:
            results = [env.step(response) for env, response in zip(acting, responses)]
        still_live = []
        for i, prompt, action, words, logp, result in zip(
            live, prompts, ids, spoken, logprobs, results, strict=True
        ):
            where = f"task {envs[i].task.id}, call {len(calls[i])}"
            whole = isinstance(result, (tuple, list)) and len(result) == 3
            if not whole or not isinstance(result[0], str):
                form = "(observation text, reward, done)"
                raise ValueError(f"{where}: step returned {str(result)[:80]}, not {form}")
            observation, reward, done = result
            observed = encode_text(tokenizer, observation)
            calls[i].append(Call(prompt, action, logp, observed, reward))
            turns[i].append((words, observed))
            contexts[i] = update(turns[i])
            if not isinstance(contexts[i], list):
                kind = type(contexts[i]).__name__
                raise ValueError(f"{where}: the update rule returned {kind}, not a list of ids")
            if not done:
                still_live.append(i)
        live = still_live
        bar.update(len(envs) - len(live) - bar.n)
    bar.close()
    return [c and Trajectory(env.task.id, len(q), c) for env, q, c in zip(envs, prefixes, calls)]


def without_end(action, ends):
    """A response without the token that ends it: a decision, but nothing to read or remember."""
    return action[:-1] if action and action[-1] in ends else action


def encode_text(tokenizer, text):
    """The ids of an observation: all of it is text, also what looks like a control token."""
    return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)


def encode_prompt(tokenizer, text):
    """The ids of q. With a chat template it ends in the assistant's turn, where memory stands;
    without one it begins as the tokenizer begins a text, and is not ended."""
    if not tokenizer.chat_template:
        ids = tokenizer.encode(text)
        return ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids
    turn = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False))


# ---- the update rules U of Eq. 1: update(turns) -> x_next, the newest turn last ------------------
def mem1(turns: Turns) -> list[int]:
    """Eq. 2: the last response (it holds the memory) and the last observation; the rest is gone."""
    response, observation = turns[-1]
    return response + observation


def full_response(turns: Turns) -> list[int]:
    """Everything: an append-only agent that forgets nothing."""
    return [i for response, observation in turns for i in response + observation]


def suffix_retention(n):
    """The last n tokens of the last response, and the last observation."""

    def update(turns):
        response, observation = turns[-1]
        return response[max(0, len(response) - n) :] + observation

    return update


def summary_replacement(tokenizer):
    """The <think> block of the last response, encoded anew, and the last observation. Encoding
    again is safe here: it makes a new context, and that is recorded. (Some chat templates open the
    block themselves: then the response only closes it, and so does the memory.)"""

    def update(turns):
        response, observation = turns[-1]
        memory, closed, _ = tokenizer.decode(response).partition("</think>")
        _, opened, inside = memory.partition("<think>")
        if opened or not closed:
            memory = f"<think>{inside or memory}"
        return tokenizer.encode(f"{memory}</think>", add_special_tokens=False) + observation

    return update


def sliding_window(n):
    """The last n turns, whole."""
    return lambda turns: full_response(turns[max(0, len(turns) - n) :])


def retrieval_refresh(turns: Turns) -> list[int]:
    """The newest observation first, then the response that asked for it."""
    response, observation = turns[-1]
    return observation + response


def update_rules(tokenizer):
    """The six rules of Table 4 by name. The paper only names them; these definitions are ours."""
    return {
        "mem1": mem1, "full_response": full_response, "suffix_retention": suffix_retention(16),
        "summary_replacement": summary_replacement(tokenizer),
        "sliding_window": sliding_window(2), "retrieval_refresh": retrieval_refresh,
    }  # fmt: skip


def update_rule(rule, tokenizer):
    """U: a callable, or its name in `update_rules`."""
    rules = update_rules(tokenizer)
    if not callable(rule) and rule not in rules:
        raise ValueError(f"{rule} is no update rule; take one of {', '.join(rules)}, or hand in U")
    return rule if callable(rule) else rules[rule]


# ---- sampling: a_t of Eq. 1 ----------------------------------------------------------------------
@torch.no_grad()
def generate(model, prompts, max_new_tokens, temperature=1.0, stop=None, generators=None):
    """Sample a response to each prompt from exactly softmax(logits / temperature); greedy at 0.

    Returns the sampled ids, stop token included, and the log-prob of each at that temperature (at 1
    when greedy), in at least float32. A row for which stop(its new ids) is true leaves the batch.
    generators: one source of noise per prompt, see `task_generators`."""
    if not prompts or not all(prompts) or max_new_tokens < 1 or not temperature >= 0:
        needs = "at least one prompt, no empty one, room for a token, a temperature of 0 or more"
        raise ValueError(f"generate needs {needs}")
    check_sampling(model)
    longest = max(map(len, prompts)) + max_new_tokens
    if longest > max_positions(model):
        problem = f"{type(model).__name__} has {max_positions(model)} positions"
        raise ValueError(f"{problem}, and a call could have {longest} tokens")
    device, training = model.device, model.training
    size = {"size": (max_new_tokens,), "dtype": torch.float64}
    noise = [torch.rand(**size, generator=g) for g in generators or [None] * len(prompts)]
    noise = torch.stack(noise).to(device)  # (B, max_new_tokens)
    ids, logprobs = [[] for _ in prompts], [[] for _ in prompts]
    live = list(range(len(prompts)))
    model.eval()
    try:
        cache, shared, width = _read_common_prefix(model, prompts)
        rows = [torch.tensor(prompt[shared:], device=device) for prompt in prompts]
        left = {"batch_first": True, "padding_side": "left"}
        input_ids = pad_sequence(rows, **left)  # (B, L - shared)
        mask = pad_sequence([torch.ones_like(row) for row in rows], **left)
        mask = F.pad(mask, (shared, 0), value=1)  # (B, L)
        for step in range(max_new_tokens):
            logits = _read(model, cache, input_ids, mask, width)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # (B, V)
            logp = torch.log_softmax(logits / (temperature or 1.0), -1)
            token = logp.argmax(-1)  # (B,)
            if temperature:  # the first token whose cumulative probability exceeds the noise
                cdf = logp.double().exp().cumsum(-1)
                level = noise[:, step, None] * cdf[:, -1:]
                token = torch.searchsorted(cdf, level, right=True)[:, 0].clamp(max=cdf.shape[1] - 1)
            chosen = logp.gather(1, token[:, None])[:, 0].tolist()
            for row, new_id, lp in zip(live, token.tolist(), chosen):
                ids[row].append(new_id)
                logprobs[row].append(lp)
            keep = [i for i, row in enumerate(live) if not (stop and stop(ids[row]))]
            if not keep:
                break
            input_ids, mask = token[:, None], F.pad(mask, (0, 1), value=1)
            if len(keep) < len(live):
                index = torch.tensor(keep, device=device)
                input_ids, mask, noise = input_ids[index], mask[index], noise[index]
                live = [live[i] for i in keep]
                cache.batch_select_indices(index)
    finally:
        model.train(training)
    return ids, logprobs


def _read(model, cache, input_ids, mask, width):
    """(B, V): the logits after the last token, once all columns are in the cache, `width` at a
    time. The mask is that of all columns, in the cache and new."""
    n = input_ids.shape[1]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -n:]
    for start in range(0, n, width):
        part = slice(start, start + width)
        seen = mask[:, : mask.shape[1] - n + start + width]
        masks = {"attention_mask": seen, "position_ids": positions[:, part]}
        logits = _forward(model, cache, input_ids[:, part], **masks)
    return logits


def _forward(model, cache, input_ids, **masks):
    """(B, V): the logits after the last token."""
    # the argument's name from transformers 5.24 on, and before
    adapted = model.get_base_model() if hasattr(model, "get_base_model") else model
    named = inspect.signature(adapted.forward).parameters
    name = "cache" if "cache" in named else "past_key_values"
    masks[name] = cache
    out = model(input_ids=input_ids, use_cache=True, logits_to_keep=1, **masks)
    return out.logits[:, -1]


def _read_common_prefix(model, prompts):
    """A cache with the tokens that all prompts begin with, for each of them; how many; and how many
    columns of the rest a forward may read."""
    cache = DynamicCache(config=model.config)
    if any(getattr(layer, "is_sliding", True) for layer in cache.layers):
        return cache, 0, sys.maxsize  # a window would count the padding that follows the prefix
    shortest = min(map(len, prompts))  # of which the next forward needs a token
    shared = min(len(os.path.commonprefix(prompts)), shortest - 1) if len(prompts) > 1 else 0
    if shared:
        _forward(model, cache, torch.tensor([prompts[0][:shared]], device=model.device))
        cache.batch_repeat_interleave(len(prompts))
    return cache, shared, max(1, PREFILL // len(prompts))


_exact = weakref.WeakSet()  # the models that passed check_sampling


def check_sampling(model):
    """Measure, once for each model: three unequal prompts sampled together must get the log-probs
    of one plain forward each. Raises ValueError naming the model and the difference."""
    if model in _exact:
        return
    _exact.add(model)  # while it is measured
    problem = "it was not measured to the end"
    try:
        problem = _problem(model)
    except Exception as error:  # whatever a model's depths raise
        problem = f"its forward raises {type(error).__name__}: {error}".splitlines()[0]
    finally:
        if problem:
            _exact.discard(model)
    if problem:
        raise ValueError(f"{type(model).__name__} cannot be sampled in batches: {problem}")


@torch.no_grad()
def _problem(model):
    config, training = model.config.get_text_config(), model.training
    ids = [i % config.vocab_size for i in range(3, 15)]
    prompts = [ids[:9], ids[:4], ids[:3] + ids[9:]]
    noise = [torch.Generator() for _ in prompts]  # the global noise stays what it was
    asked = count()  # the second row leaves after its first token
    sampled, logprobs = generate(model, prompts, 4, 0, lambda new: next(asked) == 1, noise)
    off, largest = 0.0, 1.0
    model.eval()
    for prompt, new, recorded in zip(prompts, sampled, logprobs):
        tokens = torch.tensor([prompt + new], device=model.device)
        logits = model(input_ids=tokens, use_cache=False).logits[0, -len(new) - 1 : -1]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logp = logits.log_softmax(-1).gather(1, tokens[0, -len(new) :, None])[:, 0]
        off = max(off, (logp - torch.tensor(recorded).to(logp)).abs().max().item())
        largest = max(largest, logits.abs().max().item())
    model.train(training)
    if not off <= {torch.float64: 1e-9, torch.float32: 3e-5}.get(model.dtype, 0.03) * largest:
        return f"log-probs of a batch and of single calls differ by {off:.1e}"
    rope = str([getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")])
    if "longrope" in rope or "dynamic" in rope:  # beyond the reach of short prompts
        return "its rotary frequencies depend on the longest position in a batch"


def max_positions(model):
    """How long a call may be, in tokens, by what the model was made for."""
    config = model.config.get_text_config() if model else None
    most = getattr(config, "max_position_embeddings", None)
    return most if most and most > 0 else sys.maxsize


def task_generators(seed, step, places):
    """One source of noise for each place in the batch of all ranks, from (seed, step, place): a
    task that stands at two places is sampled twice, whatever its rank, batch and device are."""
    generators = []
    for place in places:
        digest = hashlib.sha256(f"{seed} {step} {place}".encode()).digest()
        generators.append(torch.Generator().manual_seed(int.from_bytes(digest[:8], "big")))
    return generators


@contextmanager
def continuous(model, max_new_tokens, temperature=1.0, stop=None, seed=0, tokens=None):
    """A `sample` for `rollout` by the continuous batching of transformers: a paged cache in which
    the calls of all rounds share their prefixes, and on CUDA graphs instead of a kernel at a time.

    As `generate` it samples from exactly softmax(logits / temperature), or greedily at 0; but the
    noise is one source for all rows. The model belongs to the engine's thread: inside the block
    nothing else may run it or change its weights, and a new block reads the new ones. tokens: room
    in the cache, needed on a CPU; on CUDA by default what is free."""
    if model.device.type == "cpu" and not find_spec("psutil"):
        raise ValueError("continuous batching on a CPU needs psutil: pip install psutil")
    settings = {"return_logprobs": True, "seed": seed}
    if tokens is not None:
        page = ContinuousBatchingConfig.page_size
        settings |= {"num_blocks": -(-tokens // page) + 1, "max_batch_tokens": PREFILL}
    warm = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    generation = GenerationConfig(do_sample=temperature > 0, eos_token_id=-1, **warm)
    attention, training = model.config._attn_implementation, model.training
    model.set_attn_implementation("sdpa")
    manager = model.init_continuous_batching(generation, ContinuousBatchingConfig(**settings))
    manager.start()

    def sample(prompts, rows):
        ids, logprobs, waiting = [[] for _ in prompts], [[] for _ in prompts], {}
        for row, prompt in enumerate(prompts):
            name = manager.add_request(prompt, max_new_tokens=max_new_tokens, streaming=True)
            waiting[name] = row
        while waiting:
            result = manager.get_result(timeout=1)
            if result is None and manager.is_running():
                continue
            if result is None or result.error:
                raise RuntimeError(f"continuous batching failed: {getattr(result, 'error', None)}")
            row = waiting.get(result.request_id)
            if row is None:  # it goes on until it hears that it was cancelled
                continue
            new, n = result.generated_tokens, len(ids[row]) + 1
            while n < len(new) and not (stop and stop(new[:n])):
                n += 1
            ids[row], logprobs[row] = new[:n], result.logprobs[:n]
            if n == max_new_tokens or stop and stop(new[:n]):
                manager.cancel_request(result.request_id)
                del waiting[result.request_id]
        return ids, logprobs

    try:
        yield sample
    finally:
        manager.stop()
        model.set_attn_implementation(attention)
        model.train(training)


def end_ids(tokenizer, model=None):
    """The tokens that end a turn: the tokenizer's, and all that `model.generate` would stop at."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = ends if isinstance(ends, list) else [ends]
    return {tokenizer.eos_token_id, *ends} - {None}


def stop_on(tokenizer, strings, ends=None):
    """A response is over with one of the tokens `ends` (by default the tokenizer's), or as soon as
    its text holds one of `strings`. Text and not ids, since a tokenizer may merge the end of a tag
    with what follows."""
    ends = ends or end_ids(tokenizer)
    window = max((len(s.encode()) for s in strings), default=1)  # a token spells at least one byte

    def stop(ids):
        if ids[-1] in ends:
            return True
        text = tokenizer.decode(ids[-window:])
        return any(s in text for s in strings)

    return stop


def scripted(respond, tokenizer, envs):
    """A `sample` for `rollout` that speaks instead of a model: respond(env) is the text."""

    def sample(prompts, rows):
        ids = [tokenizer.encode(respond(envs[i]), add_special_tokens=False) for i in rows]
        return ids, [[0.0] * len(action) for action in ids]

    return sample


def load(path, device, attention="sdpa", dtype="auto"):
    """(tokenizer, causal model in eval mode) of a folder or hub name; of a folder of adapters, the
    model that they adapt, in which they alone train (needs peft). Raises ValueError if there is
    none, or if weights are missing."""
    settings, found = {"attn_implementation": attention, "dtype": dtype}, {"missing_keys": []}
    try:
        if os.path.exists(os.path.join(path, "adapter_config.json")):
            import peft

            kind = peft.AutoPeftModelForCausalLM
            model = kind.from_pretrained(path, is_trainable=True, **settings).eval()
            if not os.path.exists(os.path.join(path, "tokenizer_config.json")):
                path = model.active_peft_config.base_model_name_or_path  # peft saves no tokenizer
        else:
            kind = AutoModelForCausalLM
            model, found = kind.from_pretrained(path, output_loading_info=True, **settings)
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # a file may be damaged in any way
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"{path}: no model and tokenizer to load there ({reason})") from None
    if found["missing_keys"]:
        names = ", ".join(sorted(found["missing_keys"]))
        raise ValueError(f"{path}: these weights are missing, and would be random: {names}")
    for parameter in model.parameters():
        # as mapped from the file it isn't aligned, and sums are rounded in another order
        parameter.data = parameter.data.to(device, copy=True)
    return tokenizer, model.to(device)


def check_tokenizers(student, teacher):
    """Eq. 7 compares id by id: raise ValueError unless every id means the same to both."""
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    for token in sorted(ours.keys() | theirs.keys()):
        if ours.get(token) != theirs.get(token):
            ids = f"{token!r} is id {ours.get(token)} to the student, {theirs.get(token)} to the"
            problem = f"student and teacher have different tokenizers: {ids} teacher"
            raise ValueError(f"{problem}; take one of the same family")


def train_tokenizer(texts, vocab_size):
    """Byte-level BPE over words between spaces, with all bytes in it: no character is lost."""
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(r"\s?\S+|\s"), behavior="isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, letters])
    tokenizer.decoder = decoders.ByteLevel()
    end, pad, alphabet = "<|end|>", "<|pad|>", pre_tokenizers.ByteLevel.alphabet()
    settings = {"special_tokens": [end, pad], "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size, **settings))
    settings = {"eos_token": end, "pad_token": pad, "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)


def toy_model(tokenizer, hidden_size, layers, attention="sdpa", scale=0.02):
    """A random Llama with heads of width 32, weights of deviation `scale`. (AutoTokenizer would
    replace the tokenizer saved with a Qwen2 by Qwen's own.)"""
    heads = hidden_size // 32
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=hidden_size, intermediate_size=3 * hidden_size,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
        attention_bias=True, tie_word_embeddings=True, initializer_range=scale, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


# ---- files, and text for people ------------------------------------------------------------------
@contextmanager
def uninterrupted():
    """Hold SIGINT back until the block is done, so that what is being written is finished. (Only
    the main thread gets it.)"""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught = []
    before = signal.signal(signal.SIGINT, lambda *_: caught.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if caught:
        raise KeyboardInterrupt


@uninterrupted()
def write(file, text):
    """Write the whole file or leave the old one, whatever happens meanwhile."""
    part = f"{os.fspath(file)}.part"
    with open(part, "w", encoding="utf-8") as f:
        f.write(text)
    os.replace(part, file)


@contextmanager
def whole_folder(folder, first=True):
    """A temporary folder that takes the name and place of `folder` when the block is done, and goes
    if it fails: what has the name is whole. Of several processes, the first renames."""
    part, old = (folder.with_name(f".saving-{which}-{folder.name}") for which in ("new", "old"))
    try:
        with uninterrupted():
            part.mkdir(parents=True, exist_ok=True)
            yield part
            if first and folder.exists():
                os.rename(folder, old)
            if first:
                os.rename(part, folder)
    finally:
        for rest in (part, old) if first else ():
            shutil.rmtree(rest, ignore_errors=True)


def finish_folders(parent):
    """Remove what a killed `whole_folder` left in a folder, or give the old one its name back."""
    for part in parent.glob(".saving-*"):
        name = part.name.removeprefix(".saving-old-")
        if name != part.name and not (parent / name).exists():
            os.rename(part, parent / name)
        elif part.name.startswith((".saving-old-", ".saving-new-")):
            shutil.rmtree(part)


def save_trajectories(path, trajectories):
    """Write one JSON object a line, whole or not at all; ids and floats come back exactly."""
    write(path, "".join(json.dumps(asdict(trajectory)) + "\n" for trajectory in trajectories))


def load_trajectories(path, tokenizer=None):
    """Read what `save_trajectories` wrote. Raises ValueError naming a damaged or foreign line, or
    one whose ids are not the tokenizer's: then the text of q has others."""

    def read(record):
        calls = [Call(**call) for call in record["calls"]]
        trajectory = Trajectory(**{**record, "calls": calls})
        q = calls[0].prompt_ids[: trajectory.prefix_len]
        if tokenizer:
            text = tokenizer.decode(q, clean_up_tokenization_spaces=False)
            if tokenizer.encode(text, add_special_tokens=False) != q:
                raise ValueError("its ids are another tokenizer's")
        return trajectory

    return read_lines(path, read, "not a trajectory record")


def replay(path, tokenizer, update):
    """The episodes that `eval.py --keep_correct` wrote as text, tokenised once, in the contexts
    that the update rule makes of them. Raises ValueError naming a line that isn't an episode."""

    def read(record):
        q, turns, calls, context = encode_prompt(tokenizer, record["prompt"]), [], [], []
        for turn in record["turns"]:
            words = tokenizer.encode(turn["response"], add_special_tokens=False)
            action = words + [tokenizer.eos_token_id] * turn.get("ended", False)
            observed = encode_text(tokenizer, turn["observation"])
            calls.append(Call(q + context, action, [0.0] * len(action), observed))
            turns.append((words, observed))
            context = update(turns)
        return Trajectory(record["task"], len(q), calls)

    return read_lines(path, read, "no episode of eval.py --keep_correct")


def read_lines(path, read, problem, grows=False):
    """read(record) of every line of a JSONL file; what it cannot read is named by file and line.
    grows: a file to which lines are added may not be there yet, and its last line may be cut."""
    found = []
    if grows and not os.path.exists(path or ""):
        return found
    with open(path, encoding="utf-8-sig", errors="replace") as f:
        for number, line in enumerate(f, 1):
            if not line.strip():
                continue
            try:
                found.append(read(json.loads(line)))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                if grows and not line.endswith("\n"):
                    break
                where = f"{os.fspath(path)}, line {number}"
                raise ValueError(f"{where}: {problem} ({error})") from None
    return found


def format_trajectory(trajectory, tokenizer):
    """q, then each call's action and observation as text, with the token counts of z_t and a_t."""
    q = trajectory.calls[0].prompt_ids[: trajectory.prefix_len]
    lines = [f"q: {tokenizer.decode(q)}"]
    for t, call in enumerate(trajectory.calls):
        lengths = f"{len(call.prompt_ids)} -> {len(call.action_ids)} tokens"
        lines.append(f"a_{t} ({lengths}): {tokenizer.decode(call.action_ids)}")
        observation = tokenizer.decode(call.observation_ids).strip()
        lines += [f"o_{t}: {observation}"] if observation else []
        lines += [f"r_{t}: {call.reward:g}"] if call.reward or not observation else []
    return "\n".join(lines)


class _Diary:
    """A task of four turns: the agent notes a letter and looks up its number."""

    task, turn = SimpleNamespace(id="diary"), 0

    def prompt(self):
        return "q"

    def respond(self):
        note = f" <think> note {'abcd'[self.turn]} </think> Now I look up the number of this letter"
        return f"{note} <search> {'abcd'[self.turn]} </search>"

    def step(self, response):
        self.turn += 1
        return f" [ number {self.turn} ]", 0.0, self.turn == 4


@contextmanager
def command(name, advice=""):
    """A command as its users meet it: it prints to any stdout, ends without a word where that is
    closed, and in one line where something is wrong or Ctrl-C is pressed."""
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        raise SystemExit(1) from None
    except (ValueError, OSError) as error:
        raise SystemExit(f"{name}: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(f"\ninterrupted{advice}") from None


@command("rollout.py")
def main():
    tokenizer = train_tokenizer([_Diary().respond()] * 4 + [" [ number 1 ]"], 400)
    print("Three turns, then what the fourth call reads after q under each update rule U:\n")
    for name, update in update_rules(tokenizer).items():
        env = _Diary()
        sample = scripted(_Diary.respond, tokenizer, [env])
        (trajectory,) = rollout(sample, tokenizer, [env], update)
        context = trajectory.calls[3].prompt_ids[trajectory.prefix_len :]
        print(f"{name} ({len(context)} tokens):\n   {tokenizer.decode(context)}")


if __name__ == "__main__":
    main()
