"""Memory state alignment (Section 3.3): many model calls in one sequence, each token in exactly the state of its call.

A pack is the prefix tree of all calls, written in depth-first order. Then a token's position is its depth, and it sees its
ancestors: one integer a token, `subtree_end`, says both who sees it and where its branch ends.

    Eq. 3   sigma_t = (z_t, rho_t, V_t, gamma_t): ids, position_ids, subtree_end, predict_idx
    Eq. 4   y = [q, x_0, a_0, x_1, a_1, ...]; q stands once, positions restart at |q|, blocks do not see each other
    Eq. 6   m_act: only the sampled occurrence of an action is a decision, never its copy in a later context

Three calls of one task, q = 2 tokens, Eq. 2's [q] -> a_0, [q, m_0, o_0] -> a_1, [q, m_1, o_1] -> a_2 (■ = row sees column):

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

Shapes: S packed length, N sampled action tokens, H hidden size. Every (N,) field is in the order of the calls given, then k.
Needs torch and transformers; load models with attn_implementation="packed". Plain ids go in, tensors come out.

    python pack.py        # this picture
"""
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, partial

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

BLOCK = 128  # FlexAttention's tile; several of its open faults need a length that is no multiple of it


@dataclass(frozen=True)
class Packed:
    """Calls packed into one sequence. Fields marked (N,) address sampled action tokens."""
    input_ids: torch.Tensor      # (S,) y of Eq. 4
    position_ids: torch.Tensor   # (S,) rho: the position in the token's own call
    subtree_end: torch.Tensor    # (S,) V: q sees k  <=>  k <= q < subtree_end[k]
    predict_idx: torch.Tensor    # (N,) gamma, g(t,k): the row whose output predicts the token
    action_ids: torch.Tensor     # (N,) a_{t,k}
    action_idx: torch.Tensor     # (N,) m_act as a list: where the sampled token stands
    call_idx: torch.Tensor       # (N,) which of the calls given it belongs to

    @cached_property
    def action_mask(self) -> torch.Tensor:
        """(S,) bool, m_act of Eq. 6. With the whole tree shared, equal decisions in equal states stand in one place, so its
        sum can be below N."""
        return torch.zeros_like(self.input_ids, dtype=torch.bool).index_fill(0, self.action_idx, True)

    @cached_property
    def dense_mask(self) -> torch.Tensor:
        """(S, S) bool, the readable reference: True where row q sees column k."""
        q, k = torch.meshgrid(*[torch.arange(len(self.input_ids), device=self.input_ids.device)] * 2, indexing="ij")
        not_later, in_its_subtree = k <= q, q < self.subtree_end
        return not_later & in_its_subtree

    @cached_property
    def block_mask(self) -> BlockMask:
        """The same mask for FlexAttention, with no S x S work: a tile holds a visible pair if its last-ending column reaches
        its first row, and only visible pairs if its first-ending column reaches past its last row. S must be a multiple of
        BLOCK."""
        S, end = len(self.input_ids), self.subtree_end
        tiles = torch.arange(S // BLOCK, device=end.device)
        row, column, last_end, first_end = tiles[:, None], tiles, end.view(-1, BLOCK).amax(1), end.view(-1, BLOCK).amin(1)
        some = (column <= row) & (last_end > row * BLOCK)                # the diagonal: a token always sees itself
        every = (column < row) & (first_end >= (row + 1) * BLOCK)
        def listed(tile):  # BlockMask wants, for each row of tiles, how many columns and which
            return tile.sum(-1, dtype=torch.int32)[None, None], tile.int().argsort(dim=-1, descending=True, stable=True).int()[None, None]
        return BlockMask.from_kv_blocks(*listed(some & ~every), *listed(every), BLOCK_SIZE=BLOCK, seq_lengths=(S, S),
                                        mask_mod=lambda b, h, q, k: (k <= q) & (q < end[k]))

    @cached_property
    def segments(self) -> tuple[list[int], list[tuple[list[int], torch.Tensor | None]]]:
        """The same mask for SDPA, segment by segment: their lengths, and for each the segments that it sees (itself last) and
        the mask. A segment is a run without a branch: its tokens see the same ancestors, and each other causally."""
        S, end = len(self.input_ids), self.subtree_end
        turns = torch.nonzero(end[1:] != end[:-1])[:, 0] + 1
        bounds = torch.cat([end.new_zeros(1), turns, end]).unique()
        lengths, ends, plan, ancestors = bounds.diff().tolist(), end[bounds[:-1]].tolist(), [], []
        for i, (start, rows) in enumerate(zip(bounds.tolist(), lengths)):
            ancestors = [a for a in ancestors if ends[a] > start] + [i]
            columns = sum(lengths[a] for a in ancestors)
            mask = torch.ones(rows, columns, dtype=torch.bool, device=end.device).tril(columns - rows) if 1 < rows < columns else None
            plan.append((ancestors, mask))
        return lengths, plan

    def to(self, device: torch.device | str) -> "Packed":
        """Move; on CUDA also pad to a bucket, so that one BlockMask serves every model that reads the pack."""
        moved = Packed(*(getattr(self, f.name).to(device) for f in fields(self)))
        return pad(moved, bucket(len(moved.input_ids))) if moved.input_ids.is_cuda else moved


# ---- building a pack ------------------------------------------------------------------------------------------------

def pack(prompts: list[list[int]], actions: list[list[int]], share: int | list[int] | None = None,
         max_len: int | None = None, pad_to: int = 1) -> Packed:
    """Eq. 4 and 6: pack the calls (z_t, a_t) into their prefix tree, in depth-first order.

    share: how many leading tokens of a call may be shared with others: len(q) is Eq. 4 to the letter; None shares every
    common prefix. The states are the same. pad_to: round S up to a multiple of it.
    Raises ValueError naming the call that is empty or longer than max_len: nothing is ever cut."""
    if not prompts or len(prompts) != len(actions):
        raise ValueError(f"pack needs one action for each prompt, and at least one call: {len(prompts)} prompts, {len(actions)} actions")
    share = share if isinstance(share, list) else [share] * len(prompts)
    nodes, tokens, parents, paths = {}, [], [], []
    for c, (prompt, action) in enumerate(zip(prompts, actions)):
        if not prompt or not action:
            raise ValueError(f"call {c}: empty {'action' if prompt else 'prompt'}; every call needs at least one id of each")
        if max_len is not None and len(prompt) + len(action) > max_len:
            raise ValueError(f"call {c} has {len(prompt)} + {len(action)} tokens, over max_len = {max_len}; it cannot be cut "
                             "without changing its state: raise max_len or leave the example out")
        node, path = -1, []
        for depth, token in enumerate(prompt + action):
            shared = share[c] is None or depth < share[c]
            node, parent = nodes.setdefault((node, token, -1 if shared else c), len(tokens)), node
            if node == len(tokens):
                tokens.append(token)
                parents.append(parent)
            path.append(node)
        paths.append(path)

    S = len(tokens)
    size = [1] * S                       # of each subtree; children come after their parents
    for node in range(S - 1, -1, -1):
        if parents[node] >= 0:
            size[parents[node]] += size[node]
    place, free, depth = [0] * S, [0] * (S + 1), [0] * S   # free[parent]: where its next child goes; free[-1] is for the roots
    for node, parent in enumerate(parents):
        place[node] = free[parent]
        free[parent] += size[node]
        free[node] = place[node] + 1
        depth[node] = depth[parent] + 1 if parent >= 0 else 0

    at = torch.tensor(place)
    end = at + torch.tensor(size)
    order = at.argsort()
    steps = [(node, following, token, c) for c, (path, action) in enumerate(zip(paths, actions))
             for node, following, token in zip(path[-len(action) - 1:], path[-len(action):], action)]
    predict, act, action_ids, call_idx = torch.tensor(steps).T
    packed = Packed(torch.tensor(tokens)[order], torch.tensor(depth)[order], end[order], at[predict], action_ids, at[act], call_idx)
    return pad(packed, -(-S // pad_to) * pad_to)


def pad(packed: Packed, length: int) -> Packed:
    """Add tokens that only see themselves, up to S = length."""
    extra = length - len(packed.input_ids)
    if extra <= 0:
        return packed
    own_end = torch.arange(length - extra + 1, length + 1, device=packed.subtree_end.device)
    return replace(packed, input_ids=F.pad(packed.input_ids, (0, extra)), position_ids=F.pad(packed.position_ids, (0, extra)),
                   subtree_end=torch.cat([packed.subtree_end, own_end]))


def pack_history(prefixes: list[list[int]], actions: list[list[list[int]]], observations: list[list[list[int]]],
                 max_len: int | None = None) -> Packed:
    """The wrong representation, for the control of Figure 3a: each trajectory as one growing history
    [q, a_0, o_0, a_1, o_1, ...] with running positions. Same (N,) order as `pack` of the calls, trajectory by trajectory."""
    flat, sampled, calls, n_calls = [], [], [], 0
    for acts, observed in zip(actions, observations, strict=True):
        flat.append([i for a, o in zip(acts, observed, strict=True) for i in a + o])
        sampled += [is_action for a, o in zip(acts, observed) for is_action in [True] * len(a) + [False] * len(o)]
        calls += [n_calls + t for t, a in enumerate(acts) for _ in a]
        n_calls += len(acts)
    packed, keep = pack(prefixes, flat, share=0, max_len=max_len), torch.tensor(sampled)
    return replace(packed, predict_idx=packed.predict_idx[keep], action_ids=packed.action_ids[keep],
                   action_idx=packed.action_idx[keep], call_idx=torch.tensor(calls))


def split(prompts: list[list[int]], actions: list[list[int]], max_tokens: int) -> list[slice]:
    """Cut the calls, in order, into runs whose packs hold at most max_tokens each (counting what a call shares with the one
    before it once). A single call over the budget is refused."""
    runs, start, used, before = [], 0, 0, []
    for c, call in enumerate(map(list.__add__, prompts, actions)):
        if len(call) > max_tokens:
            raise ValueError(f"call {c} has {len(call)} tokens, over max_tokens = {max_tokens} of a pack; raise it")
        common = next((i for i, (a, b) in enumerate(zip(call, before)) if a != b), min(len(call), len(before)))
        if used + len(call) - common > max_tokens:
            runs.append(slice(start, c))
            start, used, common = c, 0, 0
        used, before = used + len(call) - common, call
    return [*runs, slice(start, len(prompts))]


def verify(packed: Packed, prompts: list[list[int]], actions: list[list[int]]) -> None:
    """The structural check of Eq. 3, without a model: for every action token, the row that predicts it sees exactly
    z_t + a_{t,<k} at positions 0, 1, 2, ..., and the token read there is a_{t,k}. Raises ValueError naming what is wrong."""
    rows, S = torch.arange(len(packed.input_ids), device=packed.input_ids.device), len(packed.input_ids)
    if not ((rows < packed.subtree_end) & (packed.subtree_end <= S)).all():
        raise ValueError("visibility: a token's subtree_end is not between itself and the end of the pack")
    # how many tokens each row sees: +1 from where a token stands, -1 from where its branch ends
    seen = F.pad(torch.ones_like(rows), (0, 1)).index_add(0, packed.subtree_end, -torch.ones_like(rows)).cumsum(0)[:-1]
    start = 0
    for c, (prompt, action) in enumerate(zip(prompts, actions, strict=True)):
        part, start, n = slice(start, start + len(action)), start + len(action), len(prompt) + len(action)
        def require(ok, what):
            if not ok:
                raise ValueError(f"call {c}: {what}")
        require(packed.call_idx[part].tolist() == [c] * len(action), "its action tokens are not where call_idx says (call order)")
        require(packed.action_ids[part].tolist() == action, "action_ids are not the sampled ids")
        last = packed.action_idx[part][-1]
        path = rows[(rows <= last) & (last < packed.subtree_end)]
        require(len(path) == n and (seen[path] == rows[:n] + 1).all(), "visibility: a row does not see exactly its own call's tokens")
        require(packed.input_ids[path].tolist() == prompt + action, "input_ids on its path are not z_t + a_t")
        require(packed.position_ids[path].tolist() == list(range(n)), "position_ids are not 0, 1, 2, ...")
        require(torch.equal(packed.action_idx[part], path[len(prompt):]), "action_idx does not point at the sampled tokens")
        require(torch.equal(packed.predict_idx[part], path[len(prompt) - 1:-1]), "predict_idx is not the row before the token")
    if start != len(packed.action_ids):
        raise ValueError(f"the pack has {len(packed.action_ids)} action tokens, the calls {start}")


# ---- attention ------------------------------------------------------------------------------------------------------

def attend_dense(packed, query, key, value, scale):
    return F.scaled_dot_product_attention(query, key, value, attn_mask=packed.dense_mask, scale=scale, enable_gqa=True)


def attend_segments(packed, query, key, value, scale):
    """Nothing masked is ever computed, but for the causal corner of each segment."""
    lengths, plan = packed.segments
    queries, keys, values = (x.split(lengths, dim=2) for x in (query, key, value))
    out = []
    for q, (seen, mask) in zip(queries, plan):
        k, v = (torch.cat([pieces[i] for i in seen], 2) if len(seen) > 1 else pieces[seen[0]] for pieces in (keys, values))
        out.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True,
                                                  is_causal=mask is None and q.shape[2] > 1))
    return torch.cat(out, 2)


@cache
def _compiled_flex():
    torch._dynamo.config.recompile_limit = 256  # past it, the kernel silently becomes one that stores S x S scores
    return torch.compile(flex_attention, dynamic=False)


def attend_flex(packed, query, key, value, scale):
    attention = _compiled_flex() if query.is_cuda else flex_attention
    return attention(query, key, value, block_mask=packed.block_mask, scale=scale, enable_gqa=True)


BACKENDS = {"dense": attend_dense, "segments": attend_segments, "flex": attend_flex}


def packed_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, pack=None, **kwargs):
    """The attention function `packed`: over a pack where one is given, else SDPA with transformers' ordinary masks."""
    refused = ["softcap", "s_aux"] + (["sliding_window"] if pack is not None else [])
    for name in refused:
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__} asks for {name}, which the packed attention does not compute; use another model")
    if pack is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    if dropout:
        raise ValueError(f"{type(module).__name__} asks for dropout = {dropout}: call model.eval() or set attention_dropout to 0")
    return pack(query, key, value, scaling).transpose(1, 2).contiguous(), None


AttentionInterface.register("packed", packed_attention)
AttentionMaskInterface.register("packed", sdpa_mask)  # without it, left-padded batches lose their mask silently


def check_model(model) -> None:
    """Raise ValueError naming what in the model a pack, or the plain head of `losses.action_scores`, cannot honour."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    layer_types = getattr(config, "layer_types", None) or []
    dropout = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Dropout) and m.p]
    dropout += [name for name in ("attention_dropout", "attn_pdrop") if getattr(config, name, 0)]
    reasons = {
        'its attention is not "packed": load it with attn_implementation="packed"': config._attn_implementation != "packed",
        "it is an encoder: its tokens see later ones": config.is_encoder_decoder or any(
            getattr(m, "is_causal", True) is False for m in model.modules()),
        "sliding-window or chunked attention": any(kind != "full_attention" for kind in layer_types)
            or not layer_types and getattr(config, "sliding_window", None),
        "attention sinks": any(name.endswith(".sinks") for name, _ in model.named_parameters()),
        "a score or logit softcap": any(getattr(config, n, None) for n in ("attn_logit_softcapping", "final_logit_softcapping")),
        "a head with a bias": getattr(model.get_output_embeddings(), "bias", None) is not None,
        "scaled logits": any(getattr(config, n, 1) not in (1, None) for n in ("logit_scale", "logits_scaling")),
        "rotary frequencies that depend on the longest position": rope.get("rope_type") in ("dynamic", "longrope"),
        f"dropout ({', '.join(dropout)}) in training mode: set it to 0 or call model.eval()": model.training and dropout}
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(f"{type(model).__name__} cannot run on packs: {reason}")


def bucket(length: int) -> int:
    """Round a packed length up to one of four a power of two, all multiples of BLOCK: few shapes compile, and few tokens are lost."""
    step = max(BLOCK, 1 << max(length - 1, 1).bit_length() >> 3)
    return -(-length // step) * step


def action_hidden(model, packed: Packed, backend: str | None = None) -> torch.Tensor:
    """(N, H): the hidden state at g(t,k) of every sampled action token, after the final norm. The one place where a model
    meets a pack. backend: "flex" on CUDA and "segments" elsewhere by default; "dense" is the reference."""
    check_model(model)
    packed = packed if packed.input_ids.device == model.device else packed.to(model.device)
    backend = backend or ("flex" if packed.input_ids.is_cuda else "segments")
    if backend == "flex":
        packed = pad(packed, bucket(len(packed.input_ids)))
    # the 4-D stand-in for a mask keeps transformers from reading documents into the positions, which would cut blocks off from q
    hidden = model.base_model(
        input_ids=packed.input_ids[None], position_ids=packed.position_ids[None], use_cache=False, pack=partial(BACKENDS[backend], packed),
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.device)).last_hidden_state
    return hidden[0, packed.predict_idx]


# ---- the picture ----------------------------------------------------------------------------------------------------

def draw(packed: Packed, labels: list[str]) -> str:
    """The mask as text, a row a token, with each token's label, position and whether it is a sampled action."""
    rows = ["token  pos  act   " + " ".join(f"{label:>2}" for label in labels)]
    for label, position, is_action, seen in zip(labels, packed.position_ids.tolist(), packed.action_mask.tolist(), packed.dense_mask.tolist()):
        rows.append(f" {label:<5} {position:>3}   {'x' if is_action else ' '}    " + " ".join(" ■" if s else " ·" for s in seen))
    return "\n".join(line.rstrip() for line in rows)


def example() -> tuple[Packed, list[str]]:
    """The three calls of the header: q = 1 2, a_0 = 3 4, x_1 = m_0 o_0 = 4 5, a_1 = 6 7, x_2 = m_1 o_1 = 7 8, a_2 = 9."""
    packed = pack([[1, 2], [1, 2, 4, 5], [1, 2, 7, 8]], [[3, 4], [6, 7], [9]], share=2)
    return packed, ["q", "q", "a0", "a0", "m0", "o0", "a1", "a1", "m1", "o1", "a2"]


def main():
    packed, labels = example()
    print(draw(packed, labels))
    for name, value in (("input_ids", packed.input_ids), ("subtree_end", packed.subtree_end), ("predict_idx", packed.predict_idx),
                        ("action_idx", packed.action_idx), ("action_ids", packed.action_ids), ("call_idx", packed.call_idx)):
        print(f"{name:<12} {value.tolist()}")


if __name__ == "__main__":
    main()
