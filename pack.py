"""Memory state alignment (Section 3.3): many model calls in one sequence, each in its exact state.

A pack is the prefix tree of all calls, written in depth-first order. Then a token's position is its
depth, and what it sees are its ancestors: one integer per token, `subtree_end`, says who they are.

    Eq. 3   sigma_t = (z_t, rho_t, V_t, gamma_t)   input_ids, position_ids, subtree_end, predict_idx
    Eq. 4   y = [q, x_0, a_0, x_1, a_1, ...]       q stands once, positions restart, blocks apart
    Eq. 6   m_act                                  only the sampled occurrence of an action counts

Three calls, [q] -> a_0, [q, m_0, o_0] -> a_1, [q, m_1, o_1] -> a_2, with only q shared (Eq. 4). A
row sees the columns marked ■; x marks sampled tokens; m_0 is what the next context keeps of a_0:

    token  pos  act    q  q a0 a0 m0 o0 a1 a1 m1 o1 a2
     q       0         ■  ·  ·  ·  ·  ·  ·  ·  ·  ·  ·
     q       1         ■  ■  ·  ·  ·  ·  ·  ·  ·  ·  ·
     a0      2   x     ■  ■  ■  ·  ·  ·  ·  ·  ·  ·  ·
     a0      3   x     ■  ■  ■  ■  ·  ·  ·  ·  ·  ·  ·
     m0      2         ■  ■  ·  ·  ■  ·  ·  ·  ·  ·  ·
     o0      3         ■  ■  ·  ·  ■  ■  ·  ·  ·  ·  ·
     a1      4   x     ■  ■  ·  ·  ■  ■  ■  ·  ·  ·  ·
     a1      5   x     ■  ■  ·  ·  ■  ■  ■  ■  ·  ·  ·
     m1      2         ■  ■  ·  ·  ·  ·  ·  ·  ■  ·  ·
     o1      3         ■  ■  ·  ·  ·  ·  ·  ·  ■  ■  ·
     a2      4   x     ■  ■  ·  ·  ·  ·  ·  ·  ■  ■  ■

Shapes: S packed length, N sampled action tokens, H hidden size. Every (N,) field is in the order of
the calls given, then k; never in physical order. Plain ids go in, tensors come out. Needs torch and
transformers; load models with attn_implementation="packed".

    python pack.py        # this picture, with the fields of the pack
"""

import os
import re
import signal
import sys
import weakref
from collections import defaultdict
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

BLOCK = 128  # FlexAttention's tile; several of its known faults need a length that isn't a multiple


def cached_mask(make):
    """cached_property, made outside inference_mode: what scoring made can serve an update."""
    return cached_property(torch.inference_mode(False)(make))


@dataclass(frozen=True)
class Packed:
    """Calls packed into one sequence, and its visibility in the form that each attention wants."""

    input_ids: Tensor  # (S,) y of Eq. 4
    position_ids: Tensor  # (S,) rho: the position in the token's own call
    subtree_end: Tensor  # (S,) V: q sees k  <=>  k <= q < subtree_end[k]
    predict_idx: Tensor  # (N,) gamma, g(t,k): the row whose output predicts the token
    action_ids: Tensor  # (N,) a_{t,k}
    action_idx: Tensor  # (N,) m_act as a list: where the sampled token stands
    call_idx: Tensor  # (N,) which of the calls given the token belongs to

    @cached_mask
    def action_mask(self) -> Tensor:
        """(S,) bool, m_act of Eq. 6. Two calls that sampled the same token in the same state share
        its place and remain two decisions, so the sum can be smaller than N."""
        nowhere = torch.zeros_like(self.input_ids, dtype=torch.bool)
        return nowhere.index_fill(0, self.action_idx, True)

    @cached_mask
    def dense_mask(self) -> Tensor:
        """(S, S) bool, the readable reference: True where row q sees column k."""
        place = torch.arange(len(self.input_ids), device=self.input_ids.device)
        q = place[:, None]
        k = place[None, :]
        not_later = k <= q
        within_its_subtree = q < self.subtree_end
        return not_later & within_its_subtree

    @cached_mask
    def block_mask(self) -> BlockMask:
        """The same mask for FlexAttention, without S x S work. S must be a multiple of BLOCK.

        Columns of a tile left of the diagonal precede its rows, so q sees k exactly if q < end[k]:
        some pair is visible if the largest end passes the first row, all if the smallest passes the
        last."""
        S = len(self.input_ids)
        end = self.subtree_end
        largest_end = end.view(-1, BLOCK).amax(1)
        smallest_end = end.view(-1, BLOCK).amin(1)
        column = torch.arange(S // BLOCK, device=end.device)
        row = column[:, None]
        some = (column <= row) & (largest_end > row * BLOCK)  # the diagonal, too
        every = (column < row) & (smallest_end >= (row + 1) * BLOCK)

        def mask_mod(b, h, q, k):
            return (k <= q) & (q < end[k])

        tiles = (*_tile_lists(some & ~every), *_tile_lists(every))
        settings = {"BLOCK_SIZE": BLOCK, "seq_lengths": (S, S), "mask_mod": mask_mod}
        return BlockMask.from_kv_blocks(*tiles, **settings)

    @cached_mask
    def segments(self):
        """The same mask for SDPA: the lengths of the tree's segments and, for each, those that it
        sees (itself last) with a mask. A segment is a run without a branch, causal in itself."""
        end = self.subtree_end
        changed = end[1:] != end[:-1]
        changes = changed.nonzero()[:, 0] + 1
        bounds = torch.cat([end.new_zeros(1), changes, end]).unique()
        starts = bounds[:-1].tolist()
        lengths = bounds.diff().tolist()
        ends = end[bounds[:-1]].tolist()
        plan, seen = [], []
        for i, rows in enumerate(lengths):
            seen = [j for j in seen if ends[j] > starts[i]] + [i]
            columns = sum(lengths[j] for j in seen)
            mask = None  # a single row sees it all; without ancestors plain causal will do
            if 1 < rows < columns:
                mask = torch.ones(rows, columns, dtype=torch.bool, device=end.device)
                mask = mask.tril(columns - rows)
            plan.append((seen, mask))
        return lengths, plan

    def to(self, device):
        """Move it; on CUDA also pad it, so that one BlockMask serves every model that reads it."""
        columns = [getattr(self, field.name) for field in fields(self)]
        moved = Packed(*(column.to(device) for column in columns))
        if moved.input_ids.is_cuda:
            moved = pad(moved, bucket(len(moved.input_ids)))
        return moved


def _tile_lists(tiles):
    """For each row of a bool matrix: how many columns are set, and their indices first."""
    order = tiles.int().argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]


# ---- building a pack -----------------------------------------------------------------------------
def pack(prompts, actions, share=None, max_len=None, pad_to=1) -> Packed:
    """Eq. 4 and 6: pack the calls (z_t, a_t) into their prefix tree, in depth-first order.

    prompts, actions: a list of ids per call. share: how many leading tokens a call may share, one
    number or one per call: len(q) is Eq. 4 to the letter, None shares every common prefix. Raises
    ValueError naming a call that is empty or longer than max_len: nothing is ever cut."""
    if not prompts or len(prompts) != len(actions):
        counts = f"{len(prompts)} prompts, {len(actions)} actions"
        problem = "pack needs at least one call, and an action for each prompt"
        raise ValueError(f"{problem}: {counts}")
    share = share if isinstance(share, list) else [share] * len(prompts)
    if len(share) != len(prompts):
        raise ValueError(f"{len(share)} numbers of tokens to share, for {len(prompts)} calls")
    for c, (prompt, action) in enumerate(zip(prompts, actions)):
        for name, ids in (("prompt", prompt), ("action", action)):
            if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
                raise ValueError(f"call {c}: its {name} must be a list of ids, not {str(ids)[:80]}")
            if not ids:
                raise ValueError(f"call {c}: empty {name}")
        if max_len is not None and len(prompt) + len(action) > max_len:
            size = f"{len(prompt)} + {len(action)} tokens, over max_len = {max_len}"
            advice = "raise max_len or leave the example out"
            reason = "cutting it would change its state"
            raise ValueError(f"call {c} has {size}; {reason}: {advice}")
    tokens, depths, parents, paths = _prefix_tree(prompts, actions, share)
    S = len(tokens)
    size = [1] * S  # of each node's subtree
    children = defaultdict(list)  # of each node, the first to appear last
    for node in reversed(range(S)):  # a node is made after its parent
        children[parents[node]].append(node)
        if parents[node] is not None:
            size[parents[node]] += size[node]
    order, stack = [], children[None]
    while stack:
        node = stack.pop()
        order.append(node)
        stack += children[node]
    place = [0] * S
    for i, node in enumerate(order):
        place[node] = i
    predict, act = [], []
    action_ids, call_idx = [], []
    for c, (path, prompt, action) in enumerate(zip(paths, prompts, actions)):
        first = len(prompt)  # where a_{t,0} stands
        # predicted by the token before it: the end of q if x_t is empty, which calls may share
        predict += path[first - 1 : -1]
        act += path[first:]
        action_ids += action
        call_idx += [c] * len(action)
    order = torch.tensor(order)
    place = torch.tensor(place)
    packed = Packed(
        input_ids=torch.tensor(tokens)[order],
        position_ids=torch.tensor(depths)[order],
        subtree_end=torch.arange(S) + torch.tensor(size)[order],
        predict_idx=place[predict],
        action_ids=torch.tensor(action_ids),
        action_idx=place[act],
        call_idx=torch.tensor(call_idx),
    )
    return pad(packed, -(-S // pad_to) * pad_to)


def _prefix_tree(prompts, actions, share):
    """Token, depth and parent of each node (None above a root), and each call's path of nodes."""
    nodes, paths = {}, []
    tokens, depths, parents = [], [], []
    for c, (prompt, action) in enumerate(zip(prompts, actions)):
        node, path = None, []
        for depth, token in enumerate(prompt + action):
            shareable = share[c] is None or depth < share[c]
            owner = None if shareable else c  # a node with an owner is not shared
            key = (node, token, owner)
            if key not in nodes:
                nodes[key] = len(tokens)
                tokens.append(token)
                depths.append(depth)
                parents.append(node)
            node = nodes[key]
            path.append(node)
        paths.append(path)
    return tokens, depths, parents, paths


def pad(packed, length):
    """Add tokens that see only themselves, up to S = length."""
    S = len(packed.input_ids)
    if length <= S:
        return packed
    own_end = torch.arange(S + 1, length + 1, device=packed.subtree_end.device)
    return replace(
        packed,
        input_ids=F.pad(packed.input_ids, (0, length - S)),
        position_ids=F.pad(packed.position_ids, (0, length - S)),
        subtree_end=torch.cat([packed.subtree_end, own_end]),
    )


def bucket(length):
    """Round up in steps of an eighth to a quarter: FlexAttention compiles each length."""
    step = max(BLOCK, 1 << length.bit_length() >> 3)
    return -(-length // step) * step


def pack_all(prompts, actions, max_tokens, share=None, max_len=None):
    """`pack` any number of calls, in order, in packs of at most max_tokens; raises like `pack`."""
    share = share if isinstance(share, list) else [share] * len(prompts)
    packs = []
    for run in split(prompts, actions, max_tokens, share):
        packs.append(pack(prompts[run], actions[run], share[run], max_len))
    return packs


def split(prompts, actions, max_tokens, share=None):
    """Runs of calls whose packs hold at most max_tokens, by what each shares with the last."""
    share = share if isinstance(share, list) else [share] * len(prompts)
    runs, start, used, before = [], 0, 0, []
    for c, (prompt, action) in enumerate(zip(prompts, actions)):
        call = prompt + action
        if len(call) > max_tokens:
            size = f"{len(call)} tokens, over the max_tokens = {max_tokens} of a pack"
            raise ValueError(f"call {c} has {size}; raise it")
        limits = [n for n in share[max(c - 1, 0) : c + 1] if n is not None]
        parts = [before, call] + [call[:n] for n in limits]
        common = len(os.path.commonprefix(parts))  # of lists, too
        if c > start and used + len(call) - common > max_tokens:
            runs.append(slice(start, c))
            start = c
            used = common = 0
        used += len(call) - common
        before = call
    if prompts:
        runs.append(slice(start, len(prompts)))
    return runs


def pack_history(prefix, actions, observations):
    """The wrong representation, for Figure 3a: a trajectory as one growing history [q, a_0, o_0,
    ...] with running positions. (N,) fields are as in `pack` of its calls."""
    history, sampled, call_idx = [], [], []
    for c, (action, observation) in enumerate(zip(actions, observations, strict=True)):
        history += action + observation
        sampled += [True] * len(action) + [False] * len(observation)
        call_idx += [c] * len(action)
    packed = pack([prefix], [history])
    rows = torch.tensor(sampled)
    picked = {"call_idx": torch.tensor(call_idx)}
    for name in ("predict_idx", "action_ids", "action_idx"):
        picked[name] = getattr(packed, name)[rows]
    return replace(packed, **picked)


def verify(packed, prompts, actions):
    """The structural check of Eq. 3, without a model: the row that predicts a_{t,k} sees exactly
    z_t + a_{t,<k} at positions 0, 1, 2, ... Raises ValueError naming the call and what is wrong."""
    S = len(packed.input_ids)
    end = packed.subtree_end
    place = torch.arange(S, device=end.device)
    if not ((place < end) & (end <= S)).all():
        raise ValueError("visibility: a subtree_end lies before its token or after the pack")
    # how many tokens each row sees: one more where a token stands, one less where its branch ends
    sees = place + 1 - torch.bincount(end, minlength=S + 1).cumsum(0)[:-1]
    start = 0
    for c, (prompt, action) in enumerate(zip(prompts, actions, strict=True)):
        first = len(prompt)
        n = first + len(action)
        rows = slice(start, start + len(action))
        in_order = packed.call_idx[rows].tolist() == [c] * len(action)
        last = packed.action_idx[rows][-1] if in_order else 0
        path = place[(place <= last) & (last < end)]  # the call's last token with its ancestors
        for right, problem in (
            (in_order, "call_idx says otherwise (call order)"),
            (packed.action_ids[rows].tolist() == action, "action_ids are not the sampled ids"),
            (len(path) == n and sees[path].equal(place[:n] + 1),
             "visibility, a row does not see exactly the tokens before it in its call"),
            (packed.input_ids[path].tolist() == prompt + action, "input_ids are not z_t + a_t"),
            (packed.position_ids[path].equal(place[:n]), "position_ids are not 0, 1, 2, ..."),
            (packed.action_idx[rows].equal(path[first:]), "action_idx is not where a_t stands"),
            (packed.predict_idx[rows].equal(path[first - 1 : -1]), "predict_idx is off"),
        ):  # fmt: skip
            if not right:
                raise ValueError(f"call {c}: {problem}")
        start = rows.stop
    if start != len(packed.action_ids):
        raise ValueError(f"the calls have {start} action tokens, the pack {len(packed.action_ids)}")


# ---- attention: one mask, three executors --------------------------------------------------------
# query (1, heads, S, D), key and value (1, key-value heads, S, D) -> (1, heads, S, D)
sdpa = F.scaled_dot_product_attention


def attend_dense(packed, query, key, value, scale):
    """The reference: S^2 scores, most of them masked."""
    return sdpa(query, key, value, packed.dense_mask, scale=scale, enable_gqa=True)


def attend_segments(packed: Packed, query, key, value, scale):
    """SDPA for each segment over its ancestors and itself: hardly anything masked is computed."""
    lengths, plan = packed.segments
    # split, not slices: the gradient of every slice would be as long as the whole sequence
    queries, keys, values = (x.split(lengths, dim=2) for x in (query, key, value))
    out = []
    for q, (seen, mask) in zip(queries, plan):
        k = torch.cat([keys[i] for i in seen], dim=2)
        v = torch.cat([values[i] for i in seen], dim=2)
        causal = mask is None and q.shape[2] > 1
        out.append(sdpa(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=True))
    return torch.cat(out, dim=2)


@cache
def _compiled_flex():
    # past the limit, FlexAttention silently becomes a kernel that stores all S x S scores
    torch._dynamo.config.recompile_limit = 256
    return torch.compile(flex_attention, dynamic=False)


def attend_flex(packed: Packed, query, key, value, scale):
    """FlexAttention over the BlockMask. It has no backward pass on a CPU."""
    attention = _compiled_flex() if query.is_cuda else flex_attention
    return attention(query, key, value, block_mask=packed.block_mask, scale=scale, enable_gqa=True)


BACKENDS = {"dense": attend_dense, "segments": attend_segments, "flex": attend_flex}


def packed_attention(
    module, q, k, v, attention_mask=None, scaling=None, dropout=0.0, attend=None, **kwargs
):
    """transformers' attention function `packed`: `attend` over a pack, else plain SDPA."""
    layer = type(module).__name__
    refused = {"softcap": "a softcap of scores", "s_aux": "attention sinks"}
    refused |= {"sliding_window": "sliding-window attention"} if attend else {}
    for name, what in refused.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"{layer} asks for {what}, which packed attention does not compute")
    if attend is None:
        mask = attention_mask
        if mask is not None and mask.shape[-1] != k.shape[2]:
            raise ValueError(f"{layer} was not handed the pack: its model drops keyword arguments")
        return sdpa_attention_forward(module, q, k, v, mask, dropout, scaling, **kwargs)
    out = attend(q, k, v, scaling)  # (1, heads, S, D); `check_model` sees that dropout is lost
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("packed", packed_attention)
AttentionMaskInterface.register("packed", sdpa_mask)  # else padded batches lose their masks


def action_hidden(model, packed: Packed, backend: str | None = None) -> Tensor:
    """(N, H): the final hidden state at g(t,k) of every sampled token. The only place where a model
    meets a pack. backend: by default "flex" on CUDA, else "segments"; "dense" is the reference."""
    check_model(model)
    if packed.input_ids.device != model.device:
        packed = packed.to(model.device)
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 0
    if 0 < most < len(packed.input_ids) and packed.position_ids.max() >= most:
        raise ValueError(f"{type(model).__name__} has {most} positions, and a call here has more")
    backend = backend or ("flex" if packed.input_ids.is_cuda else "segments")
    if backend == "flex":
        packed = pad(packed, bucket(len(packed.input_ids)))
    # without a 4-D stand-in for a mask, transformers takes restarting positions for separate
    # documents
    stand_in = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.device)
    out = model.get_decoder()(
        input_ids=packed.input_ids[None],
        position_ids=packed.position_ids[None],
        attention_mask=stand_in,
        use_cache=False,
        attend=partial(BACKENDS[backend], packed),
    )
    return out.last_hidden_state[0, packed.predict_idx]


_exact = {mode: weakref.WeakSet() for mode in ("train", "eval")}  # what passed check_model in it


def check_model(model):
    """Measure, once for each model in each mode: two short calls must get the logits in a pack that
    they get alone (Eq. 5 in small; a body without a head: hidden states). What they are too short
    to show is read from the config. Raises ValueError naming the model and the difference."""
    passed = _exact["train" if model.training else "eval"]
    if model in passed:
        return
    passed.add(model)  # while it is measured
    problem = "it was not measured to the end"
    try:
        problem = _problem(model)
    except Exception as error:  # whatever a model's depths raise
        problem = f"its forward raises {type(error).__name__}: {error}".splitlines()[0]
    finally:
        if problem:
            passed.discard(model)
    if problem:
        raise ValueError(f"{type(model).__name__} cannot run on packs: {problem}")


@torch.no_grad()
def _problem(model):
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    if config._attn_implementation != "packed":
        return 'load it with attn_implementation="packed"'
    if head is not None and type(head) is not torch.nn.Linear:
        return f"its head is a {type(head).__name__}, not one matrix"
    ids = [i % config.vocab_size for i in range(5, 17)]
    prompts = [ids[:3], ids[:3] + ids[3:7]]
    actions = [ids[7:9], ids[9:]]
    backend = "dense" if model.device.type == "cuda" else None  # FlexAttention would compile
    packed = action_hidden(model, pack(prompts, actions, share=3), backend)
    alone = []
    for prompt, action in zip(prompts, actions):
        tokens = torch.tensor([prompt + action[:-1]], device=model.device)
        out = model(input_ids=tokens, use_cache=False)
        states = out.last_hidden_state if head is None else out.logits
        alone.append(states[0, -len(action) :])
    alone = torch.cat(alone)
    packed = packed if head is None else packed @ head.weight.T
    off = torch.where(alone.isnan(), 0, packed - alone).abs().max().item()
    largest = alone.nan_to_num().abs().max().item()
    if not off <= {torch.float64: 1e-9, torch.float32: 3e-5}.get(model.dtype, 0.05) * largest:
        problem = f"calls in a pack and alone differ by {off:.1e} of {largest:.1e}"
        return f"{problem}; does it have dropout?" if model.training else problem
    rope = str([getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")])
    if "dynamic" in rope or "longrope" in rope:
        return "its rotary frequencies depend on the longest position"
    kinds = getattr(config, "layer_types", None) or []
    reach = "index_topk|block_size" if kinds else "index_topk|block_size|attention_chunk|window"
    limits = [name for name, x in config.to_dict().items() if x and re.search(reach, name)]
    limits += sorted(set(kinds) - {"full_attention"})
    reason = "it has sliding-window, chunked or sparse attention"
    return f"{reason} ({', '.join(limits)})" if limits else None


def draw(packed, labels):
    """The mask as text, a row per token: label, position, x if sampled, and what it sees."""
    lines = ["token  pos  act   " + " ".join(f"{label:>2}" for label in labels)]
    position = packed.position_ids.tolist()
    is_action = packed.action_mask.tolist()
    for i, label in enumerate(labels):
        act = "x" if is_action[i] else " "
        sees = " ".join(" ■" if seen else " ·" for seen in packed.dense_mask[i].tolist())
        lines.append(f" {label:<5} {position[i]:>3}   {act}    {sees}")
    return "\n".join(lines)


def example():
    """The header's calls: q = 1 2, a_0 = 3 4, m_0 o_0 = 4 5, a_1 = 6 7, m_1 o_1 = 7 8, a_2 = 9."""
    prompts = [[1, 2], [1, 2, 4, 5], [1, 2, 7, 8]]
    packed = pack(prompts, [[3, 4], [6, 7], [9]], share=2)
    return packed, ["q", "q", "a0", "a0", "m0", "o0", "a1", "a1", "m1", "o1", "a2"]


def main():
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a closed pipe ends it without a word
    packed, labels = example()
    picture = draw(packed, labels)
    try:
        picture.encode(sys.stdout.encoding)
    except UnicodeEncodeError:
        picture = picture.replace("■", "#").replace("·", ".")
    print(picture, "\n")
    for field in fields(packed):
        print(f"{field.name:<13} {getattr(packed, field.name).tolist()}")


if __name__ == "__main__":
    main()
