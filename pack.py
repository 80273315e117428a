"""Memory state alignment (Section 3.3): many model calls in one sequence, each token in the exact state of its call.

A pack is the prefix tree of all calls, written in depth-first order. Then a token's position is its depth, and
what it sees are its ancestors: one integer a token, `subtree_end`, says who.

    Eq. 3   sigma_t = (z_t, rho_t, V_t, gamma_t)      input_ids, position_ids, subtree_end, predict_idx
    Eq. 4   y = [q, x_0, a_0, x_1, a_1, ...]          q stands once, positions restart, blocks do not see each other
    Eq. 6   m_act                                     only the sampled occurrence of an action is a decision

Three calls, [q] -> a_0, [q, m_0, o_0] -> a_1, [q, m_1, o_1] -> a_2, with q of two tokens (■ = row sees column):

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

Shapes: S packed length, N sampled action tokens, H hidden size. Every (N,) field is in the order of the calls given,
then k. Plain ids go in, tensors come out. Needs torch and transformers; load models with
attn_implementation="packed".

    python pack.py             # this picture, with the fields of the pack
    python pack.py --bench     # packs against the best way without (Figure 3c); --help lists sizes and devices
"""
import argparse
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, partial
from statistics import median, quantiles

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, Qwen2Config
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

BLOCK = 128  # FlexAttention's tile; several of its open faults need a length that is no multiple of it


def kept(make):
    """A property that is made when first asked for, and kept; also under inference_mode made so that a later update can
    train through it."""
    return cached_property(torch.inference_mode(False)(make))


@dataclass(frozen=True)
class Packed:
    """Calls packed into one sequence, and what its visibility looks like to each kind of attention."""
    input_ids: torch.Tensor      # (S,) y of Eq. 4
    position_ids: torch.Tensor   # (S,) rho: the position in the token's own call
    subtree_end: torch.Tensor    # (S,) V: q sees k  <=>  k <= q < subtree_end[k]
    predict_idx: torch.Tensor    # (N,) gamma, g(t,k): the row whose output predicts the token
    action_ids: torch.Tensor     # (N,) a_{t,k}
    action_idx: torch.Tensor     # (N,) m_act as a list: where the sampled token stands
    call_idx: torch.Tensor       # (N,) which of the calls given it belongs to

    @kept
    def action_mask(self) -> torch.Tensor:
        """(S,) bool, m_act of Eq. 6. In a tree two calls that sampled the same token in the same state share its
        place and stay two decisions, so the sum can be below N."""
        return torch.zeros_like(self.input_ids, dtype=torch.bool).index_fill(0, self.action_idx, True)

    @kept
    def dense_mask(self) -> torch.Tensor:
        """(S, S) bool, the readable reference: True where row q sees column k."""
        place = torch.arange(len(self.input_ids), device=self.input_ids.device)
        q, k = place[:, None], place[None, :]
        not_later, within_its_subtree = k <= q, q < self.subtree_end
        return not_later & within_its_subtree

    @kept
    def block_mask(self) -> BlockMask:
        """The same mask for FlexAttention, with no S x S work. S must be a multiple of BLOCK.

        A tile holds a visible pair if its last-ending column reaches its first row, and nothing but visible pairs if
        its first-ending column reaches past its last row."""
        S, end = len(self.input_ids), self.subtree_end
        last_end, first_end = end.view(-1, BLOCK).amax(1), end.view(-1, BLOCK).amin(1)
        column = torch.arange(S // BLOCK, device=end.device)
        row = column[:, None]
        some = (column <= row) & (last_end > row * BLOCK)  # the diagonal too: a token sees itself
        every = (column < row) & (first_end >= (row + 1) * BLOCK)

        def listed(tiles):  # for each row of tiles: how many columns, and which, those first
            order = tiles.int().argsort(dim=-1, descending=True, stable=True)
            return tiles.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]

        return BlockMask.from_kv_blocks(*listed(some & ~every), *listed(every), BLOCK_SIZE=BLOCK, seq_lengths=(S, S),
                                        mask_mod=lambda b, h, q, k: (k <= q) & (q < end[k]))

    @kept
    def segments(self) -> tuple[list[int], list[tuple[list[int], torch.Tensor | None]]]:
        """The same mask for SDPA: the lengths of the tree's segments, and for each the segments that it sees, itself
        last, with a mask. A segment is a run without a branch: its tokens see the same ancestors, and each other
        causally."""
        end = self.subtree_end
        turns = torch.nonzero(end[1:] != end[:-1])[:, 0] + 1
        bounds = torch.cat([end.new_zeros(1), turns, end]).unique()
        starts, lengths, ends = bounds[:-1].tolist(), bounds.diff().tolist(), end[bounds[:-1]].tolist()
        plan, seen = [], []
        for i, rows in enumerate(lengths):
            seen = [j for j in seen if ends[j] > starts[i]] + [i]
            columns = sum(lengths[j] for j in seen)
            mask = None  # one row sees everything; a segment without ancestors is plainly causal
            if 1 < rows < columns:
                mask = torch.ones(rows, columns, dtype=torch.bool, device=end.device).tril(columns - rows)
            plan.append((seen, mask))
        return lengths, plan

    def to(self, device: torch.device | str) -> "Packed":
        """Move; on CUDA also pad to a bucket, so that one BlockMask serves every model that reads the pack."""
        moved = Packed(*(getattr(self, f.name).to(device) for f in fields(self)))
        return pad(moved, bucket(len(moved.input_ids))) if moved.input_ids.is_cuda else moved


# ---- building a pack -------------------------------------------------------------------------------------------------

def pack(prompts: list[list[int]], actions: list[list[int]], share: int | list[int] | None = None,
         max_len: int | None = None, pad_to: int = 1) -> Packed:
    """Eq. 4 and 6: pack the calls (z_t, a_t) into their prefix tree, in depth-first order.

    share: how many leading tokens of a call (or of each) may be shared with others. len(q) is Eq. 4 to the letter; None
    shares every common prefix. The states are the same, only the cost differs. pad_to: round S up to a multiple of it.
    Raises ValueError naming the call that is empty or longer than max_len: nothing is ever cut."""
    if not prompts or len(prompts) != len(actions):
        raise ValueError("pack needs at least one call, and one action for each prompt: "
                         f"{len(prompts)} prompts, {len(actions)} actions")
    for c, (prompt, action) in enumerate(zip(prompts, actions)):
        if not prompt or not action:
            raise ValueError(f"call {c}: empty {'action' if prompt else 'prompt'}; a call needs an id of each")
        if max_len is not None and len(prompt) + len(action) > max_len:
            raise ValueError(f"call {c} has {len(prompt)} + {len(action)} tokens, over max_len = {max_len}; cutting it "
                             "would change its state: raise max_len or leave the example out")
    share = share if isinstance(share, list) else [share] * len(prompts)
    tokens, parents, paths = _prefix_tree(prompts, actions, share)

    S = len(tokens)
    size = [1] * S                         # of each node's subtree; children were made after their parents
    for node in reversed(range(S)):
        if parents[node] >= 0:
            size[parents[node]] += size[node]
    place, depth = [0] * S, [0] * S
    free = [0] * (S + 1)                   # free[n]: where the next child of n goes; free[-1]: the next root
    for node, parent in enumerate(parents):
        place[node] = free[parent]
        free[parent] += size[node]
        free[node] = place[node] + 1
        depth[node] = depth[parent] + 1 if parent >= 0 else 0

    place, size = torch.tensor(place), torch.tensor(size)
    order = place.argsort()
    # a_{t,0} is predicted by the last token of z_t, the end of q where x_t is empty: several calls may share it
    steps = [(path[n + k - 1], path[n + k], a[k], c)
             for c, (path, n, a) in enumerate(zip(paths, map(len, prompts), actions)) for k in range(len(a))]
    predict, act, action_ids, call_idx = torch.tensor(steps).T
    packed = Packed(torch.tensor(tokens)[order], torch.tensor(depth)[order], (place + size)[order],
                    place[predict], action_ids, place[act], call_idx)
    return pad(packed, -(-S // pad_to) * pad_to)


def _prefix_tree(prompts, actions, share) -> tuple[list[int], list[int], list[list[int]]]:
    """Each node's token and parent (-1 for a root), and each call's path of nodes."""
    nodes, tokens, parents, paths = {}, [], [], []
    for c, (prompt, action) in enumerate(zip(prompts, actions)):
        node, path = -1, []
        for depth, token in enumerate(prompt + action):
            owner = None if share[c] is None or depth < share[c] else c  # nobody shares a node that has an owner
            parent, node = node, nodes.setdefault((node, token, owner), len(tokens))
            if node == len(tokens):
                tokens.append(token)
                parents.append(parent)
            path.append(node)
        paths.append(path)
    return tokens, parents, paths


def pad(packed: Packed, length: int) -> Packed:
    """Add tokens that see only themselves, up to S = length."""
    extra = length - len(packed.input_ids)
    if extra <= 0:
        return packed
    own_end = torch.arange(length - extra + 1, length + 1, device=packed.subtree_end.device)
    return replace(packed, input_ids=F.pad(packed.input_ids, (0, extra)),
                   position_ids=F.pad(packed.position_ids, (0, extra)),
                   subtree_end=torch.cat([packed.subtree_end, own_end]))


def bucket(length: int) -> int:
    """Round up to a multiple of BLOCK, and of an eighth to a quarter of the length: few shapes to compile."""
    step = max(BLOCK, 1 << length.bit_length() >> 3)
    return -(-length // step) * step


def pack_history(prefixes: list[list[int]], actions: list[list[list[int]]],
                 observations: list[list[list[int]]]) -> Packed:
    """The wrong representation, for the control of Figure 3a: each trajectory as one growing history
    [q, a_0, o_0, a_1, o_1, ...] with running positions; (N,) fields as in `pack` of the calls, trajectory by
    trajectory. actions[i][t] and observations[i][t] are those of call t of trajectory i."""
    flat, sampled, call_idx, c = [], [], [], 0
    for acts, observed in zip(actions, observations, strict=True):
        flat.append([])
        for a, o in zip(acts, observed, strict=True):
            flat[-1] += a + o
            sampled += [True] * len(a) + [False] * len(o)
            call_idx += [c] * len(a)
            c += 1
    packed, rows = pack(prefixes, flat, share=0), torch.tensor(sampled)
    return replace(packed, predict_idx=packed.predict_idx[rows], action_ids=packed.action_ids[rows],
                   action_idx=packed.action_idx[rows], call_idx=torch.tensor(call_idx))


def split(prompts: list[list[int]], actions: list[list[int]], max_tokens: int,
          share: int | list[int] | None = None, fill: float = 0.85) -> list[slice]:
    """Cut the calls, in order, into runs whose packs hold at most max_tokens each; what a call shares (see `pack`) with
    the one before it counts once. Of the cuts that leave a pack at least `fill` full the one where least is shared is
    taken: between tasks rather than inside one. A single call over the budget is refused with a ValueError."""
    calls = list(map(list.__add__, prompts, actions))
    share = share if isinstance(share, list) else [share] * len(calls)
    common = [0]  # what each call has in common with the one before
    for c, (before, call) in enumerate(zip(calls, calls[1:])):
        most = min(len(before), len(call), *(s for s in share[c:c + 2] if s is not None))
        common.append(next((i for i in range(most) if call[i] != before[i]), most))
    runs, start = [], 0
    while start < len(calls):
        if len(calls[start]) > max_tokens:
            raise ValueError(f"call {start} has {len(calls[start])} tokens, over the max_tokens = {max_tokens} of a "
                             "pack; raise it")
        used = [len(calls[start])]  # by a pack that ends after this call, after the next, ...
        while start + len(used) < len(calls) and used[-1] <= max_tokens:
            c = start + len(used)
            used.append(used[-1] + len(calls[c]) - common[c])
        stop = start + len(used)
        if used[-1] > max_tokens:
            cuts = [start + n for n in range(1, len(used)) if used[n - 1] >= fill * max_tokens] or [stop - 1]
            stop = min(cuts, key=lambda c: (common[c], -c))
        runs.append(slice(start, stop))
        start = stop
    return runs


def verify(packed: Packed, prompts: list[list[int]], actions: list[list[int]]) -> None:
    """The structural check of Eq. 3, without a model: for every action token, the row that predicts it sees exactly
    z_t + a_{t,<k} at positions 0, 1, 2, ..., and the token read there is a_{t,k}. Raises ValueError naming the call and
    what is wrong; logits could only say that something is."""
    def require(ok, what):
        if not ok:
            raise ValueError(what)

    S, end = len(packed.input_ids), packed.subtree_end
    rows = torch.arange(S, device=end.device)
    require(((rows < end) & (end <= S)).all(), "visibility: a subtree_end lies before its token or after the pack")
    # how many tokens each row sees: one more from where a token stands, one less from where its branch ends
    sees = F.pad(torch.ones_like(rows), (0, 1)).index_add(0, end, -torch.ones_like(rows)).cumsum(0)[:-1]
    start = 0
    for c, (prompt, action) in enumerate(zip(prompts, actions, strict=True)):
        part, n, start = slice(start, start + len(action)), len(prompt) + len(action), start + len(action)
        require(packed.call_idx[part].tolist() == [c] * len(action), f"call {c}: call_idx says otherwise (call order)")
        require(packed.action_ids[part].tolist() == action, f"call {c}: action_ids are not the sampled ids")
        last = packed.action_idx[part][-1]
        path = rows[(rows <= last) & (last < end)]
        require(len(path) == n and sees[path].equal(rows[:n] + 1),
                f"call {c}: visibility, a row does not see exactly the tokens before it in its call")
        require(packed.input_ids[path].tolist() == prompt + action, f"call {c}: input_ids are not z_t + a_t")
        require(packed.position_ids[path].equal(rows[:n]), f"call {c}: position_ids are not 0, 1, 2, ...")
        require(packed.action_idx[part].equal(path[len(prompt):]), f"call {c}: action_idx is not where a_t stands")
        require(packed.predict_idx[part].equal(path[len(prompt) - 1:-1]), f"call {c}: predict_idx is off")
    require(start == len(packed.action_ids), f"the pack has {len(packed.action_ids)} action tokens, the calls {start}")


# ---- attention: one mask, three executors ----------------------------------------------------------------------------
# query (1, heads, S, D), key and value (1, key-value heads, S, D) -> (1, heads, S, D)

def attend_dense(packed: Packed, query, key, value, scale):
    """The reference: S^2 scores, most of them masked."""
    return F.scaled_dot_product_attention(query, key, value, attn_mask=packed.dense_mask, scale=scale, enable_gqa=True)


def attend_segments(packed: Packed, query, key, value, scale):
    """SDPA for each segment over its ancestors and itself: nothing masked is computed but its causal corner."""
    lengths, plan = packed.segments
    # split, not slices: the gradient of a slice is as long as the whole sequence, for each segment again
    queries, keys, values = (x.split(lengths, dim=2) for x in (query, key, value))
    out = []
    for q, (seen, mask) in zip(queries, plan):
        k, v = (torch.cat([x[i] for i in seen], 2) if len(seen) > 1 else x[seen[0]] for x in (keys, values))
        causal = mask is None and q.shape[2] > 1
        out.append(F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=True))
    return torch.cat(out, 2)


@cache
def _compiled_flex():
    torch._dynamo.config.recompile_limit = 256  # past it, the kernel silently becomes one that stores S x S scores
    return torch.compile(flex_attention, dynamic=False)


def attend_flex(packed: Packed, query, key, value, scale):
    """FlexAttention over the BlockMask; it has no backward on a CPU."""
    attention = _compiled_flex() if query.is_cuda else flex_attention
    return attention(query, key, value, block_mask=packed.block_mask, scale=scale, enable_gqa=True)


BACKENDS = {"dense": attend_dense, "segments": attend_segments, "flex": attend_flex}


def packed_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, pack=None, **kwargs):
    """transformers' attention function `packed`: over a pack where one is given, else SDPA with the ordinary masks."""
    for name in ("softcap", "s_aux", *(["sliding_window"] if pack else [])):
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__} asks for {name}, which packed attention does not compute")
    if pack is None and attention_mask is not None and attention_mask.shape[-1] != key.shape[2]:
        raise ValueError(f"{type(module).__name__} was not handed the pack: its model drops keyword arguments")
    if pack is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    if dropout:
        raise ValueError(f"{type(module).__name__} asks for dropout {dropout}: call model.eval() or set it to 0")
    return pack(query, key, value, scaling).transpose(1, 2).contiguous(), None


AttentionInterface.register("packed", packed_attention)
AttentionMaskInterface.register("packed", sdpa_mask)  # without it, left-padded batches lose their mask silently


def check_model(model) -> None:
    """Raise ValueError naming what in the model a pack, or the plain head of `losses.action_scores`, cannot honour."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    layer_types = getattr(config, "layer_types", None) or []
    windows = set(layer_types) - {"full_attention"} if layer_types else getattr(config, "sliding_window", None)
    dropout = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Dropout) and m.p]
    dropout += ["attention_dropout"] if getattr(config, "attention_dropout", 0) else []
    encoder = config.is_encoder_decoder or any(getattr(m, "is_causal", True) is False for m in model.modules())
    for holds, reason in (
            (config._attn_implementation != "packed", 'load it with attn_implementation="packed"'),
            (encoder, "it is an encoder, whose tokens see later ones"),
            (windows, "it has sliding-window or chunked attention"),
            (any(name.endswith(".sinks") for name, _ in model.named_parameters()), "it has attention sinks"),
            (getattr(config, "attn_logit_softcapping", None) or getattr(config, "final_logit_softcapping", None),
             "it has a softcap on scores or logits"),
            (any(getattr(config, name, None) not in (None, 1) for name in ("logit_scale", "logits_scaling")),
             "it scales its logits"),
            (getattr(model.get_output_embeddings(), "bias", None) is not None, "its head has a bias"),
            (rope.get("rope_type") in ("dynamic", "longrope"), "its rotary frequencies depend on the longest position"),
            (model.training and dropout, f"dropout ({', '.join(dropout)}) is on: set it to 0 or call model.eval()")):
        if holds:
            raise ValueError(f"{type(model).__name__} cannot run on packs: {reason}")


def action_hidden(model, packed: Packed, backend: str | None = None) -> torch.Tensor:
    """(N, H): the hidden state, after the final norm, at g(t,k) of every sampled token. The one place where a model
    meets a pack. backend: "flex" on CUDA, else "segments"; "dense" is the reference."""
    check_model(model)
    packed = packed if packed.input_ids.device == model.device else packed.to(model.device)
    backend = backend or ("flex" if packed.input_ids.is_cuda else "segments")
    if backend == "flex":
        packed = pad(packed, bucket(len(packed.input_ids)))
    # without a 4-D stand-in for a mask, transformers reads documents into the positions and cuts blocks off from q
    stand_in = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.device)
    hidden = model.base_model(
        input_ids=packed.input_ids[None], position_ids=packed.position_ids[None], attention_mask=stand_in,
        use_cache=False, pack=partial(BACKENDS[backend], packed)).last_hidden_state                     # (1, S, H)
    return hidden[0, packed.predict_idx]


# ---- the picture -----------------------------------------------------------------------------------------------------

def draw(packed: Packed, labels: list[str]) -> str:
    """The mask as text, a row a token, with its label, position, and an x where it is a sampled action."""
    lines = ["token  pos  act   " + " ".join(f"{label:>2}" for label in labels)]
    rows = zip(labels, packed.position_ids.tolist(), packed.action_mask.tolist(), packed.dense_mask.tolist())
    for label, position, is_action, sees in rows:
        lines.append(f" {label:<5} {position:>3}   {' x'[is_action]}    " + " ".join(f" {'·■'[s]}" for s in sees))
    return "\n".join(lines)


def example() -> tuple[Packed, list[str]]:
    """The calls of the header: q = 1 2, a_0 = 3 4, m_0 o_0 = 4 5, a_1 = 6 7, m_1 o_1 = 7 8, a_2 = 9."""
    packed = pack([[1, 2], [1, 2, 4, 5], [1, 2, 7, 8]], [[3, 4], [6, 7], [9]], share=2)
    return packed, ["q", "q", "a0", "a0", "m0", "o0", "a1", "a1", "m1", "o1", "a2"]


# ---- the benchmark (Figure 3c) ---------------------------------------------------------------------------------------

BENCH = {f"q {q}, {calls} calls": (q, calls) for q in (128, 300, 1024) for calls in (2, 4, 8)} | {
    "8 rollouts of one task, q 300, 4 calls": (300, 4, 8), "append-only, q 300, 8 calls": (300, 8, 1, True),
    "nothing shared, 4 calls": (0, 4), "one call, q 300": (300, 1)}


def bench_calls(q: int, calls: int, rollouts: int = 1, append_only: bool = False,
                block: int = 200) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """(prompts, actions, |q| of each call): random ids in blocks [x_t, a_t] of `block` tokens, give or take a fifth,
    half of them sampled. append_only: a call also reads all blocks before its own."""
    rng = random.Random(0)

    def ids(n):
        return [rng.randrange(1000) for _ in range(n)]
    prefix, prompts, actions = ids(q), [], []
    for _ in range(rollouts):
        context = []
        for _ in range(calls):
            length = rng.randint(block * 4 // 5, block * 6 // 5)
            x, a = ids(length - length // 2), ids(length // 2)
            prompts.append(prefix + context + x)
            actions.append(a)
            context = context + x + a if append_only else []
    return prompts, actions, [q] * len(prompts)


def bench_forms(model, prompts, actions, prefix) -> dict[str, Callable[[], Iterator[tuple[list[int], torch.Tensor]]]]:
    """The ways to score the calls: single ones in a loop, in one padded batch, in four batches sorted by length; packs
    that share q, or all that they can. Each yields, batch by batch, the calls' numbers and the hidden states at g(t,k).
    Batches are padded on the right and need no mask, where SDPA is fastest."""
    def batches(size):
        """Of `size` calls each, by length."""
        order = sorted(range(len(prompts)), key=lambda c: len(prompts[c]) + len(actions[c]))
        for start in range(0, len(order), size):
            rows = order[start:start + size]
            ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(prompts[c] + actions[c]) for c in rows], True)
            hidden = model.base_model(input_ids=ids.to(model.device), use_cache=False).last_hidden_state  # (B, L, H)
            yield rows, torch.cat([h[len(prompts[c]) - 1:][:len(actions[c])] for h, c in zip(hidden, rows)])

    def packs(share):
        yield list(range(len(prompts))), action_hidden(model, pack(prompts, actions, share).to(model.device))
    n = len(prompts)
    return {"loop": partial(batches, 1), "batch": partial(batches, n), "sorted": partial(batches, -(-n // 4)),
            "q": partial(packs, prefix), "tree": partial(packs, None)}


def bench_memory(model, run: Callable[[], None]) -> float:
    """MiB: on CUDA the peak above what was there before, elsewhere what the forward keeps for the backward."""
    if model.device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    alive, peak, parameters = {}, [0], {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor):
        """Count a storage once, and no weights."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            alive[storage.data_ptr()] = storage.nbytes()
            peak[0] = max(peak[0], sum(alive.values()))
        return tensor

    def drop(tensor):
        alive.clear()  # the backward of this batch has begun
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(keep, drop):
        run()
    return peak[0] / 2**20


def bench_work(model, packed: Packed) -> int:
    """Multiplications of a forward: the layers' weights for each token, and two products for each visible pair."""
    config, weights = model.config, sum(p.numel() for p in model.base_model.layers.parameters() if p.ndim == 2)
    pairs = (packed.position_ids + 1).sum().item()  # a token sees as many as it is deep
    head = len(packed.action_ids) * config.vocab_size * config.hidden_size
    return len(packed.input_ids) * weights + 2 * pairs * config.num_hidden_layers * config.hidden_size + head


def bench(model, rounds: int) -> Iterator[str]:
    """The lines of a Markdown table, two for each entry of BENCH. Times are paired: every round runs all forms, each
    round in another order; what is shown are medians over rounds of ratios within a round, and their quartiles."""
    yield ("| calls | shared | tokens | ratio of tokens | of work | forward: loop / batch / sorted | forward + backward"
           " | to the best | of the token ratio | MiB | max abs dlogit |")
    yield "|---" * 11 + "|"
    singles = ("loop", "batch", "sorted")
    for title, shape in BENCH.items():
        prompts, actions, prefix = bench_calls(*shape)
        forms = bench_forms(model, prompts, actions, prefix)
        ids = [torch.tensor(a, device=model.device) for a in actions]

        def run(name, backward=True):
            with torch.set_grad_enabled(backward):
                for rows, hidden in forms[name]():
                    logits = model.get_output_embeddings()(hidden).float()                      # (n, V)
                    loss = F.cross_entropy(logits, torch.cat([ids[c] for c in rows]), reduction="sum")
                    if backward:
                        loss.backward()

        def seconds(name, backward):
            model.zero_grad()
            start = time.perf_counter()
            run(name, backward)
            if model.device.type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - start

        times = {(name, backward): [] for name in forms for backward in (False, True)}
        for i in range(rounds + 1):  # the first is the warm-up
            order = list(times)
            for key in order[i % len(order):] + order[:i % len(order)]:
                times[key].append(seconds(*key))
        times = {key: t[1:] for key, t in times.items()}
        best = min(singles, key=lambda name: median(times[name, True]))
        memory = {name: bench_memory(model, partial(run, name)) for name in (best, "q", "tree")}
        logits = {name: bench_logits(model, forms[name], actions) for name in ("loop", "q", "tree")}
        alone = pack(prompts, actions, 0)
        for name, share in (("q", prefix), ("tree", None)):
            packed = pack(prompts, actions, share)
            tokens = len(alone.input_ids) / len(packed.input_ids)
            cells = [" / ".join(f"{median(a / b for a, b in zip(times[other, backward], times[name, backward])):.2f}"
                                for other in singles) for backward in (False, True)]
            low, gain, high = quantiles((a / b for a, b in zip(times[best, True], times[name, True])), n=4)
            error = (logits[name] - logits["loop"]).abs().max().item()
            yield (f"| {title} | {name} | {len(alone.input_ids)} -> {len(packed.input_ids)} | {tokens:.2f} "
                   f"| {bench_work(model, alone) / bench_work(model, packed):.2f} | {cells[0]} | {cells[1]} "
                   f"| {best} {gain:.2f} [{low:.2f}, {high:.2f}] | {gain / tokens:.0%} "
                   f"| {memory[best]:.0f} -> {memory[name]:.0f} | {error:.0e} |")


@torch.no_grad()
def bench_logits(model, form, actions) -> torch.Tensor:
    """(N, V), in the order of the calls."""
    parts = {}
    for rows, hidden in form():
        parts |= zip(rows, model.get_output_embeddings()(hidden).split([len(actions[c]) for c in rows]))
    return torch.cat([parts[c] for c in range(len(actions))]).float()


def bench_overhead(model) -> Iterator[str]:
    """What building costs: a pack with its mask against the forward and backward that it serves, and the analytic
    BlockMask against create_block_mask at S = 16,384."""
    prompts, actions, prefix = bench_calls(300, 8)

    def fastest(run, n=5):
        """Seconds, the least of n."""
        def once():
            start = time.perf_counter()
            run()
            if model.device.type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - start
        return min(once() for _ in range(n))

    def build():
        packed = pack(prompts, actions).to(model.device)
        return packed, (packed.block_mask if model.device.type == "cuda" else packed.segments)
    packed, _ = build()
    share = fastest(build) / fastest(lambda: action_hidden(model, packed).sum().backward())
    yield f"\nPack and mask of q 300, 8 calls: {share:.2%} of the forward and backward that they serve."
    prompts, actions, prefix = bench_calls(300, 64)
    long = pad(pack(prompts, actions), 16384).to(model.device)
    end, S = long.subtree_end, len(long.input_ids)
    generic = fastest(lambda: create_block_mask(lambda b, h, q, k: (k <= q) & (q < end[k]), None, None, S, S,
                                                device=end.device), 1)
    ratio = generic / fastest(lambda: replace(long).block_mask)
    yield f"BlockMask at S = {S}: create_block_mask takes {ratio:.0f} times as long as building it from the tree."


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", action="store_true", help="time a random Qwen2 on packs and without them")
    parser.add_argument("--rounds", type=int, default=5, help="of paired timings (default 5)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    for name, default in (("hidden_size", 256), ("intermediate_size", 768), ("num_hidden_layers", 4),
                          ("num_attention_heads", 4), ("num_key_value_heads", 2), ("vocab_size", 2048)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    args = parser.parse_args()
    if args.bench:
        sizes = {name: value for name, value in vars(args).items() if name in Qwen2Config().to_dict()}
        torch.manual_seed(0)
        with torch.device(args.device):
            model = AutoModelForCausalLM.from_config(
                Qwen2Config(**{**sizes, "dtype": getattr(torch, args.dtype)}), attn_implementation="packed")
        for lines in (bench(model, args.rounds), bench_overhead(model)):
            for line in lines:
                print(line, flush=True)
        return
    packed, labels = example()
    print(draw(packed, labels), "\n")
    for field in fields(packed):
        print(f"{field.name:<13} {getattr(packed, field.name).tolist()}")


if __name__ == "__main__":
    main()
