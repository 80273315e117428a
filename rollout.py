"""Rollout with compact memory (Section 3.2): sample, act, rewrite the context, and record every call exactly.

    Eq. 1   a_t ~ pi_old(. | q, x_t),   (o_t, r_t, d_t) = E(a_t),   x_{t+1} = U(x_t, a_t, o_t)
    Eq. 2   U of MEM1:  [q] -> a_0,   [q, m_0, o_0] -> a_1,   [q, m_1, o_1] -> a_2,  ...

A `Call` keeps the token ids of z_t = [q, x_t] that the model read and the ids a_t that it sampled: nothing is decoded
and tokenised again, since the ids of the same text may differ. U is any function `update(turns) -> x_next` on ids.
Needs torch, transformers and tqdm; the environments come in as arguments.

    python rollout.py        # what each update rule keeps, call by call, on a random model
"""
import hashlib
import inspect
import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedTokenizerFast, Qwen2Config


# ---- records ---------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Call:
    """One model call, as it happened. Raises ValueError if the record cannot be one."""
    prompt_ids: list[int]        # z_t = [q, x_t]
    action_ids: list[int]        # a_t, the stop token included
    logprobs: list[float]        # log pi_old of each action id, at the sampling temperature
    observation_ids: list[int]   # o_t
    reward: float = 0.0          # r_t; Eq. 8 puts it on the last action token of the call

    def __post_init__(self):
        for name in ("prompt_ids", "action_ids", "observation_ids"):
            ids = getattr(self, name)
            if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
                raise ValueError(f"{name} must be a list of token ids, not {str(ids)[:80]}")
        if not self.prompt_ids or not self.action_ids:
            raise ValueError("a call needs at least one prompt id and one action id; an empty action trains nothing")
        if not isinstance(self.logprobs, list) or len(self.logprobs) != len(self.action_ids):
            raise ValueError(f"{len(self.action_ids)} action ids need as many logprobs, recorded as they were sampled")
        if not all(isinstance(x, (int, float)) and math.isfinite(x) for x in [*self.logprobs, self.reward]):
            raise ValueError("logprobs and reward must be finite numbers")


@dataclass(frozen=True)
class Trajectory:
    """The calls of one episode. Every prompt starts with the same `prefix_len` ids: q."""
    task_id: str
    prefix_len: int
    calls: list[Call]

    def __post_init__(self):
        if not self.calls:
            raise ValueError(f"trajectory of task {self.task_id}: no calls")
        q = self.calls[0].prompt_ids[:self.prefix_len]
        for t, call in enumerate(self.calls):
            if len(q) != self.prefix_len or call.prompt_ids[:self.prefix_len] != q:
                raise ValueError(f"trajectory of task {self.task_id}: the prompt of call {t} does not start with q")


def save_trajectories(path: str | os.PathLike, trajectories: list[Trajectory]) -> None:
    """Write one JSON object a line, whole or not at all; ids and floats come back exactly."""
    part = f"{os.fspath(path)}.part"
    with open(part, "w", encoding="utf-8") as f:
        f.writelines(json.dumps(asdict(trajectory)) + "\n" for trajectory in trajectories)
    os.replace(part, path)


def load_trajectories(path: str | os.PathLike) -> list[Trajectory]:
    """Read what `save_trajectories` wrote. Raises ValueError naming the line that is damaged or foreign."""
    trajectories = []
    with open(path, encoding="utf-8", errors="replace") as f:
        for number, line in enumerate(f, 1):
            try:
                record = json.loads(line)
                trajectories.append(Trajectory(**{**record, "calls": [Call(**call) for call in record["calls"]]}))
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{os.fspath(path)}, line {number}: not a trajectory record ({error})") from None
    return trajectories


# ---- the update rules U of Eq. 1 -------------------------------------------------------------------------------------

Turns = list[tuple[list[int], list[int]]]  # (response ids without the stop token, observation ids), newest last


def mem1(turns: Turns) -> list[int]:
    """Eq. 2: the last response (it holds the memory) and the last observation; all before is gone."""
    response, observation = turns[-1]
    return response + observation


def full_response(turns: Turns) -> list[int]:
    """Nothing is forgotten: an append-only agent."""
    return [i for response, observation in turns for i in response + observation]


def suffix_retention(n: int) -> Callable[[Turns], list[int]]:
    """The last n tokens of the last response, and the last observation."""
    def update(turns):
        response, observation = turns[-1]
        return response[max(0, len(response) - n):] + observation
    return update


def summary_replacement(tokenizer, opening: str = "<think>", closing: str = "</think>") -> Callable[[Turns], list[int]]:
    """The memory text of the last response, encoded anew, and the last observation. Encoding again is safe here, since
    it makes a new context: what is recorded is the z_t that results."""
    def update(turns):
        text = tokenizer.decode(turns[-1][0])
        memory = text.partition(opening)[2].partition(closing)[0] if opening in text else text
        return tokenizer.encode(f"{opening}{memory}{closing}", add_special_tokens=False) + turns[-1][1]
    return update


def sliding_window(n: int) -> Callable[[Turns], list[int]]:
    """The last n turns, whole."""
    return lambda turns: full_response(turns[max(0, len(turns) - n):])


def retrieval_refresh(turns: Turns) -> list[int]:
    """The newest observation first, then the response that asked for it."""
    response, observation = turns[-1]
    return observation + response


def update_rules(tokenizer) -> dict[str, Callable[[Turns], list[int]]]:
    """The six rules of Table 4, at small sizes, by name."""
    return {"mem1": mem1, "full_response": full_response, "suffix_retention": suffix_retention(16),
            "summary_replacement": summary_replacement(tokenizer), "sliding_window": sliding_window(2),
            "retrieval_refresh": retrieval_refresh}


# ---- sampling --------------------------------------------------------------------------------------------------------

def load(path: str, device: str, attention: str = "sdpa", dtype: str | torch.dtype = "auto") -> tuple:
    """(tokenizer, causal model in eval mode) of a folder or hub name. Raises ValueError where there is none."""
    try:
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention, dtype=dtype)
        for parameter in model.parameters():  # as mapped from the file they are not aligned, and round otherwise
            parameter.data = parameter.data.to(device, copy=True)
        return AutoTokenizer.from_pretrained(path), model.to(device)
    except OSError as error:
        raise ValueError(f"{path}: no model and tokenizer to load there ({str(error).splitlines()[0]})") from None


def task_generators(seed: int, step: int, task_ids: list[str]) -> list[torch.Generator]:
    """One source of noise for each task, from (seed, step, task): it depends neither on the batch that a task is in nor
    on the device."""
    digests = (hashlib.sha256(f"{seed} {step} {task_id}".encode()).digest() for task_id in task_ids)
    return [torch.Generator().manual_seed(int.from_bytes(digest[:8], "big")) for digest in digests]


def stop_on(tokenizer, strings: tuple[str, ...]) -> Callable[[list[int]], bool]:
    """A response is over with the end-of-sequence token, or as soon as its text holds one of `strings`: text and not
    ids, since a tokenizer may merge the end of a tag with what follows."""
    window = max((len(s.encode()) for s in strings), default=1)  # a token spells at least one byte

    def stop(ids):
        return ids[-1] == tokenizer.eos_token_id or any(s in tokenizer.decode(ids[-window:]) for s in strings)
    return stop


@torch.no_grad()
def generate(model, prompts: list[list[int]], max_new_tokens: int, temperature: float = 1.0,
             stop: Callable[[list[int]], bool] = lambda ids: False,
             generators: list[torch.Generator] | None = None) -> tuple[list[list[int]], list[list[float]]]:
    """Sample a response to each prompt from exactly softmax(logits / temperature), no top-p, no top-k; greedy at 0.

    Returns the sampled ids, stop token included, and the log-prob of each at that temperature (at 1 when greedy), in at
    least float32. A row that stops leaves the batch. generators: one for each prompt, see `task_generators`."""
    if not prompts or not all(prompts) or max_new_tokens < 1:
        raise ValueError("generate needs at least one prompt, no empty prompt, and max_new_tokens >= 1")
    device, longest, training = model.device, max(map(len, prompts)), model.training
    noise = torch.stack([torch.rand(max_new_tokens, dtype=torch.float64, generator=g)
                         for g in generators or [None] * len(prompts)]).to(device)                     # (B, new)
    cache = DynamicCache(config=model.config)
    # its name before transformers 5.24 and after
    cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    # what all prompts begin with is read once; a window would count the padding behind it, and one row shares nothing
    shared = 0 if len(prompts) == 1 or any(layer.is_sliding for layer in cache.layers) else min(
        len(os.path.commonprefix(prompts)), min(map(len, prompts)) - 1)
    pads = [[0] * (longest - len(p)) for p in prompts]
    input_ids = torch.tensor([pad + p[shared:] for pad, p in zip(pads, prompts)], device=device)       # (B, L - shared)
    mask = torch.tensor([[1] * shared + pad + [1] * (len(p) - shared) for pad, p in zip(pads, prompts)], device=device)
    ids, logprobs = [[] for _ in prompts], [[] for _ in prompts]
    live = list(range(len(prompts)))
    model.eval()
    try:
        if shared:
            model(input_ids=torch.tensor([prompts[0][:shared]], device=device), use_cache=True, logits_to_keep=1,
                  **{cache_name: cache})
            cache.batch_repeat_interleave(len(prompts))
        for step in range(max_new_tokens):
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -input_ids.shape[1]:]
            logits = model(input_ids=input_ids, attention_mask=mask, position_ids=positions, use_cache=True,
                           logits_to_keep=1, **{cache_name: cache}).logits[:, -1]                      # (B, V)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            logp = torch.log_softmax(logits / (temperature or 1.0), -1)
            token = logp.argmax(-1) if temperature == 0 else _inverse_cdf(logp, noise[:, step])        # (B,)
            chosen = logp.gather(1, token[:, None])[:, 0].tolist()
            for row, new_id, lp in zip(live, token.tolist(), chosen):
                ids[row].append(new_id)
                logprobs[row].append(lp)
            keep = [i for i, row in enumerate(live) if not stop(ids[row])]
            if not keep:
                break
            input_ids, mask = token[:, None], F.pad(mask, (0, 1), value=1)
            if len(keep) < len(live):
                index = torch.tensor(keep, device=device)
                input_ids, mask, noise, live = input_ids[index], mask[index], noise[index], [live[i] for i in keep]
                cache.batch_select_indices(index)
    finally:
        model.train(training)
    return ids, logprobs


def _inverse_cdf(logp: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """(B, V), (B,) -> (B,): the first token whose cumulative probability exceeds the row's uniform number."""
    cdf = logp.double().exp().cumsum(-1)
    token = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True)[:, 0]
    return token.clamp(max=logp.shape[-1] - 1)


def encode_prompt(tokenizer, text: str) -> list[int]:
    """The ids of q. With a chat template q ends with the generation prompt: memory stands in the assistant's turn."""
    if tokenizer.chat_template:
        message = [{"role": "user", "content": text}]
        return list(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))
    return tokenizer.encode(text, add_special_tokens=False)


def rollout(sample: Callable, tokenizer, envs: list, step_all: Callable, update: Callable[[Turns], list[int]],
            max_prompt_len: int | None = None, progress: str | None = None) -> list[Trajectory]:
    """Run all environments to their ends, one call each per round, and record every call (Eq. 1).

    sample(prompts, rows) -> ids, logprobs: `generate` bound to a model, or any faster engine; rows says which
    environments the prompts belong to. step_all(envs, responses) -> [(observation, reward, done), ...] on text.
    env.prompt() is the text of q, env.task.id names the task. Raises ValueError for a prompt over max_prompt_len:
    nothing is ever cut."""
    if not envs:
        raise ValueError("rollout needs at least one environment: the task list is empty")
    prefixes = [encode_prompt(tokenizer, env.prompt()) for env in envs]
    contexts, turns, calls = [[] for _ in envs], [[] for _ in envs], [[] for _ in envs]
    live = list(range(len(envs)))
    with tqdm(total=len(envs), desc=progress, leave=False, disable=progress is None) as bar:
        while live:
            prompts = [prefixes[i] + contexts[i] for i in live]
            for i, prompt in zip(live, prompts):
                if max_prompt_len and len(prompt) > max_prompt_len:
                    raise ValueError(
                        f"task {envs[i].task.id}, call {len(calls[i])}: the prompt has {len(prompt)} tokens and only "
                        f"{max_prompt_len} fit; raise max_len, or keep or retrieve less")
            ids, logprobs = sample(prompts, live)
            if not len(ids) == len(logprobs) == len(live):
                raise ValueError(f"sample returned {len(ids)} responses and {len(logprobs)} logprobs "
                                 f"for {len(live)} prompts")
            results = step_all([envs[i] for i in live], [tokenizer.decode(a, skip_special_tokens=True) for a in ids])
            for i, prompt, action, logp, result in zip(live, prompts, ids, logprobs, results, strict=True):
                observation, reward, _ = result
                observed = tokenizer.encode(observation, add_special_tokens=False)
                calls[i].append(Call(prompt, action, logp, observed, reward))
                turns[i].append((action[:-1] if action[-1] == tokenizer.eos_token_id else action, observed))
                contexts[i] = update(turns[i])
            finished = sum(done for *_, done in results)
            live = [i for i, (*_, done) in zip(live, results) if not done]
            bar.update(finished)
    return [Trajectory(env.task.id, len(q), c) for env, q, c in zip(envs, prefixes, calls)]


def scripted(respond: Callable[[object], str], tokenizer, envs: list) -> Callable:
    """A `sample` for `rollout` that speaks in place of a model: `respond(env) -> text`, tokenised once, log-probs 0."""
    def sample(prompts, rows):
        ids = [tokenizer.encode(respond(envs[i]), add_special_tokens=False) for i in rows]
        return ids, [[0.0] * len(action) for action in ids]
    return sample


def format_trajectory(trajectory: Trajectory, tokenizer) -> str:
    """q, then each call's action and observation as text, with the token counts of z_t and a_t."""
    lines = [f"q: {tokenizer.decode(trajectory.calls[0].prompt_ids[:trajectory.prefix_len])}"]
    for t, call in enumerate(trajectory.calls):
        lengths = f"{len(call.prompt_ids)} -> {len(call.action_ids)} tokens"
        lines.append(f"a_{t} ({lengths}): {tokenizer.decode(call.action_ids)}")
        observation = tokenizer.decode(call.observation_ids).strip()
        lines.append(f"o_{t}: {observation}" if observation else f"r_{t}: {call.reward:g}")
    return "\n".join(lines)


# ---- a tokenizer for the toy -----------------------------------------------------------------------------------------

def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE over words between spaces. The full byte alphabet is in: no character can vanish."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"\s?\S+|\s"), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<|end|>", "<|pad|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>",
                                   clean_up_tokenization_spaces=False)


# ---- demo ------------------------------------------------------------------------------------------------------------

def main():
    """What each call reads under each update rule: a random model for three calls, in a world that only counts."""
    tokenizer = train_tokenizer(["<think> one </think>", "question", " observation"], 300)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1))

    def step_all(envs, responses):
        envs[0].turn += 1
        return [(f" observation {envs[0].turn}", 1.0, envs[0].turn == 3)]

    for name, update in update_rules(tokenizer).items():
        env = SimpleNamespace(task=SimpleNamespace(id="demo"), turn=0, prompt=lambda: "question")
        noise = task_generators(0, 0, ["demo"])
        (trajectory,) = rollout(lambda prompts, rows: generate(model, prompts, 6, generators=noise),
                                tokenizer, [env], step_all, update)
        print(f"{name}: q = {trajectory.calls[0].prompt_ids[:trajectory.prefix_len]}")
        for t, call in enumerate(trajectory.calls):
            mean = sum(call.logprobs) / len(call.logprobs)
            print(f"  x_{t} = {call.prompt_ids[trajectory.prefix_len:]}\n    -> a_{t} = {call.action_ids}, "
                  f"mean log pi_old {mean:.2f}, o_{t} = {call.observation_ids}, r_{t} = {call.reward:g}")


if __name__ == "__main__":
    main()
